"""Measures of sink tokens, told by massive activations, and of heads that look at an image (or any span of tokens).

x_s `[D]` is what enters a layer at token s; a few channels of sink tokens are tens of times the root mean square of
all. Source: Kang et al. 2025 (See What You Are Told), arXiv 2503.03321.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.core.mask import Rule, cols_of
from manyheads.inspect.ablate import Inputs, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.edit import Tokens, check_tokens, places
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import HeadTable, Sums
from manyheads.inspect.stream import blocks_of


def sink_values(x: Tensor, channels: Sequence[int]) -> Tensor:
    """φ(s) = max over the channels d of |x_s[d]| / √(mean x_s²), of `[…, D]`; at most √D, whatever the size of x."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    size = x.square().mean(-1, keepdim=True).sqrt()
    ratio = x.abs() / size.clamp_min(torch.finfo(x.dtype).tiny)
    return ratio[..., list(channels)].amax(-1)


@contextmanager
def entering(layers: Sequence[Layer], model: nn.Module, seen: Callable[[Layer, Tensor], None]) -> Iterator[None]:
    """Call a function with what enters the block of each layer, `[B, T, D]`, before the layer runs."""

    def hook(layer: Layer) -> Callable[..., None]:
        def see(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen(layer, (args[0] if args else kwargs["hidden_states"]).detach())

        return see

    with ExitStack() as stack:
        for layer, block in zip(layers, blocks_of(model, layers), strict=True):
            stack.callback(block.register_forward_pre_hook(hook(layer), with_kwargs=True).remove)
        yield


def sink_channels(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], layers: int | Iterable[int] | None = None, *,
    level: float = 20.0, token: int = 0, share: float = 0.5,
) -> list[int]:  # fmt: skip
    """The channels in which a model's first token is a sink: above `level` times its root mean square.

    In at least this share of layers and texts; default all layers but the first two and the last, where sinks have not
    formed or are gone. The rule is ASSUMED. Published channels are constants of a model (Llama-2-7B: 1415 and 2533).
    """
    some = chosen(model, layers)
    some = some[2:-1] if layers is None and len(some) > 3 else some
    hits, count = torch.zeros(()), 0

    def see(layer: Layer, x: Tensor) -> None:
        nonlocal hits, count
        x = x[:, token].double().cpu()
        hits = hits + (x.abs() > level * x.square().mean(-1, keepdim=True).sqrt()).double().sum(0)
        count += len(x)

    with torch.no_grad(), entering(some, model, see):
        for batch in batches_of(inputs):
            run(model, batch)
    return (hits >= share * max(1, count)).nonzero().flatten().tolist() if count else []


@dataclass(frozen=True, eq=False)
class VisualHeads:
    """By head, over the queries after the image: `image` m, the mass on it; `sinks` π, the share of m on its sink
    tokens; `text_sinks`, the mass on sinks outside it; `centred`, the share of queries at which the head looks at the
    image proper (m and π as `redistribute` asks). values: φ `[B, T]` of each layer, batches in a list."""

    image: HeadTable
    sinks: HeadTable
    text_sinks: HeadTable
    centred: HeadTable
    values: dict[int, list[Tensor]]


def visual_heads(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], image: Tokens, channels: Sequence[int],
    layers: int | Iterable[int] | None = None, *, level: float = 20.0, least: float = 0.2, most: float = 0.5,
) -> VisualHeads:  # fmt: skip
    """Which heads look at an image, and how much of that at sink tokens in it.

    Args:
        image: which tokens are the image's (bool `[B, N]` where they differ; then one batch at a time).
        channels: of sinks (see `sink_channels`). level: φ from which a token is one. least, most: m ≥ least and
            π ≤ most make a head image-centred at a query.
    """
    check_tokens(image, "the image")
    some = [layer for layer in chosen(model, layers) if not layer.none]
    names = ("image", "sinks", "text_sinks", "centred")
    sums = {name: Sums() for name in names}
    values: dict[int, list[Tensor]] = {layer.number: [] for layer in some}
    newest: dict[int, Tensor] = {}

    def enter(layer: Layer, x: Tensor) -> None:
        newest[layer.number] = sink_values(x, channels)
        values[layer.number].append(newest[layer.number].cpu())

    def see(look: Look) -> None:
        keys = look.mask.k
        phi = newest[look.layer]
        if phi.shape[1] != keys.length:
            raise ValueError(f"{look.name} has {keys.length} keys for {phi.shape[1]} tokens; pass the text whole")
        seen, sink = places(image, keys), phi > level

        def mass(where: Tensor) -> Tensor:
            rule: Rule = lambda q, k: cols_of(where)
            return look.mass(rule).nan_to_num(0.0)

        m, on = mass(seen), mass(seen & sink)
        share = torch.where(m > 0, on / m.clamp_min(torch.finfo(m.dtype).tiny), torch.nan)
        last = torch.where(seen, keys.time, -1).amax(-1, keepdim=True)
        counts = ((look.axis.time > last) & look.axis.validity)[:, None]
        centred = ((m >= least) & (share <= most)).to(m.dtype)
        for name, value in zip(names, (m, share, mass(sink & ~seen), centred), strict=True):
            sums[name].add(look.layer, value, counts)

    with torch.no_grad(), entering(some, model, enter), watching(some, see):
        for batch in batches_of(inputs):
            run(model, batch)
    image_mass, share, text, centred = (sums[name].table(name) for name in names)
    return VisualHeads(image_mass, share, text, centred, values)


__all__ = ["VisualHeads", "entering", "sink_channels", "sink_values", "visual_heads"]
