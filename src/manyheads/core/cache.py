"""The key-value cache of a model: rows by site and entry, measured in bytes.

A `Cache` is a transformers cache (generation, beams and assisted decoding drive it) whose layers hold whatever entries
a spec declares. `write` also accepts the library's stock caches, into whose two tensors the entries are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from manyheads.core.check import check_whole
from manyheads.core.entries import Entry
from manyheads.core.flow import Rows
from manyheads.core.mask import Axis
from manyheads.core.store import SiteStore


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
