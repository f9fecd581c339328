"""How much of what a model's output depends on its cross-attention shows: maps of both, and their correlation.

An encoder's input X `[T, F]` (frames and channels), its states H `[T', D]`, tokens i = 0 … I - 1 of an output that is
read back (teacher forcing). Source: arXiv 2509.18010; how cells are masked and rows normalised is ASSUMED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.inspect.ablate import Inputs, run
from manyheads.inspect.capture import capture
from manyheads.inspect.layers import Layer, layers_of

Score = Callable[[Tensor], Tensor]
"""From inputs `[n, …]` to each output token's probability `[n, I]`, or to its distribution `[n, I, V]`."""
_CROSS = ("encoder_attn", "encdecattention", "crossattention", "cross_attn", "cross_attention")


def cross_layers(model: nn.Module) -> list[Layer]:
    """The layers whose keys come from an encoder.

    Raises:
        ValueError: there is none.
    """
    found = [layer for layer in layers_of(model) if _crosses(layer)]
    if not found:
        raise ValueError(f"a {type(model).__name__} has no layer of cross-attention")
    return found


def _crosses(layer: Layer) -> bool:
    module = layer.module
    if isinstance(module, Attention):
        return module.site.cross
    return getattr(module, "is_cross_attention", None) is True or any(x in layer.name.lower() for x in _CROSS)


def cross_maps(model: nn.Module, inputs: Inputs) -> dict[int, Tensor]:
    """The cross-attention of each layer, `[B, H, I, T']`, on inputs that hold the output to be read back."""
    with torch.no_grad(), capture(model, layers=[layer.number for layer in cross_layers(model)]) as tape:
        run(model, inputs)
    return {number: tape[number].weights for number in tape}  # type: ignore[misc]


def mean_map(maps: Mapping[int, Tensor], heads: Mapping[int, Iterable[int] | None] | None = None) -> Tensor:
    """The mean map `[B, I, T']` of some heads by layer (None: all of it; default all layers)."""
    picked = dict.fromkeys(maps) if heads is None else heads
    if not picked or any(layer not in maps for layer in picked):
        raise ValueError(f"heads of layers {[*picked]}; there are maps of layers {[*maps]}")
    each = [maps[layer] if of is None else maps[layer][:, list(of)] for layer, of in picked.items()]
    return torch.cat(each, 1).mean(1)


def cell_masks(
    shape: Sequence[int], count: int, *, sizes: Sequence[int] = (1, 2, 4), share: float = 0.3, seed: int = 0
) -> Tensor:
    """Random masks `[count, *shape]`, True where a cell is hidden: blocks of several sizes, one size a mask."""
    check_whole(count=count)
    if not sizes or min(sizes) < 1 or not 0 < share < 1:
        raise ValueError(f"sizes={list(sizes)}, share={share}; blocks of 1 cell or more, a share between 0 and 1")
    generator, found = torch.Generator().manual_seed(seed), []
    for n in range(count):
        size = sizes[n % len(sizes)]
        mask = torch.rand([ceil(side / size) + 1 for side in shape], generator=generator) < share
        for dim, side in enumerate(shape):
            start = int(torch.randint(size, (), generator=generator))
            mask = mask.repeat_interleave(size, dim).narrow(dim, start, side)
        found.append(mask)
    return torch.stack(found)


def perturbation(
    score: Score, x: Tensor, masks: Tensor, *, baseline: float | Tensor = 0.0, batch: int = 64
) -> Tensor:  # fmt: skip
    """The relevance of each cell of x for each output token, `[I, *x.shape]`: what hiding it changes in the mean.

    Of probabilities `[n, I]`, p - p_masked; of distributions `[n, I, V]`, KL(p ‖ p_masked), in nats.

    Args:
        masks: `[N, *x.shape]`, True where x is hidden behind the baseline; each cell must be hidden at least once.
    """
    if masks.dtype != torch.bool or masks.shape[1:] != x.shape:
        raise ValueError(f"masks are bool [N, {', '.join(map(str, x.shape))}], not {masks.dtype} {[*masks.shape]}")
    times = masks.sum(0)
    if not times.all():
        raise ValueError(f"{int((times == 0).sum())} of {times.numel()} cells are never hidden; give more masks")
    total = None
    with torch.no_grad():
        plain = score(x[None]).double()
        for some in masks.split(batch):
            changed = score(torch.where(some, torch.as_tensor(baseline).to(x), x)).double()
            if changed.ndim == 3:
                drop = (torch.special.xlogy(plain, plain) - torch.special.xlogy(plain, changed.clamp_min(1e-300))).sum(
                    -1
                )
            else:
                drop = plain - changed
            part = drop.T @ some.flatten(1).double()
            total = part if total is None else total + part
    assert total is not None
    return total.unflatten(1, x.shape) / times


def gradient_saliency(score: Score, x: Tensor) -> Tensor:
    """Gradient times input of each output token's probability, `[I, *x.shape]`: a cheap stand-in, a pass a token."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        p = score(leaf[None])
        if p.ndim != 2:
            raise ValueError(f"gradients are of probabilities [1, I], not {[*p.shape]}")
        each = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in p[0]]
    return torch.stack(each) * x


def to_frames(saliency: Tensor, frames: int, how: Literal["max", "mean"] = "max") -> Tensor:
    """Saliency `[I, T, …]` of T inputs to that of T' frames, `[I, T']`: the largest (or mean) of what it covers."""
    if not 1 <= frames <= saliency.shape[1]:
        raise ValueError(f"{saliency.shape[1]} inputs do not make {frames} frames")
    wide = saliency.flatten(2) if saliency.ndim > 2 else saliency[..., None]
    one = wide.amax(-1) if how == "max" else wide.mean(-1)
    return (F.adaptive_max_pool1d if how == "max" else F.adaptive_avg_pool1d)(one, frames)  # type: ignore[return-value]


def explained(one: Tensor, other: Tensor, rows: Literal["z", "sum", "none"] = "z") -> float:
    """Pearson's r of two maps `[I, T']`, each row first standardised (`z`), divided by its `sum`, or left: in [-1, 1].

    0 where a map has no variance. Average it over texts.
    """
    if one.shape != other.shape or one.ndim != 2:
        raise ValueError(f"maps [I, T'] of one shape, not {[*one.shape]} and {[*other.shape]}; `to_frames` fits them")
    a, b = (_rows(x.double(), rows).flatten() for x in (one, other))
    a, b = a - a.mean(), b - b.mean()
    size = a.norm() * b.norm()
    return float((a @ b / size).clamp(-1, 1)) if size > 0 else 0.0


def _rows(x: Tensor, how: str) -> Tensor:
    if how == "none":
        return x
    if how == "sum":
        total = x.sum(-1, keepdim=True)
        return torch.where(total.abs() > 0, x / torch.where(total == 0, 1.0, total), 0.0)
    x = x - x.mean(-1, keepdim=True)
    size = x.square().mean(-1, keepdim=True).sqrt()
    even = size <= 1e-12 * (x.abs().amax() + 1e-300)
    return torch.where(even, 0.0, x / torch.where(even, 1.0, size))


def deletion(
    quality: Callable[[Tensor], Tensor], x: Tensor, relevance: Tensor, *, steps: int = 10,
    baseline: float | Tensor = 0.0,
) -> float:  # fmt: skip
    """The area under the drop of quality while frames are removed, most relevant first: high for a faithful map.

    Args:
        quality: from inputs `[n, T, …]` to `[n]`. relevance: of each frame, `[T]`. steps: how many times frames are
            removed, about equally many each time.
    """
    check_whole(steps=steps)
    if relevance.shape != x.shape[:1]:
        raise ValueError(f"{[*relevance.shape]} relevances for {x.shape[0]} frames")
    order = relevance.argsort(descending=True, stable=True).argsort()
    counts = torch.linspace(0, len(x), steps + 1).round()
    hidden = (order[None] < counts[:, None]).view(steps + 1, -1, *[1] * (x.ndim - 1))
    with torch.no_grad():
        found = quality(torch.where(hidden, torch.as_tensor(baseline).to(x), x)).double()
    return float(torch.trapezoid(found[0] - found, counts.double() / len(x)))


__all__ = [
    "cell_masks", "cross_layers", "cross_maps", "deletion", "explained", "gradient_saliency", "mean_map",
    "perturbation", "to_frames",
]  # fmt: skip
