"""The key-value cache: rows by site and entry, grown in place, measured in bytes.

A `Cache` is a transformers cache (generation, beams and assisted decoding drive it) whose layers hold whatever entries
a spec declares. `write` also accepts the library's stock caches, into whose two tensors the entries are packed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from manyheads.core.check import check_whole
from manyheads.core.flow import Rows
from manyheads.core.mask import Axis
from manyheads.core.packing import Packing


class Entry(NamedTuple):
    """A tensor cached for every token, `[B, heads, slots, width]`.

    role: which transforms touch it when written ("k", "v", or None for rows that are neither yet). stride: tokens that
    share one slot, the last of them being what the slot holds. keep: how many of the newest rows later queries can
    still see (None: all; 0: none, and the row is not stored); `first` of these are the first rows instead. packing:
    how rows are stored, if not as they are; they are read as they come back, in the pass that makes them too.
    """

    heads: int
    width: int
    role: str | None = None
    stride: int = 1
    keep: int | None = None
    dtype: torch.dtype | None = None
    first: int = 0
    packing: Packing | None = None

    def read(self, rows: Tensor) -> Tensor:
        """Rows as a pass reads them that has no cache."""
        return rows if self.packing is None else self.packing.through(rows)


class State(NamedTuple):
    """A tensor kept for every sequence, `[B, *shape]`; history: it can be given for earlier tokens too.

    every: tokens that add one to its dimension 2 (0: its size is fixed).
    """

    shape: tuple[int, ...]
    history: bool = False
    dtype: torch.dtype | None = None
    every: int = 0


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


class SiteStore(CacheLayerMixin):
    """The storage of one attention layer."""

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.growing: dict[str, Growing] = {}
        self.slots: dict[str, Slots] = {}
        self.state: dict[str, Tensor] = {}
        self.length = 0
        self.fixed = False  # the context of cross-attention, written once: what decoding forgets is not here
        self.asked: Axis | None = None  # of a cross-attention layer by itself, the tokens that have read its context

    @classmethod
    def of(cls, rows: Mapping[str, Tensor], length: int) -> SiteStore:
        """Rows of `length` tokens; where there are fewer, they are of the first ones, and the others lost."""
        store = cls()
        for name, row in rows.items():
            growing = store.growing[name] = Growing()
            growing.buffer, growing.end = row, row.shape[2]
            growing.lost = length - row.shape[2]
            growing.pinned = growing.first = growing.end if growing.lost else 0
        store.length, store.is_initialized = length, True
        return store

    def write(self, rows: Mapping[str, Tensor], entries: Mapping[str, Entry], log: Axis, axis: Axis) -> Rows:
        self._check({name: row for name, row in rows.items() if entries[name].keep != 0})
        tensors: dict[str, Tensor] = {}
        axes: dict[str, Axis] = {}
        for name, new in rows.items():
            entry = entries[name]
            if entry.dtype is not None:
                new = new.to(entry.dtype)
            if entry.keep == 0:
                tensors[name], axes[name] = new, axis
            elif entry.stride > 1:
                seen = self.slots.setdefault(name, Slots(entry.stride)).write(new, axis)
                tensors[name], axes[name] = seen[""], seen.axis
            else:
                newest = None if entry.keep is None else entry.keep - entry.first
                growing = self.growing.setdefault(name, Growing(newest, entry.packing))
                tensors[name] = growing.append(new, _reach(log, entry.first))
                axes[name] = axis_left(log, growing.pinned, log.length - tensors[name].shape[2])
        self.length += axis.length
        self.is_initialized = True
        keys = max(reversed(axes.values()), key=lambda each: each.length, default=log)
        fewer = {name: each for name, each in axes.items() if each.length < keys.length}
        return Rows(tensors, keys, log, axes=fewer)

    def again(self) -> SiteStore:
        """One that goes on from here and leaves this one as it is (rows alone: it has no slots and states)."""
        other = copy.copy(self)
        other.growing = {name: growing.again() for name, growing in self.growing.items()}
        return other

    def _check(self, rows: Mapping[str, Tensor]) -> None:
        """Rows of another layer, or of other sequences, do not belong behind those that are here."""
        held = {name: growing.shape for name, growing in self.growing.items() if growing.buffer is not None}
        for name, slots in self.slots.items():
            if slots.buffers:
                batch, heads, _, width = slots.buffers["rows"].shape
                held[name] = batch, heads, width
        if held and held.keys() != rows.keys():
            raise ValueError(f"the cache holds rows {', '.join(held)} here; this layer writes {', '.join(rows)}")
        for name, (batch, heads, width) in held.items():
            b, h, _, w = rows[name].shape
            if batch != b:
                raise ValueError(f"the cache holds a batch of {batch}; this pass has {b} sequences")
            if (heads, width) != (h, w):
                raise ValueError(
                    f"the cache holds {heads} x {width} numbers of {name!r} a token; this layer has {h} x {w}"
                )

    def check_states(self, kept: Mapping[str, State], batch: int) -> None:
        """States of another layer, or of other sequences, are nothing to go on from."""
        strange = [name for name in self.state if not {name, name.rpartition(".")[0]} & kept.keys()]
        if strange:
            keeps = ", ".join(kept) or "none"
            raise ValueError(
                f"the cache holds the state {strange[0]!r} here; the states that this layer keeps: {keeps}"
            )
        for name, held in self.state.items():
            if len(held) != batch:
                raise ValueError(f"the cache holds a batch of {len(held)}; this pass has {batch} sequences")
            shape = kept[name].shape if name in kept else held.shape[1:]
            if held.ndim != len(shape) + 1 or any(n > 0 and n != m for n, m in zip(shape, held.shape[1:], strict=True)):
                raise ValueError(f"the cache holds a state {name!r} of {[*held.shape[1:]]}; this layer has {[*shape]}")

    def read(self, axis: Axis) -> Rows:
        return Rows({name: growing.rows() for name, growing in self.growing.items()}, axis)

    def buffers(self) -> Iterator[Tensor]:
        """Every tensor held, spare capacity included."""
        yield from (growing.buffer for growing in self.growing.values() if growing.buffer is not None)
        yield from (buffer for slots in self.slots.values() for buffer in slots.buffers.values())
        yield from self.state.values()

    def tensors(self) -> Iterator[Tensor]:
        """Everything stored, without spare capacity."""
        yield from (rows for growing in self.growing.values() for rows in growing.kept())
        yield from (slots["rows"] for slots in self.slots.values())
        yield from self.state.values()

    def why_not_croppable(self, tokens: int = 0) -> str | None:
        if self.state:
            return f"the state {next(iter(self.state))!r} keeps no history"
        if self.fixed:
            return None
        if tokens > self.length:
            return f"it has seen {self.length}"
        if self.slots:
            return f"{next(iter(self.slots))!r} merges tokens into slots in place"
        if any(growing.before(tokens) is None for growing in self.growing.values()):
            return f"a window keeps {SLACK} rows more than it sees, no older ones"
        return None

    def crop(self, tokens_to_remove: int) -> None:
        tokens = abs(tokens_to_remove)
        if self.asked is not None:
            self.asked = self.asked[: max(0, self.asked.length - tokens)]
        if tokens == 0 or not self.length or self.fixed:
            return
        why = self.why_not_croppable(tokens)
        if why is not None:
            raise ValueError(f"this cache cannot go back {tokens} tokens: {why}")
        for growing in self.growing.values():
            growing.drop(tokens)
        self.length -= tokens

    def choose(self, tokens: int, index: Tensor, shift: Tensor | None) -> None:
        if self.asked is not None:
            self.asked = self.asked[: max(0, self.asked.length - tokens + index.shape[1])]
        if not self.length or self.fixed:
            return
        for growing in self.growing.values():
            growing.choose(tokens, index, shift)
        self.length -= tokens - index.shape[1]

    def forget(self, tokens: int) -> None:
        """Free the rows of the oldest tokens."""
        self.length -= tokens
        for growing in self.growing.values():
            growing.forget(self.length)

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        for growing in self.growing.values():
            growing.change(change)
        for slots in self.slots.values():
            slots.change(change)
        self.state = {name: change(value) for name, value in self.state.items()}
        self.asked = None if self.asked is None else self.asked.batch(change)

    # the interface of a transformers cache layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """For stock attention layers that share the model with ours."""
        k = self.growing.setdefault("k", Growing()).append(key_states)
        v = self.growing.setdefault("v", Growing()).append(value_states)
        self.length += key_states.shape[2]
        self.is_initialized = True
        return k, v

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.__init__()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda t: t[indices])


def _reach(log: Axis, first: int) -> int:
    """How many rows there are up to the last token whose position is below `first`; padding may come before it."""
    if not first:
        return 0
    if log.given_position is None and log.start is not None:
        return min(max(first - log.start, 0), log.length)
    early = log.validity & (log.position < first)
    index = torch.arange(1, log.length + 1, device=log.device)
    return log.once(("reach", first), lambda: int((early * index).max()))


def axis_left(log: Axis, pinned: int, lost: int) -> Axis:
    """The axis of rows `lost` of which are missing behind the pinned ones."""
    if not lost:
        return log
    if not pinned:
        return log[lost:]

    def cut() -> Axis:
        rows = torch.arange(log.length, device=log.device)
        return log.take(torch.cat([rows[:pinned], rows[pinned + lost :]])[None])

    return log.once(("seen", pinned, lost), cut)


class Cache(transformers.Cache):
    """Storage for all sites of a model. Every site sees the same tokens, so one log of their axis serves all.

    >>> cache = Cache()
    >>> y = layer(x, cache=cache)          # appends x's rows
    >>> cache.bytes()                      # measured from what is stored
    """

    layers: list[SiteStore]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.axis: Axis | None = None
        self._announced: tuple[Axis | None, Axis] | None = None  # the log before a pass, and the axis of the pass

    def site(self, site: int) -> SiteStore:
        while len(self.layers) <= site:
            self.layers.append(SiteStore())
        return self.layers[site]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        store = self.site(layer_idx)
        self._extend(Axis(key_states.shape[2], store.length, device=key_states.device), store.length)
        return store.update(key_states, value_states)

    def _extend(self, axis: Axis, seen: int) -> Axis:
        """The log after this pass; the first site of a pass adds to it, the others find it done."""
        if self.axis is None:
            self.axis = axis
        elif self.axis.length == seen:
            self.axis = self.axis.cat(axis)
        return self.axis

    def write(self, site: int, rows: Mapping[str, Tensor], entries: Mapping[str, Entry], axis: Axis) -> Rows:
        """Store the rows of `axis` and return what queries of this pass may read."""
        store = self.site(site)
        return store.write(rows, entries, self._extend(axis, store.length), axis)

    def coming(self, tokens: int, past: int, valid: Tensor | None, device: torch.device) -> Axis | None:
        """The axis of a pass of so many tokens after the first `past`, where this cache knows more than their count."""
        if self._announced is None:
            return None
        log, axis = self._announced
        return axis if axis.length == tokens and past == (0 if log is None else log.length) else None

    def announce(self, axis: Axis) -> None:
        """The next pass is of these tokens, which need not follow each other (a tree of candidates)."""
        self._announced = self.axis, axis

    def choose(self, tokens: int, index: Tensor, lengths: Tensor) -> None:
        """Of the newest `tokens` tokens sequence b keeps those of `index[b, :lengths[b]]`, in this order.

        Where lengths differ, what a sequence has moves up to the newest rows, and padding stands on its left.
        index: `[B, A]` with A the greatest length. Refused as `rollback` is.
        """
        before, kept = self.length() - tokens, index.shape[1]
        self._check_way_back(tokens - kept)
        shift = kept - lengths[:, None] if bool((lengths != kept).any()) else None
        if shift is not None and not self.movable:
            raise ValueError("the first rows of this cache are pinned: its sequences must keep equally many tokens")
        if shift is not None:  # the path is right-aligned, and older rows are on its left
            place = torch.arange(kept, device=index.device)[None] - shift
            index = torch.where(place < 0, place, index.gather(1, place.clamp_min(0)))
        for layer in self.layers:
            layer.choose(tokens, index, shift)
        assert self.axis is not None
        self.axis = self._chosen(before, index, shift)
        self._announced = None

    def _chosen(self, before: int, index: Tensor, shift: Tensor | None) -> Axis:
        """The log once tokens are chosen; it counts on where it did and can."""
        assert self.axis is not None
        if shift is not None:
            older = torch.arange(before, device=index.device)[None] - shift
            source = torch.cat([older, index + before], 1)
            moved = self.axis.take(source.clamp_min(0))
            return replace(moved, valid=moved.validity & (source >= 0), rows=None, memo={})
        log = self.axis[:before] if self._announced is None else self._announced[0]
        new = replace(self.axis.take(index + before), rows=None, memo={})
        if log is None:
            return new
        start = None if log.start is None else log.start + before
        if start is not None and bool((new.time == torch.arange(start, start + new.length, device=new.device)).all()):
            position = None if log.given_position is None else new.position
            valid = None if new.valid is None or bool(new.valid.all()) else new.valid
            new = replace(new, start=start, given_time=None, given_position=position, valid=valid)
        return log.cat(new)

    @property
    def movable(self) -> bool:
        """Whether the rows of a sequence can move against those of others."""
        return not any(growing.pinned for layer in self.layers for growing in layer.growing.values())

    def length(self, site: int | None = None) -> int:
        """Tokens seen, padding included."""
        if site is None:
            return 0 if self.axis is None else self.axis.length
        return self.site(site).length

    def state(self, site: int) -> dict[str, Tensor]:
        return self.site(site).state

    def slots(self, site: int) -> dict[str, Rows]:
        """Slots of a site as they are before a write."""
        return {name: slots.seen() for name, slots in self.site(site).slots.items()}

    def past(self, site: int) -> dict[str, Rows]:
        """All rows of a site as they are before a write."""
        store = self.site(site)
        if self.axis is None or store.fixed:
            return {}
        axis = self.axis[: store.length]
        return {name: Rows({"": growing.rows()}, axis) for name, growing in store.growing.items()}

    def bytes(self) -> int:
        """Bytes of the rows and states stored, measured from the tensors (spare capacity apart: `reserved_bytes`)."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    def reserved_bytes(self) -> int:
        """Bytes of all memory held, room for growth included."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.buffers())

    def rollback(self, tokens: int) -> None:
        """Forget the newest tokens; refused where a site has no way back."""
        check_whole(0, tokens=tokens)
        self.crop(-tokens)

    def crop(self, tokens_to_remove: int) -> None:
        tokens = abs(tokens_to_remove)
        self._check_way_back(tokens)
        for layer in self.layers:
            layer.crop(tokens)
        if self.axis is not None and tokens:
            log, axis = self._announced or (None, None)
            before = self.axis.length - tokens
            undone = log is not None and axis is not None and (log.length, axis.length) == (before, tokens)
            self.axis = log if undone else self.axis[:before]
            self._announced = None

    def _check_way_back(self, tokens: int) -> None:
        """Raise before any site has changed."""
        whys = (layer.why_not_croppable(tokens) for layer in self.layers if layer.length or layer.state)
        for why in filter(None, whys):
            raise ValueError(f"this cache cannot go back {tokens} tokens: {why}")

    @property
    def is_croppable(self) -> bool:
        return all(layer.why_not_croppable() is None for layer in self.layers)

    def fork(self, batch: Tensor) -> Cache:
        """An independent cache whose sequence i continues this cache's sequence `batch[i]`."""
        other = type(self)()
        other.axis = None if self.axis is None else self.axis.batch(lambda t: t[batch])
        for index, layer in enumerate(self.layers):
            store = other.site(index)
            store.length, store.fixed, store.is_initialized = layer.length, layer.fixed, layer.is_initialized
            store.growing = {name: growing.twin(lambda t: t[batch]) for name, growing in layer.growing.items()}
            store.slots = {name: slots.twin(lambda t: t[batch]) for name, slots in layer.slots.items()}
            store.state = {name: value[batch] for name, value in layer.state.items()}
        return other

    def reorder(self, batch: Tensor) -> None:
        """Sequence i becomes what sequence `batch[i]` was."""
        self.reorder_cache(batch)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda t: t[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.change(change)
        if self.axis is not None:
            self.axis = self.axis.batch(change)
        self._announced = None

    def take(self, trial: Trial) -> None:
        """Hold what a trial holds that went on from here."""
        self.layers[:], self.axis = trial.layers, trial.axis

    def reset(self) -> None:
        self.layers.clear()
        self.axis = self._announced = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.axis is None else self.axis.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class Trial(Cache):
    """Goes on from another cache, which stays as it is until it is told to `take` what is here.

    A site that writes again writes in the place of what it wrote before, so a pass may be run, and computed again for
    its gradient, any number of times. For layers that cache one row a token.
    """

    def __init__(self, before: Cache) -> None:
        super().__init__()
        self.before, self.layers, self.axis = [*before.layers], [*before.layers], before.axis

    def write(self, site: int, rows: Mapping[str, Tensor], entries: Mapping[str, Entry], axis: Axis) -> Rows:
        self.site(site)
        store = self.before[site].again() if site < len(self.before) else SiteStore()
        self.layers[site] = store
        return store.write(rows, entries, self._extend(axis, store.length), axis)


def write_stock(
    cache: transformers.Cache, site: int, rows: Mapping[str, Tensor], entries: Mapping[str, Entry]
) -> dict[str, Tensor]:
    """Store rows in a stock cache (dynamic, static, quantised), two tensors a layer; returns all rows by entry.

    Two entries of as many heads go in as they are; others are packed flat, `[B, 1, S, Σ heads·width]`, and cut in two.
    """
    for name, entry in entries.items():
        if entry.stride > 1 or entry.dtype is not None or entry.packing is not None:
            how = f"stride {entry.stride}, dtype {entry.dtype}" if entry.packing is None else str(entry.packing)
            raise ValueError(
                f"the entry {name!r} ({how}) does not fit a {type(cache).__name__}, which stores one row a token in "
                "one dtype; use manyheads.Cache"
            )
    if len(rows) == 2 and len({row.shape[1] for row in rows.values()}) == 1:
        (a, first), (b, second) = rows.items()
        k, v = cache.update(first, second, site)
        return {a: k, b: v}
    flat = torch.cat([row.transpose(1, 2).flatten(2) for row in rows.values()], -1)[:, None]
    cut = flat.shape[-1] - flat.shape[-1] // 2
    k, v = cache.update(flat[..., :cut].contiguous(), flat[..., cut:].contiguous(), site)
    return _unpacked(k, v, {name: entries[name] for name in rows})


def read_stock(cache: transformers.Cache, site: int, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """What `write_stock` has stored, by entry."""
    layer: Any = cache.layers[site]
    if len(entries) == 2 and len({entry.heads for entry in entries.values()}) == 1:
        return dict(zip(entries, (layer.keys, layer.values), strict=True))
    return _unpacked(layer.keys, layer.values, entries)


def _unpacked(k: Tensor, v: Tensor, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    parts = torch.cat([k, v], -1)[:, 0].split([entry.heads * entry.width for entry in entries.values()], -1)
    return {
        name: part.unflatten(-1, (entry.heads, -1)).transpose(1, 2)
        for (name, entry), part in zip(entries.items(), parts, strict=True)
    }
