"""LongHeads: beyond the trained length, each head reads a few chunks of its own choice, moved next to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention.chunks import Chunks, gathered, rows_in, ungathered
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Deferred, Out, merge
from manyheads.core.kernels.tiled import TILE_BYTES
from manyheads.core.mask import Axis, rows_of
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class LongHeads(Part):
    """From position `start` on, a query reads `chunks` chunks of `chunk` keys, renumbered so that they join up.

    Chunk key of a completed chunk and head, from its queries, keys and values: q̄, k̄ rotated by their place in the
    chunk; u = mean of softmax(q̄ k̄ᵀ s) v over the chunk, both ways; c = softmax(u k̄ᵀ s) k̄ `[d]`.
    A query of chunk j reads the first chunk, j - 1, j (up to itself), and of the others those with the largest q · c,
    q before rotation. The keys of the chosen chunks, in order, take positions 0, 1, 2, … and the query that of its own
    key, so that no distance reaches chunk · chunks; o = softmax(q kᵀ s) v there. Earlier queries attend as usual.

    Nothing is learned. Caches H · d / chunk numbers a token for chunk keys, and queries of the newest chunk - 1 tokens.
    Keys are cached rotated, as ever: what moves to another place, whole chunks and the query, turns back by the way. A
    query gathers the keys that it reads; long passes do so a few queries at a time.

    Options: chunk, chunks (at least 3), start (default chunk · chunks; less only changes the order of sums).

    Choices: a token sees itself, and its chunk counts as one of `chunks` at its last token too (the authors' prefill
    leaves the token out, and their decoding drops a chunk there). Grouped key heads have a chunk key for each query
    head. The chunk key compares values with keys, so both must have one width.

    Source: LongHeads 2024, arXiv 2402.10685.
    """

    name: ClassVar[str] = "longheads"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2402.10685"
    examples: ClassVar = ({"chunk": 2, "chunks": 4, "start": 4}, {"chunk": 2, "chunks": 3}, {"chunk": 1, "chunks": 4})

    chunk: int = 256
    chunks: int = 16
    start: int | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "head keys", "token keys", "one map", "alike heads", "adjacent keys"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"adjacent keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "alike heads", "values alone"})

    def follows(self, site: Site) -> int | None:
        """The layer whose rows are read has the keys of its chunks."""
        return site.kv_source

    def agrees(self, before: Heads) -> str:
        return f"chunks of {self.chunk} tokens for {before.q} heads"

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.chunk < 1 or self.chunks < 3:
            raise OptionError(
                f"longheads: chunks={self.chunks} of chunk={self.chunk} tokens; at least 3 (the first, the one before, "
                "the query's own) of 1"
            )
        if heads.qk_width != heads.v_width:
            raise OptionError(
                f"longheads: chunk keys compare values of width {heads.v_width} with keys of width {heads.qk_width}; "
                "both must have one width"
            )
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> LongHeadsSelect:
        return LongHeadsSelect(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        if site.kv_source is not None:
            return Cost()
        width = before.q * before.qk_width
        inside = 4 * self.chunk * width
        return Cost(0, Fraction(width, self.chunk), (self.chunk - 1) * width, inside, 2 * width // self.chunk)


class LongHeadsSelect(Piece):
    def __init__(self, options: LongHeads, heads: Heads, site: Site) -> None:
        super().__init__()
        self.chunk, self.chunks, self.source = options.chunk, options.chunks, site.kv_source
        self.start = self.chunk * self.chunks if options.start is None else options.start
        if self.source is None:
            self.states = {
                "queries": State((heads.q, self.chunk - 1, heads.qk_width)),
                "chunk_keys": State((heads.q, 0, heads.qk_width), every=self.chunk),
            }

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        if flow.described:
            return [call]
        assert flow.rows is not None
        grid = Chunks.along(flow.rows.log or flow.rows.axis, self.chunk)
        keys = self._chunk_keys(call, flow, grid)
        early, first = flow.memo["longheads"] = self._reach(call.mask.q)
        late = replace(call, mask=call.mask & self._is_late)
        makers: list[Callable[[], Call]] = []
        if early:
            makers.append(partial(self._usual, call, first))
        table = grid.last(call.k.shape[2]).rows(call.mask.k)
        gathered_floats = 2 * call.q[:, :, :1].numel() * self.chunk * self.chunks  # of one query
        step = max(1, TILE_BYTES // (gathered_floats * call.q.element_size()))
        for at in range(first, call.q.shape[2], step):
            cut = slice(at, min(at + step, call.q.shape[2]))
            makers.append(partial(self._joined_up, late, flow, grid, keys, table, cut))
        return Deferred(makers)

    def join(self, outs: list[Out], flow: Flow) -> Out:
        early, first = flow.memo["longheads"]
        if len(outs) == early:
            return outs[0]
        late = ungathered(outs[early:], len(flow.x))
        lse = None if late.lse is None else F.pad(late.lse, (first, 0), value=-torch.inf)
        late = Out(F.pad(late.o, (0, 0, first, 0)), lse)
        return merge([outs[0], late]) if early else late

    def _is_early(self, q: Axis, k: Axis) -> Tensor:
        return rows_of(q.position) < self.start

    def _is_late(self, q: Axis, k: Axis) -> Tensor:
        return rows_of(q.position) >= self.start

    def _reach(self, q: Axis) -> tuple[bool, int]:
        """Whether some query attends as usual, and the first row that in some sequence does not."""
        if q.start is not None and q.given_position is None:
            return q.start < self.start, min(max(self.start - q.start, 0), q.length)
        late = q.position >= self.start
        some = (late & q.validity).any(0)
        if not some.any():
            return True, q.length
        return bool((~late & q.validity).any()), int(some.long().argmax())

    def _usual(self, call: Call, first: int) -> Call:
        return call if first == call.q.shape[2] else replace(call, mask=call.mask & self._is_early)

    def _joined_up(self, call: Call, flow: Flow, grid: Chunks, keys: Tensor, table: Tensor, cut: slice) -> Call:
        """The queries of `cut`, each with the keys of its chunks at their new positions."""
        own, mask = grid.last(call.q.shape[2]), call.mask
        still = flow.turn(call.q[:, :, cut], "q", mask.q[cut], back=True)
        chosen = self._choose(still, keys, own.of[:, cut], own.first[:, cut])
        near = gathered(call, rows_in(chosen, table, self.chunk), cut)
        last = ((chosen.shape[3] - 1) * self.chunk + mask.q[cut].position % self.chunk).expand(len(chosen), -1)
        q = still.transpose(1, 2).flatten(0, 1)[:, :, None]
        for place in (last, torch.zeros_like(last)):  # twice, since keys that go back lose the factor of turning
            q = flow.turn(q, "q", _axis(place.flatten()[:, None]))
        return replace(near, q=q, k=self._moved(near.k, flow, chosen, table, mask.k))

    def _moved(self, k: Tensor, flow: Flow, chosen: Tensor, table: Tensor, axis: Axis) -> Tensor:
        """Gathered keys `[B·t, H, n · chunk, E]` turned back by as far as their chunk moves."""
        places = torch.arange(table.shape[1], device=k.device) % self.chunk
        position = axis.position.expand(len(table), -1).gather(1, table.clamp_min(0)) - places
        begins = position.masked_fill(table < 0, 0).unflatten(1, (-1, self.chunk)).amax(-1)  # of each chunk
        begins = begins.expand(len(chosen), -1)[:, None, None].expand(*chosen.shape[:3], -1)
        by = begins.gather(-1, chosen.clamp_min(0)) - torch.arange(chosen.shape[3], device=k.device) * self.chunk
        k = k.unflatten(2, (-1, self.chunk)).flatten(0, 1).transpose(1, 2)
        k = flow.turn(k, "k", _axis(by.transpose(1, 2).flatten(0, 2)), back=True)
        return k.transpose(1, 2).flatten(1, 2).unflatten(0, (-1, chosen.shape[1]))

    @torch.no_grad()
    def _choose(self, q: Tensor, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        """Which chunks each query reads, ascending, -1 in front where there are fewer: `[B, H, t, ≤ chunks]`."""
        chunk = torch.arange(keys.shape[2], device=q.device)
        own, first = rows_of(own), rows_of(first)
        scores = (q @ keys.transpose(-1, -2)).masked_fill((chunk == first) | (chunk >= own - 1), torch.inf)
        best = scores.masked_fill((chunk < first) | (chunk > own), -torch.inf).topk(min(self.chunks, keys.shape[2]), -1)
        return torch.where(best.values == -torch.inf, -1, best.indices).sort(-1).values

    @torch.no_grad()
    def _chunk_keys(self, call: Call, flow: Flow, grid: Chunks) -> Tensor:
        """One for each chunk begun so far `[B, H, count, d]`, zero where it is not complete."""
        if self.source is not None:
            if self.source not in flow.links.handed:
                raise ValueError(f"longheads reads the chunk keys of layer {self.source}, which links do not hold")
            return flow.links.handed[self.source]
        cached, w = "queries" in flow.state, self.chunk
        queries = torch.cat([flow.state["queries"], call.q], 2) if cached else call.q
        keys = flow.state["chunk_keys"] if cached else call.q[:, :, :0]
        keys = F.pad(keys, (0, 0, 0, grid.count + 1 - keys.shape[2]))  # the last one takes what is not kept
        recent = min(queries.shape[2], call.k.shape[2])
        axis, part = call.mask.k[call.k.shape[2] - recent :], grid.last(recent)
        base = part.of[:, :1]
        count = int((part.of[:, -1:] - base).max()) + 1 if cached else grid.count
        rows = part._replace(of=part.of - base, count=count).rows(axis)
        complete = (rows >= 0).unflatten(-1, (count, w)).all(-1)
        if not cached or complete.any():
            made = self._make_keys(call, flow, queries[:, :, queries.shape[2] - recent :], axis, rows)
            at = torch.where(complete, base + torch.arange(count, device=base.device), grid.count)
            keys = keys.scatter(2, at[:, None, :, None].expand_as(made), made)
        keys = flow.links.handed[flow.layer] = keys[:, :, : grid.count]
        queries = F.pad(queries, (0, 0, max(0, w - 1 - queries.shape[2]), 0))
        flow.new_state |= {"queries": queries[:, :, queries.shape[2] - (w - 1) :].clone(), "chunk_keys": keys}
        return keys

    def _make_keys(self, call: Call, flow: Flow, queries: Tensor, recent: Axis, rows: Tensor) -> Tensor:
        """c of each chunk whose rows, counted along the newest tokens, are all there: `[B, H, count, d]`."""
        batch, heads, _, _ = queries.shape
        index, places = rows.clamp_min(0).expand(batch, -1)[:, None, :, None], rows.shape[1]
        inside = torch.arange(places, device=rows.device)[None] % self.chunk

        def pick(x: Tensor) -> Tensor:
            x = x[:, :, x.shape[2] - recent.length :]
            return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

        def placed(x: Tensor, name: str) -> Tensor:
            """Turned by the place in the chunk alone."""
            still = flow.turn(x[:, :, x.shape[2] - recent.length :], name, recent, back=True)
            return flow.turn(pick(still), name, _axis(inside))

        def fold(x: Tensor) -> Tensor:
            x = x.repeat_interleave(heads // x.shape[1], 1)
            return x.unflatten(2, (-1, self.chunk)).transpose(1, 2).flatten(0, 1)

        q, k = fold(placed(queries, "q")), fold(placed(call.k, "k"))
        u = F.scaled_dot_product_attention(q, k, fold(pick(call.v)), scale=call.scale).mean(2, keepdim=True)
        c = F.scaled_dot_product_attention(u, k, k, scale=call.scale)
        return c[:, :, 0].unflatten(0, (batch, -1)).transpose(1, 2)


def _axis(position: Tensor) -> Axis:
    return Axis(position.shape[1], None, position, position, device=position.device)
