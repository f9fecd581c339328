"""What interventions on maps share: a score program that is put into the passes of some layers, and sets of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Term
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap
from manyheads.inspect.layers import Layer, attach_all, followed

Tokens = slice | Sequence[int] | Tensor
"""A set of tokens, counted from the first of a sequence: a slice, numbers, or bool `[N]` or `[B, N]`."""


def places(tokens: Tokens, axis: Axis) -> Tensor:
    """Which rows of an axis are in a set of tokens, bool `[B or 1, S]`; rows beyond a bool tensor are not."""
    time = axis.time
    if isinstance(tokens, slice):
        last = torch.inf if tokens.stop is None else tokens.stop
        return (time >= (tokens.start or 0)) & (time < last)
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.bool:
        return torch.isin(time, torch.as_tensor(tokens, device=time.device))
    table = tokens.to(time.device).reshape(-1, tokens.shape[-1])
    batch = max(len(table), len(time))
    known = (time >= 0) & (time < table.shape[1])
    at = time.clamp(0, table.shape[1] - 1).expand(batch, -1)
    return table.expand(batch, -1).gather(1, at) & known


def check_tokens(tokens: Tokens, what: str) -> None:
    """That it is a set of tokens, and not an empty one.

    Raises:
        ValueError: it counts from the end, or holds nothing.
    """
    if isinstance(tokens, slice):
        first, last = tokens.start or 0, tokens.stop
        bad = tokens.step not in (None, 1) or first < 0 or (last is not None and last <= first)
    elif isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        bad = tokens.ndim not in (1, 2) or not tokens.any()
    else:
        numbers = torch.as_tensor(tokens)
        bad = numbers.ndim != 1 or not len(numbers) or numbers.is_floating_point() or bool((numbers < 0).any())
    if bad:
        raise ValueError(
            f"{what} {tokens!r} is no set of tokens: slice(3, 9), [3, 4, 5] or a bool tensor [N] or [B, N], "
            "counted from the first token, with one token at least"
        )


def flags(heads: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Which of a layer's heads are chosen, bool `[H, 1, 1]`."""
    chosen = torch.zeros(count, 1, 1, dtype=torch.bool, device=device)
    chosen[list(heads)] = True
    return chosen


class Edit:
    """A score program that leaves everything as it is; subclasses change one hook (`core/kernel.py:ScoreProgram`).

    Keys come as the first `[…, :S]` of the call's, S by the last dimension of what a hook is given.
    """

    halo: int = 0
    maps: int = 1
    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return "edited attention"

    def scores(self, q: Tensor, k: Tensor, scale: float) -> None:
        return None

    def before(self, scores: Tensor, visible: Tensor, rows: slice) -> Tensor:
        return scores

    def normalise(self, scores: Tensor, visible: Tensor) -> None:
        return None

    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor:
        return weights

    def read(self, weights: Tensor, call: Call, rows: slice) -> None:
        return None


def check_one_map(layer: Layer, call: Call, flow: Flow | None, where: str) -> Call:
    """The one problem that parts make of a layer's; a layer whose heads have no one map of scores is refused."""
    if not isinstance(layer.module, Attention):
        return call
    assert flow is not None
    one, unlike = followed(layer.module, call, flow)
    if unlike:
        raise ValueError(f"{layer.name} has no one map {where}: {unlike}")
    return one


def programmed(layer: Layer, call: Call, flow: Flow | None, edit: Edit) -> Call:
    """The call with an edit of its map.

    Raises:
        ValueError: the layer does not have one map a head.
    """
    check_one_map(layer, call, flow, "that could be changed")
    return replace(call, program=(*call.program, edit))


def check_maps(layers: Sequence[Layer]) -> None:
    """That every layer has a map for each head.

    Raises:
        ValueError: one has none, or maps of other heads than those of outputs.
    """
    for layer in layers:
        if layer.none or layer.heads != layer.queries:
            why = layer.none or f"{layer.queries} score heads for {layer.heads} outputs"
            raise ValueError(f"{layer.name} has no weights of its own for each head: {why}")


class Editing(Tap):
    """Puts `make(call)`, if anything, into each pass of a layer."""

    def __init__(self, layer: Layer, make: Callable[[Call], Edit | None]) -> None:
        self.layer, self.make = layer, make

    def ask(self, call: Call, flow: Flow | None) -> Call:
        edit = self.make(call)
        return call if edit is None else programmed(self.layer, call, flow, edit)


@contextmanager
def standing_by(layers: Sequence[Layer], make: Callable[[Layer], Tap]) -> Iterator[None]:
    """A tap at each layer, for as long as the block lasts."""
    detach = attach_all(layers, make)
    try:
        yield
    finally:
        detach()


__all__ = [
    "Edit", "Editing", "Tokens", "check_maps", "check_one_map", "check_tokens", "flags", "places", "programmed",
    "standing_by",
]  # fmt: skip
