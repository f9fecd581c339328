"""The attention that heads waste on sink tokens of an image goes to the rest of the image, while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis, cols_of, rows_of
from manyheads.core.tap import Tap
from manyheads.inspect.edit import Edit, Tokens, check_maps, check_tokens, places, programmed, standing_by
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.measures.visual import entering, sink_values


@dataclass(frozen=True, eq=False)
class Redistributed(Edit):
    """sinks, image: which keys are, bool `[B or 1, S]`. rows: which queries are changed, `[B or 1, T]`."""

    sinks: Tensor
    image: Tensor
    rows: Tensor
    kept: float
    least: float
    most: float

    def __str__(self) -> str:
        return "redistributed attention"

    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor:
        sink, image = (cols_of(x[:, : weights.shape[-1]]) for x in (self.sinks, self.image))
        rest, tiny = image & ~sink, torch.finfo(weights.dtype).tiny
        seen, on, proper, lost = ((weights * x).sum(-1, keepdim=True) for x in (image, image & sink, rest, sink))
        some = (image & sink).any(-1, keepdim=True)
        centred = (seen >= self.least) & (on <= self.most * seen) & (proper > 0) & some & rows_of(self.rows[:, rows])
        budget = (1 - self.kept) * lost
        new = torch.where(sink, self.kept * weights, weights * (1 + rest * (budget / proper.clamp_min(tiny))))
        return torch.where(centred, new, weights)


class _Sinks:
    """Which tokens are sinks at one layer, remembered for later passes that read the cache."""

    def __init__(self) -> None:
        self.flags: Tensor | None = None
        self.newest: Tensor | None = None

    def of(self, queries: Axis, keys: int) -> Tensor | None:
        """For all keys `[B, S]`."""
        new, old = self.newest, self.flags
        if new is None:
            return None
        goes_on = old is not None and len(old) == len(new) and keys == old.shape[1] + queries.length
        self.flags = torch.cat([old, new], 1) if goes_on and old is not None and keys > queries.length else new
        if self.flags.shape[1] != keys:
            raise ValueError(
                f"there are {keys} keys and {self.flags.shape[1]} tokens seen; begin with a pass of the whole prompt"
            )
        return self.flags


class _Redistribute(Tap):
    def __init__(self, layer: Layer, sinks: _Sinks, image: Tokens, kept: float, least: float, most: float) -> None:
        self.layer, self.sinks, self.image = layer, sinks, image
        self.options = kept, least, most

    def ask(self, call: Call, flow: Flow | None) -> Call:
        q, k = call.mask.q, call.mask.k
        sinks = self.sinks.of(q, k.length)
        if sinks is None:
            return call
        image = places(self.image, k)
        last = torch.where(image, k.time, -1).amax(-1, keepdim=True)
        rows = (q.time > last) & (last >= 0)
        if not rows.any() or not (sinks & image).any() or self.options[0] == 1:
            return call
        return programmed(self.layer, call, flow, Redistributed(sinks, image, rows, *self.options))


@contextmanager
def redistribute(
    model: nn.Module, image: Tokens, channels: Sequence[int], layers: int | Iterable[int] | None = None, *,
    level: float = 20.0, kept: float = 0.6, least: float = 0.2, most: float = 0.5,
) -> Iterator[None]:  # fmt: skip
    """Where a head looks at an image, hand part of what it gives to sinks over to the image's other tokens.

    >>> with redistribute(model, slice(5, 581), channels=[1415, 2533]):
    ...     model.generate(**inputs)

    Token s is a sink of a layer if φ(s) > level (`measures.sink_values` of what enters the layer). At query t after the
    image, head h is image-centred if its mass on the image is m ≥ least, of which at most the share `most` on sinks.
    Then A_s ← kept · A_s for all sinks, of text too, and what they lose goes to the image's other tokens, in
    proportion to their own weights. Rows still sum to 1. Layers without a sink in the image stay as they are.

    Args:
        image: its tokens; bool `[B, N]` where sequences differ. Any span of text may take its place.
        channels: in which sinks stand out: constants of a model, see `measures.sink_channels`.
        layers: default all but the first two and the last.

    Raises:
        ValueError: numbers that are no shares, layers without one map a head, a block that begins inside a cache.

    Source: Kang et al. 2025, arXiv 2503.03321.
    """
    check_tokens(image, "the image")
    shares = {"kept": kept, "least": least, "most": most}
    wrong = [f"{name}={x}" for name, x in shares.items() if not 0 <= x <= 1]
    if wrong or not channels or level <= 0:
        raise ValueError(f"{', '.join(wrong) or f'channels={channels}, level={level}'}: shares are in [0, 1], level "
                         "above 0, and channels one or more")  # fmt: skip
    some = chosen(model, layers)
    if layers is None:
        some = some[2:-1]
        if not some:
            raise ValueError("the first two layers and the last are left alone, and there are no others; give layers")
    check_maps(some)
    sinks = {layer.number: _Sinks() for layer in some}

    def enter(layer: Layer, x: Tensor) -> None:
        sinks[layer.number].newest = sink_values(x, channels) > level

    def make(layer: Layer) -> Tap:
        return _Redistribute(layer, sinks[layer.number], image, kept, least, most)

    with entering(some, model, enter), standing_by(some, make):
        yield


__all__ = ["redistribute"]
