"""Tokens merged inside blocks, of each head on its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.aggregate.aggregator import Pooled, register_aggregator, size_bias
from manyheads.aggregate.merger import ROUNDING, Merger, MergerOptions, alike, means, share_of
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias, Call
from manyheads.core.mask import Axis, Mask
from manyheads.core.tap import Tap


@register_aggregator("httm")
@dataclass(frozen=True)
class HTTM(MergerOptions):
    """In each block of tokens 1 - ratio of them, evenly spread, are destinations; every other one joins the destination
    of most cosine, and each group is its mean. With heads as rows `[B·H, N, d]` each head merges its own tokens.

    In a model (`merging`, `HeadMerge`) queries and keys are merged by themselves, values as their keys; attention runs
    on what is left, and each query gets the output of the one that it went into.

    Options:
        ratio: share of the tokens that is merged away, or that of queries and that of keys (of queries, where x is
            given). outliers: share of all queries of all heads of a layer that stay themselves, those farthest from
            their means, which are then taken without them.
        frame: tokens of a frame, 0: all are one. A block is the same run of `spatial` tokens of `temporal` frames.
        anchor: every token of the first frame is a destination.
        proportional: ln(size) is added to scores, so that keys that are the same may be merged in unequal numbers.
        protect: tokens by number that nothing joins and that join nothing.

    ASSUMED: which tokens are destinations, and that outliers are ranked over a whole layer, each sequence by itself.
    The source merges 90% of queries and 70% of keys and so cannot have fewer destinations than are left.

    Source: 2025, arXiv 2511.21317.
    """

    ratio: float | tuple[float, ...] = (0.9, 0.7)
    outliers: float = 0.1
    spatial: int = 128
    temporal: int = 30
    frame: int = 0
    anchor: bool = False
    proportional: bool = False
    protect: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        both = self.ratios
        self.ask(len(both) == 2 and all(0 <= r < 1 for r in both), f"ratio={self.ratio} is one or two shares in [0, 1)")
        self.ask(0 <= self.outliers <= 1, f"outliers={self.outliers} is not in [0, 1]")
        for what, least in (("spatial", 1), ("temporal", 1), ("frame", 0)):
            value = getattr(self, what)
            self.ask(value >= least, f"{what}={value} is below {least}")
        self.ask_protect(self.protect)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of queries, and of keys and values."""
        return self.ratio if isinstance(self.ratio, tuple) else (self.ratio, self.ratio)

    def build(self, width: int) -> BlockMerger:
        return BlockMerger(self, width)

    @classmethod
    def examples(cls) -> tuple[HTTM, ...]:
        return cls(0.5, spatial=2, temporal=2, frame=3), cls(0.7, spatial=4, protect=(0,)), cls(0.0)


class Places(NamedTuple):
    """Where tokens stand: their order `[n]`, the block of each place and whether it is a destination, `[n]`."""

    order: Tensor
    block: Tensor
    first: Tensor


class BlockMerger(Merger):
    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        n = x.shape[1]
        compared = x if cond is None else cond
        if compared.shape[:2] != x.shape[:2]:
            raise ValueError(f"httm: cond is {list(compared.shape)}; [{', '.join(map(str, x.shape[:2]))}, any]")
        places = self.layout(n, x.device)
        # padding goes behind all other tokens, so that it moves none into another block
        order = places.order.expand(len(x), -1)
        behind = ~mask.gather(1, order) & (places.block >= 0)
        order = order.gather(1, behind.long().argsort(dim=1, stable=True))
        with torch.no_grad():
            compared = torch.where(mask[..., None], compared, 0.0)
            compared = compared.gather(1, order[..., None].expand_as(compared))
            into = self._into(compared, mask.gather(1, order), places)
        number = places.first.cumsum(0) - 1
        assign = torch.empty_like(order).scatter_(1, order, number[into])
        return means(x, torch.where(mask, assign, -1), int(number[-1]) + 1, mask, size)

    def _into(self, x: Tensor, mask: Tensor, places: Places) -> Tensor:
        """The place that each place's token `[B, n, d]` goes to, int64 `[B, n]`."""
        into = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        for block in places.block.unique_consecutive().tolist():
            at = (places.block == block).nonzero()[:, 0]
            ends, rest = at[places.first[at]], at[~places.first[at]]
            if len(rest):
                cosine = alike(x[:, rest], x[:, ends]).masked_fill(~mask[:, None, ends], -torch.inf)
                into[:, rest] = ends[cosine.argmax(-1)]
        return into

    def layout(self, n: int, device: torch.device) -> Places:
        """Protected tokens first, then the blocks; a block is a run of places."""
        options: HTTM = self.options
        index, own = torch.arange(n), self.kept(n)
        wide = options.frame or n
        frame, inside = index // wide, index % wide
        runs = -(-wide // options.spatial)
        block = (frame // options.temporal) * runs + inside // options.spatial
        block = torch.where(own, -1, block)
        order = block.argsort(dim=0, stable=True)
        block = block[order]
        start = torch.searchsorted(block, block)  # of its own block
        rank, share = torch.arange(n) - start, 1 - options.ratios[0]
        steps = [((rank + i).double() * share - ROUNDING).ceil() for i in (0, 1)]
        first = (steps[1] > steps[0]) | (block < 0)
        if options.anchor:
            first |= frame[order] == 0
        return Places(*(t.to(device) for t in (order, block, first)))


def keep_outliers(q: Tensor, assign: Tensor, places: int, share: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Merged queries without outliers, and where each query is then: `[B, H, M + E, d]` and int64 `[B, H, N]`.

    q `[B, H, N, d]`, assign `[B, H, N]` to M places, mask bool `[B, N]`. Of a sequence's queries, all heads together,
    floor(share · H · N) at most, the farthest from the mean that they went into, get places of their own; E is the most
    that one head has, and the places of heads with fewer are 0.
    """
    rows, heads, n = assign.shape
    q = torch.where(mask[:, None, :, None], q, 0.0)
    seen = mask[:, None].expand(-1, heads, -1).flatten(0, 1)

    def merged(to: Tensor, count: int) -> Tensor:
        return means(q.flatten(0, 1), to.flatten(0, 1), count, seen).out.unflatten(0, (rows, heads))

    out = merged(assign, places)
    with torch.no_grad():
        mean = out.gather(2, assign.clamp_min(0)[..., None].expand_as(q))
        far = (q - mean).norm(dim=-1).masked_fill(assign < 0, 0.0).flatten(1)
        budget = share_of(mask.sum(1) * heads, share)
        order = far.argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(heads * n, device=q.device).expand_as(order))
        outlier = ((rank < budget[:, None]) & (far > 0)).view(rows, heads, n)
        extra = int(outlier.sum(-1).max()) if rows else 0
    if not extra:
        return out, assign
    to = torch.where(outlier, places + outlier.cumsum(-1) - 1, assign)
    return merged(to, places + extra), to


class HeadMerge(Tap):
    """Stands by at a bidirectional layer, and lets its heads attend merged, by the options of `HTTM`."""

    def __init__(self, options: HTTM) -> None:
        self.options = options
        self.to: Tensor | None = None

    def ask(self, call: Call, flow: Flow | None) -> Call:
        self.to = None
        if not any(self.options.ratios):
            return call
        call = call.whole
        if call.mask.rules or call.bias is not None or call.level is not None or call.mask.q.segment is not None:
            raise ValueError("httm: a mask or a bias over pairs of tokens is not that of merged ones; heads see all")
        queries, keys = self.options.ratios
        q, k, v, bias, sizes = call.q, call.k, call.v, call.bias, None
        if queries:
            seen = _valid(call.mask.q, q)
            found = self._merge(q, q, queries, seen)
            assert found.assign is not None
            to = found.assign.unflatten(0, q.shape[:2])
            q, self.to = keep_outliers(q, to, found.out.shape[1], self.options.outliers, seen)
        if keys:
            seen = _valid(call.mask.k, k)
            found = self._merge(torch.cat([k, v], -1), k, keys, seen)
            assert found.size is not None
            both, sizes = found.out.unflatten(0, k.shape[:2]), found.size.unflatten(0, k.shape[:2])
            k, v = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
            if self.options.proportional:
                each = size_bias(sizes > 0, sizes, k.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
                bias = _of_keys(each.clamp_min(torch.finfo(k.dtype).min))
        rows = Axis(q.shape[2], 0, device=q.device) if queries else call.mask.q
        cols = call.mask.k
        if sizes is not None:
            valid = None if cols.valid is None else sizes[:, 0] > 0  # the same places in every head
            cols = Axis(k.shape[2], 0, valid=valid, device=k.device)
        return replace(call, q=q, k=k, v=v, bias=bias, mask=Mask(rows, cols, ()))

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        to, self.to = self.to, None
        if to is None:
            return o
        back = o.gather(2, to.clamp_min(0)[..., None].expand(-1, -1, -1, o.shape[-1]))
        return back.masked_fill((to < 0)[..., None], 0.0)

    def _merge(self, x: Tensor, compared: Tensor, ratio: float, seen: Tensor) -> Pooled:
        """Every head's tokens `[B, H, N, ·]` as rows of one batch."""
        merger = BlockMerger(replace(self.options, ratio=ratio), x.shape[-1])
        mask = seen[:, None].expand(-1, x.shape[1], -1).flatten(0, 1)
        return merger(x.flatten(0, 1), mask, cond=compared.flatten(0, 1))


def _valid(axis: Axis, x: Tensor) -> Tensor:
    return axis.validity.expand(len(x), -1).to(x.device)


def _of_keys(each: Tensor) -> Bias:
    return lambda rows, keys: each[:, :, None, keys]


__all__ = ["HTTM", "BlockMerger", "HeadMerge", "keep_outliers"]
