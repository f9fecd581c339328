"""Interventions on where heads look: keys hidden from them, and mass on a span raised or lowered.

Both change scores alone, so that weights still add up to 1 and every kernel that takes a mask or a bias serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, attend
from manyheads.core.mask import Axis, Rule, cols_of
from manyheads.core.part import Program
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Heads, chosen_heads
from manyheads.inspect.edit import check_maps, check_one_map, flags, standing_by
from manyheads.inspect.layers import Layer


class Between:
    """The rule of keys from token `first` to the one before `last`, counted by time from the first of a sequence."""

    def __init__(self, first: int, last: int) -> None:
        if not 0 <= first < last:
            raise ValueError(f"a span {(first, last)}; 0 ≤ first < last")
        self.first, self.last = first, last

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        return cols_of((k.time >= self.first) & (k.time < self.last))


Change = Callable[[Call, Call, Tensor], Call]
"""Of a layer's problem, the one that its parts make of it, and which heads are meant, bool `[H, 1, 1]`."""


class _OfHeads(Tap):
    def __init__(self, layer: Layer, heads: list[int], change: Change) -> None:
        self.layer, self.heads, self.change = layer, heads, change

    def ask(self, call: Call, flow: Flow | None) -> Call:
        one = check_one_map(self.layer, call, flow, "that could be changed")
        return self.change(call, one, flags(self.heads, self.layer.queries, call.q.device))


@contextmanager
def _changed(model: nn.Module, heads: Heads, change: Change, *, softmax: bool = False) -> Iterator[None]:
    some = chosen_heads(model, heads)
    check_maps([layer for layer, _ in some])
    for layer, _ in some:
        module = layer.module
        if softmax and isinstance(module, Attention) and any(isinstance(piece, Program) for piece in module.attends):
            raise ValueError(f"{layer.name}: its weights are not the softmax of its scores alone")

    def make(layer: Layer) -> Tap:
        return _OfHeads(layer, next(of for each, of in some if each is layer), change)

    with standing_by([layer for layer, _ in some], make):
        yield


@contextmanager
def hide(model: nn.Module, heads: Heads, *, keys: Rule) -> Iterator[None]:
    """Hide keys from heads while the model runs; what they had goes to the other keys, in proportion.

    >>> with hide(model, {4: [1, 3]}, keys=Between(0, 1)):  # no sink
    ...     model(ids)

    A query that sees nothing else keeps what it sees.

    Args:
        heads: by layer, such as `{3: [0, 2]}`; None for all heads of a layer.
        keys: a rule, such as `Between(first, last)`.
    """

    def change(call: Call, one: Call, marked: Tensor) -> Call:
        before = call.mask

        def rule(q: Axis, k: Axis) -> Tensor:
            at_all = replace(before, q=q).tile()  # all keys of these queries
            hidden = keys(q, before.k)
            left = (at_all & ~hidden).any(-1, keepdim=True)
            return ~(keys(q, k) & left & marked)

        return replace(call, mask=before & rule)

    with _changed(model, heads, change):
        yield


@contextmanager
def split_softmax(model: nn.Module, heads: Heads, span: tuple[int, int], power: float) -> Iterator[None]:
    """Raise or lower what heads give to a span: where its mass is a, it becomes a^power; order within it and without
    it stays.

    A'_s = A_s a^power / a for s in the span, A_s (1 - a^power) / (1 - a) elsewhere. It is done in scores, by adding
    log(a^power / a) - log((1 - a^power) / (1 - a)) to those of the span, with a from two fused passes.

    Args:
        heads: by layer, such as `{3: [0, 2]}`; None for all heads of a layer.
        span: its first token and the one after its last. power: in (0, 1) raises the mass, above 1 lowers it.

    Source: arXiv 2503.23306, which has it in words; the formula is taken to be this.
    """
    rule = Between(*span)
    if not 0 < power < float("inf"):
        raise ValueError(f"power={power}; a positive number, 1 for no change")
    if power == 1:
        chosen_heads(model, heads)
        yield
        return

    def change(call: Call, one: Call, marked: Tensor) -> Call:
        whole = one.whole
        narrow = replace(whole, v=whole.v[..., :1])
        every, within = (attend(replace(narrow, mask=mask), need_lse=True).lse
                         for mask in (whole.mask, whole.mask & rule))  # fmt: skip
        assert every is not None and within is not None
        log_a = (within - every).clamp_max(0).double()
        some = (within > -torch.inf) & (log_a < -1e-12)  # else nothing, or all, is in the span
        log_a = torch.where(some, log_a, -1.0)
        shift = (power - 1) * log_a + torch.log(-torch.expm1(log_a)) - torch.log(-torch.expm1(power * log_a))
        shift = torch.where(some, shift, 0.0).to(call.q.dtype)[..., None] * marked
        hit, before = rule(whole.mask.q, whole.mask.k), call.bias

        def bias(rows: slice, keys: slice) -> Tensor:
            added = shift[:, :, rows] * hit[..., keys]
            return added if before is None else added + before(rows, keys)

        return replace(call, bias=bias)

    with _changed(model, heads, change, softmax=True):
        yield


__all__ = ["Between", "hide", "split_softmax"]
