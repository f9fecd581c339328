"""Keys in chunks of consecutive positions, and attention to keys that each query chose for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.kernel import Call, Out
from manyheads.core.kernels.common import masked_softmax
from manyheads.core.kernels.tiled import TILE_BYTES
from manyheads.core.mask import Axis, Given, Mask, Rule, causal


class Chunks(NamedTuple):
    """Rows of an axis in chunks of `size` positions; each document begins one.

    of: which chunk a row is in, counted from the axis' first row, int64 `[B or 1, N]`. first: the first chunk of its
    document. count: how many chunks there are.
    """

    size: int
    of: Tensor
    first: Tensor
    count: int

    @classmethod
    def along(cls, axis: Axis, size: int) -> Chunks:
        place, segment = axis.position // size, axis.segment
        begins = place[:, 1:] != place[:, :-1]
        if segment is not None:
            begins = begins | (segment[:, 1:] != segment[:, :-1])
        of = F.pad(begins.long().cumsum(-1), (1, 0))
        if axis.whole and axis.start is not None and axis.given_position is None:  # known without looking at data
            count = (axis.start + axis.length - 1) // size - axis.start // size + 1
            return cls(size, of, torch.zeros_like(of), count)
        return cls(size, of, _first(of, axis), int(of.max()) + 1)

    def last(self, rows: int) -> Chunks:
        """Of the axis' newest rows."""
        return self._replace(of=self.of[:, -rows:], first=self.first[:, -rows:])

    def rows(self, axis: Axis) -> Tensor:
        """Which of the axis' rows stands at each place of each chunk, `[B or 1, count · size]`; -1 where none does."""
        batch = max(len(t) for t in (self.of, axis.position, axis.validity))
        of, position, valid = (t.expand(batch, -1) for t in (self.of, axis.position, axis.validity))
        places = self.count * self.size
        place = torch.where(valid, of * self.size + position % self.size, places)
        at = torch.arange(axis.length, device=place.device).expand(batch, -1)
        return at.new_full((batch, places + 1), -1).scatter(1, place, at)[:, :places]


def _first(of: Tensor, axis: Axis) -> Tensor:
    batch = max(len(of), len(axis.validity))
    of, valid = (t.expand(batch, -1) for t in (of, axis.validity))
    document = torch.zeros_like(of)
    if axis.segment is not None:
        changes = axis.segment[:, 1:] != axis.segment[:, :-1]
        document = F.pad(changes.long().cumsum(-1), (1, 0)).expand(batch, -1)
    never = torch.full_like(of, of.shape[-1])
    return never.scatter_reduce(1, document, torch.where(valid, of, never), "amin").gather(1, document)


def rows_in(chosen: Tensor, rows: Tensor, size: int) -> Tensor:
    """The rows of chosen chunks `[B, G, t, n]`, by `Chunks.rows`: `[B, G, t, n · size]`, -1 for none (chunk -1)."""
    place = chosen[..., None] * size + torch.arange(size, device=chosen.device)
    every = rows.expand(len(chosen), -1)[:, None].expand(-1, chosen.shape[1], -1)
    found = every.gather(2, place.clamp_min(0).flatten(2)).view_as(place)
    return found.masked_fill(chosen[..., None] < 0, -1).flatten(3)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The rule of keys in the chunks that each query chose, `chunks` `[B, G, T, n]`; `of` says which each key is in.

    q, k: the axes that `chunks` and `of` are about. heads: query heads, G dividing them. A number from `count` on names
    no chunk.
    """

    chunks: Tensor
    of: Tensor
    count: int
    q: Axis
    k: Axis
    heads: int

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        chosen = self.chunks[:, :, q.within(self.q)].clamp_max(self.count)
        flags = torch.zeros(*chosen.shape[:3], self.count + 1, dtype=torch.bool, device=chosen.device)
        of = self.of[:, k.within(self.k)]
        seen = flags.scatter(-1, chosen, True).gather(-1, of[:, None, None].expand(*chosen.shape[:3], -1))
        return seen.repeat_interleave(self.heads // seen.shape[1], 1)


def of_heads(call: Call, slots: Sequence[int], of: int) -> Call:
    """The call of the query heads of some key heads, of `of` (which the call may have merged into one).

    Key heads side by side are read where they lie.
    """
    each, first = call.q.shape[1] // of, slots[0]
    rows: slice | list[int] = list(slots)
    heads: slice | list[int] = [slot * each + h for slot in slots for h in range(each)]
    if [*slots] == [*range(first, first + len(slots))]:
        rows, heads = slice(first, first + len(slots)), slice(first * each, (first + len(slots)) * each)

    def pick(x: Tensor) -> Tensor:
        return x if x.shape[1] == 1 else x[:, heads]

    def only(rule: Rule) -> Rule:
        return rule if rule is causal else lambda q, k: pick(rule(q, k))

    k, v = (x if x.shape[1] == 1 else x[:, rows] for x in (call.k, call.v))
    mask = replace(call.mask, rules=tuple(map(only, call.mask.rules)))
    bias = call.bias
    return replace(
        call, q=call.q[:, heads], k=k, v=v, mask=mask, bias=None if bias is None else lambda q, k: pick(bias(q, k))
    )


def weights_of(call: Call) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """softmax(q kᵀ scale + bias) in tiles of query rows: (rows, weights `[B, H, t, S]`, what is visible)."""
    batch, heads, t, _ = call.q.shape
    k = call.k.repeat_interleave(heads // call.k.shape[1], 1)
    step = max(1, TILE_BYTES // max(1, batch * heads * k.shape[2] * k.element_size()))
    for at in range(0, t, step):
        rows = slice(at, min(at + step, t))
        scores = (call.q[:, :, rows] * call.scale) @ k.transpose(-1, -2)
        if call.bias is not None:
            scores = scores + call.bias(rows, slice(None))
        visible = call.mask.tile(rows)
        yield rows, masked_softmax(scores, visible), visible


def gathered(call: Call, rows: Tensor, cut: slice = slice(None)) -> Call:
    """The call of some query rows, each with keys of its own: rows `[B, G, t, N]`, -1 for none, G dividing the heads.

    Queries become the batch: q `[B·t, H, 1, E]`, k `[B·t, G, N, E]`. The mask and the bias stay those of the rows.
    """
    q = call.q[:, :, cut]
    batch, heads, t, _ = q.shape
    sets, at = rows.shape[1], rows.clamp_min(0)
    b = torch.arange(batch, device=q.device)[:, None, None, None]
    head = (torch.arange(sets, device=q.device) * call.k.shape[1] // sets)[None, :, None, None]

    def fold(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    def pick(x: Tensor) -> Tensor:
        """Of `[B or 1, H or 1, t, S]` what stands at the rows, `[B·t, H, 1, N]`."""
        index = at.repeat_interleave(heads // sets, 1)
        return fold(x.expand(batch, heads, t, -1).gather(-1, index))[:, :, None]

    seen = pick(call.mask.tile(cut)) & fold((rows >= 0).repeat_interleave(heads // sets, 1))[:, :, None]
    mask = Mask(Axis(1, 0, device=q.device), Axis(rows.shape[-1], 0, device=q.device), (Given(seen),))
    k, v = fold(call.k[b, head, at]), fold(call.v[b, head, at])
    call = replace(call, q=fold(q)[:, :, None], k=k, v=v, mask=mask)
    if call.bias is None:
        return call
    bias = pick(call.bias(cut, slice(None)))
    return replace(call, bias=lambda q, k: bias[:, :, q, k])


def ungathered(outs: Sequence[Out], batch: int) -> Out:
    """Answers `[B·t, H, 1, V]` of gathered calls, row after row, as one `[B, H, T, V]`."""

    def unfold(x: Tensor) -> Tensor:
        return x[:, :, 0].unflatten(0, (batch, -1)).transpose(1, 2)

    lses = [unfold(out.lse) for out in outs if out.lse is not None]
    return Out(torch.cat([unfold(out.o) for out in outs], 2), torch.cat(lses, 2) if lses else None)
