"""Tensors that cached rows lie in: grown in place, or written slot by slot."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.core.flow import Rows
from manyheads.core.mask import Axis
from manyheads.core.packing import Packing

SLACK = 64
"""Rows kept beyond those that can be seen, so that a window can be rolled back a little (draft verification)."""


class Growing:
    """A tensor that grows along its token dimension (2) in place, so that a decode step copies one row.

    With `keep`, rows nobody can see any more are dropped, and their storage is used again. The first rows of all can be
    `pinned`: they stay, and what is lost is lost behind them. With a `packing` the tensor has bytes, and whoever reads
    rows gets what these stand for.
    """

    def __init__(self, keep: int | None = None, packing: Packing | None = None) -> None:
        self.buffer: Tensor | None = None
        self.first = self.end = 0  # the rows that can be seen; older ones from row 0 on are still there
        self.lost = 0  # rows that are not
        self.keep = keep
        self.pinned = 0
        self.packing, self.dtype = packing, torch.float32  # the dtype of rows, where they are packed

    def rows(self) -> Tensor:
        """What can be seen. Behind pinned rows there may be some that no query sees: a mask says which."""
        return self._held() if self.packing is None else self.packing.unpack(self._held(), self.dtype)

    def _held(self) -> Tensor:
        """The same as it is stored."""
        assert self.buffer is not None
        return self.buffer[:, :, 0 if self.pinned else self.first : self.end]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, heads and width of rows."""
        assert self.buffer is not None
        width = self.buffer.shape[3] if self.packing is None else sum(cut.width for cut in self.packing.cuts)
        return self.buffer.shape[0], self.buffer.shape[1], width

    def kept(self) -> list[Tensor]:
        """What can be seen, without the rest."""
        assert self.buffer is not None
        newest = self.buffer[:, :, max(self.pinned, self.first) : self.end]
        return [self.buffer[:, :, : self.pinned], newest] if self.pinned else [newest]

    def append(self, new: Tensor, pinned: int = 0) -> Tensor:
        """Add rows; returns every row that the new queries may see. pinned: how many of all rows stay."""
        if pinned > self.pinned and self.lost:
            self.keep = None  # they are not the first ones of what is here: nothing more is dropped
        elif pinned > self.pinned:
            self.pinned = pinned
        given, new = new, new if self.packing is None else self.packing.pack(new)
        if new.requires_grad or (self.buffer is not None and self.buffer.requires_grad):
            start = 0 if self.pinned else self.first
            self.buffer = new if self.buffer is None else torch.cat([self._held(), new], 2)
            self.lost, self.first, self.end = self.lost + start, self.first - start, self.buffer.shape[2]
        else:
            self._reserve(new)
            assert self.buffer is not None
            self.buffer[:, :, self.end : self.end + new.shape[2]] = new
            self.end += new.shape[2]
        self.dtype = given.dtype
        seen = self.rows()
        if self.packing is not None and given.requires_grad:  # of what is packed only this pass has a gradient
            seen = torch.cat([seen[:, :, : -given.shape[2]], self.packing.through(given)], 2)
        if self.keep is not None:
            self.first = max(self.first, self.end - self.keep)
        return seen

    def _reserve(self, new: Tensor) -> None:
        if self.buffer is not None and self.end + new.shape[2] <= self.buffer.shape[2]:
            return
        pinned = min(self.pinned, self.end)
        oldest = max(pinned, self.first - SLACK)
        need = self.end - (oldest - pinned) + new.shape[2]
        spare = max(64, need // 8) if self.keep is None else max(64, self.keep // 2)
        fresh = new.new_empty(*new.shape[:2], need + spare, new.shape[3])
        lost = oldest - pinned
        if self.buffer is not None:
            fresh[:, :, :pinned] = self.buffer[:, :, :pinned]
            fresh[:, :, pinned : self.end - lost] = self.buffer[:, :, oldest : self.end]
        self.buffer = fresh
        self.lost, self.first, self.end = self.lost + lost, self.first - lost, self.end - lost

    def before(self, tokens: int) -> tuple[int, int] | None:
        """Where the rows that can be seen begin and end without the newest `tokens`; None if some are lost."""
        end = self.end - tokens
        first = 0 if self.keep is None else end - self.keep
        oldest = self.pinned if self.lost else 0
        first = first if self.lost else max(first, 0)
        return (first, end) if oldest <= first <= end else None

    def drop(self, tokens: int) -> None:
        """Forget the newest rows."""
        place = self.before(tokens)
        assert place is not None
        self.first, self.end = place
        self.pinned = min(self.pinned, self.end)

    def choose(self, tokens: int, index: Tensor, shift: Tensor | None) -> None:
        """Of the newest `tokens` rows keep those of `index` `[B, A]`; older ones move up by `shift` `[B, 1]`."""
        assert self.buffer is not None
        base, kept = self.end - tokens, index.shape[1]
        place = self.before(tokens - kept)
        assert place is not None
        source, start = index + base, base
        if shift is not None:
            older = torch.arange(base, device=index.device)[None] - shift
            source, start = torch.cat([older, source], 1).clamp_min(0), 0
        shape = (len(self.buffer), self.buffer.shape[1], -1, self.buffer.shape[3])
        rows = self.buffer.gather(2, source[:, None, :, None].expand(*shape))
        self.buffer[:, :, start : base + kept] = rows
        self.first, self.end = place
        self.pinned = min(self.pinned, self.end)

    def forget(self, left: int) -> None:
        """Free all but the newest `left` rows."""
        if self.buffer is not None:
            self.buffer = self._held()[:, :, -left:].clone() if left else self._held()[:, :, :0].clone()
            self.lost, self.first, self.end = 0, 0, self.buffer.shape[2]

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch dimension."""
        if self.buffer is not None:
            self.buffer = change(self.buffer)

    def twin(self, change: Callable[[Tensor], Tensor]) -> Growing:
        other = copy.copy(self)
        other.change(change)
        return other

    def again(self) -> Growing:
        """One that goes on from here and leaves this one as it is; they share memory where no gradient minds."""
        other = copy.copy(self)
        if torch.is_grad_enabled() and self.buffer is not None:
            other.buffer = self.buffer[:, :, : self.end]  # without room: what a graph may hold is not written to
        return other


class Slots:
    """Rows of which `stride` consecutive tokens share a slot; the newest token of a slot is what it holds.

    `write` gives the new queries what they may read: for one token a sequence, the slots themselves; for more, the
    slots as they were before, followed by the new rows one by one (an earlier query must not see a slot's future).
    A slot's place on the key axis is that of its newest token. Slots of padding stay invalid.
    """

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.count = 0
        self.buffers: dict[str, Tensor] = {}  # rows [B, heads, room, width]; position, time [B, room] of the newest

    def __getitem__(self, name: str) -> Tensor:
        return self.buffers[name].narrow(2 if name == "rows" else 1, 0, self.count)

    def seen(self) -> Rows:
        position = self["position"]
        axis = Axis(self.count, None, position, self["time"], None, position >= 0, device=position.device)
        return Rows({"": self["rows"]}, axis)

    def write(self, new: Tensor, axis: Axis) -> Rows:
        """Fill the slots of `axis.position // stride`, from the first one on whether or not all were ever written."""
        position, time, valid = (t.expand(len(new), -1) for t in (axis.position, axis.time, axis.validity))
        before = Rows({"": new}, axis)
        if self.count and axis.length > 1:
            old = self.seen()
            before = Rows({"": torch.cat([old[""], new], 2)}, old.axis.cat(axis))
        slot = torch.where(valid, position // self.stride, -1)
        newest = valid.clone()
        newest[:, :-1] &= slot[:, 1:] != slot[:, :-1]
        self.count = max(self.count, int(slot.max()) + 1, 1)
        self._put("rows", new, 2, slot, newest, 0)
        self._put("position", position, 1, slot, newest, -1)
        self._put("time", time, 1, slot, newest, -1)
        return before if axis.length > 1 else self.seen()

    def _put(self, name: str, new: Tensor, dim: int, slot: Tensor, newest: Tensor, empty: int) -> None:
        old = self.buffers.get(name)
        room = 0 if old is None else old.shape[dim]
        if room <= self.count:  # one slot more than counted takes what is not kept
            shape = [*new.shape]
            kept = max(room - 1, 0)
            shape[dim] = self.count + 1 + max(64, self.count // 8) - kept
            blank = new.new_full(shape, empty)
            old = blank if old is None else torch.cat([old.narrow(dim, 0, kept), blank], dim)
        assert old is not None
        index = torch.where(newest, slot, old.shape[dim] - 1)
        index = index[:, None, :, None].expand_as(new) if dim == 2 else index
        tracked = new.requires_grad or old.requires_grad
        self.buffers[name] = old.scatter(dim, index, new) if tracked else old.scatter_(dim, index, new)

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.buffers = {name: change(buffer) for name, buffer in self.buffers.items()}

    def twin(self, change: Callable[[Tensor], Tensor]) -> Slots:
        other = copy.copy(self)
        other.change(change)
        return other
