"""What is cached of one attention layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from manyheads.core.buffers import SLACK, Growing, Slots
from manyheads.core.entries import Entry, State
from manyheads.core.flow import Rows
from manyheads.core.mask import Axis


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
