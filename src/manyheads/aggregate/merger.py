"""What mergers share: M of N tokens, each the mean of a group, with which of them a token went to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.aggregate.aggregator import Aggregator, Options, Pooled, counted
from manyheads.core.kernel import Call

ROUNDING = 1e-6
"""What a share of a count may be off by before it is another whole number: 0.29 · 100 is 29."""


@dataclass(frozen=True)
class MergerOptions(Options):
    """Options of a merger. It has `protect`, tokens by number that nothing joins, and `proportional`, whether attention
    behind it adds ln(size) to the scores of a key.
    """

    ordered: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    takes: ClassVar[frozenset[str]] = frozenset({"cond"})

    def reads(self, call: Call) -> Tensor:
        """`cond`, from the attention problem of the layer that the tokens come from, where a model runs (`merging`)."""
        raise NotImplementedError

    def again(self, times: int) -> MergerOptions:
        """The options at the `times`-th of the places where a model merges."""
        return self

    def ask_share(self, **shares: float) -> None:
        """Each is in (0, 1]."""
        for what, value in shares.items():
            self.ask(0 < value <= 1, f"{what}={value} is not in (0, 1]")

    def ask_protect(self, protect: tuple[int, ...]) -> None:
        wrong = [i for i in protect if i < 0] or len(set(protect)) < len(protect)
        self.ask(not wrong, f"protect={list(protect)} are not numbers of tokens, from 0 on, each once")


class Merger(Aggregator):
    """An aggregator whose results are means of groups of tokens. Places beyond a row's last group have size 0."""

    def kept(self, n: int) -> Tensor:
        """Which of n tokens are protected, bool `[n]`."""
        own = self.options.protect
        if any(i >= n for i in own):
            raise ValueError(f"{self.options.name}: token {max(own)} is protected, but there are {n}")
        marks = torch.zeros(n, dtype=torch.bool)
        marks[list(own)] = True
        return marks


def share_of(count: Tensor | int, share: float, up: bool = False) -> Tensor:
    """floor (or ceil) of count · share, int64, as exact arithmetic has it."""
    amount = torch.as_tensor(count).double() * share
    return ((amount - ROUNDING).ceil() if up else (amount + ROUNDING).floor()).long()


def in_order(leader: Tensor) -> Tensor:
    """Groups numbered in the order of their leaders: from the token that leads each token's group `[B, N]` (-1: none)
    to the number of the group.
    """
    number = (leader == torch.arange(leader.shape[1], device=leader.device)).cumsum(1) - 1
    return torch.where(leader < 0, -1, number.gather(1, leader.clamp_min(0)))


def means(
    x: Tensor, assign: Tensor, places: int, mask: Tensor, size: Tensor | None = None, weight: Tensor | None = None
) -> Pooled:
    """out_m = Σ w_n x_n / Σ w_n and size_m = Σ s_n over the tokens n of group m; w = s unless given.

    x `[B, N, D]`; assign int64 `[B, N]`, -1: nowhere; size, weight `[B, N]`. A group of weight 0 is its plain mean.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    sizes = torch.where(assign >= 0, counted(mask, size, wide), 0.0)
    at = assign.clamp_min(0)

    def total(amount: Tensor) -> Tensor:
        return amount.new_zeros(len(x), places).scatter_add(1, at, amount)

    share = sizes if weight is None else torch.where(sizes > 0, weight.to(wide), 0.0)
    if weight is not None:
        share = torch.where(total(share).gather(1, at) > 0, share, sizes)
    share = share / total(share).gather(1, at).clamp_min(torch.finfo(wide).tiny)
    out = x.new_zeros(len(x), places, x.shape[-1], dtype=wide)
    out = out.scatter_add(1, at[..., None].expand_as(x), share[..., None] * x)
    return Pooled(out.to(x.dtype), assign=assign, size=total(sizes))


def alike(a: Tensor, b: Tensor) -> Tensor:
    """Cosines `[*, N, M]` of rows `[*, N, d]` and `[*, M, d]`; 0 with a row of zeros."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.nn.functional.normalize(a.to(wide), dim=-1) @ torch.nn.functional.normalize(b.to(wide), dim=-1).mT


def keys_of(call: Call) -> Tensor:
    """The mean over heads of the keys of an attention problem, `[B, N, d]`."""
    return call.whole.k.mean(1)


def rows_of(call: Call, rows: slice) -> Tensor:
    """Attention weights of some queries of a problem, `[B, H, t, S]`, whichever kernel solves the whole of it."""
    call = call.whole
    scores = call.q[:, :, rows] @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).mT * call.scale
    scores = scores if call.level is None else scores + call.level(rows, slice(None))
    scores = scores if call.softcap is None else call.softcap * (scores / call.softcap).tanh()
    scores = scores if call.bias is None else scores + call.bias(rows, slice(None))
    return scores.masked_fill(~call.mask.tile(rows), -math.inf).softmax(-1).nan_to_num()


__all__ = ["Merger", "MergerOptions", "means"]
