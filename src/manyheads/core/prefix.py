"""Sequences that begin alike keep the rows of what they share once.

A `PrefixTree` finds, from token ids alone, what sequences have in common, in chunks of equal size. A `PrefixCache`
holds the rows: those of a shared run once, with batch 1, those of each sequence in a batch of its own. Attention reads
a shared run with the queries of all its sequences in one product, reads the sequences' own rows, and merges the answers
by their log-sum-exp, which is exact (`Attention`, `Rows.shared`).

Source: Ye et al. 2024, ChunkAttention, arXiv 2402.15220.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from manyheads.core.cache import Cache
from manyheads.core.entries import Entry
from manyheads.core.flow import Rows, Shared
from manyheads.core.mask import Axis
from manyheads.core.store import axis_left


@dataclass(eq=False)
class Chunk:
    """A node of the tree: up to `size` tokens that follow those of its parent, in so many sequences."""

    tokens: list[int]
    parent: Chunk | None = None
    children: list[Chunk] = field(default_factory=list)
    sequences: int = 0


class Run(NamedTuple):
    """Tokens at positions `start, start + 1, …` of sequences first to last - 1; after: the run before it, by number."""

    tokens: list[int]
    start: int
    first: int
    last: int
    after: int | None


class PrefixTree:
    """Which sequences begin alike, by chunks of `size` tokens.

    Sequences are numbered so that those below any chunk stand side by side; adding or removing one shifts the numbers
    behind it. The last chunk of a sequence, its tail, is its own and never full when added, so that it may grow.

    >>> tree = PrefixTree(2)
    >>> [tree.add(tokens) for tokens in ([1, 2, 3, 4, 5], [1, 7], [1, 2, 3])]
    [0, 1, 1]
    """

    def __init__(self, size: int = 64) -> None:
        if size < 1:
            raise ValueError(f"chunks of {size} tokens; the smallest has 1")
        self.size = size
        self.root = Chunk([])
        self.tails: list[Chunk] = []

    def add(self, tokens: Sequence[int]) -> int:
        """A new sequence; returns its number."""
        if wrong := [token for token in tokens if not isinstance(token, int) or token < 0]:
            raise ValueError(f"{wrong[0]!r} is no token: tokens are whole numbers from 0 on")
        node, number, taken = self.root, 0, 0
        node.sequences += 1
        while (child := self._next(node, tokens[taken : taken + self.size])) is not None:
            number += sum(each.sequences for each in node.children[: node.children.index(child)])
            node, taken = child, taken + self.size
            node.sequences += 1
        number += sum(each.sequences for each in node.children)
        rest = [list(tokens[at : at + self.size]) for at in range(taken, len(tokens), self.size)]
        for chunk in rest if rest and len(rest[-1]) < self.size else [*rest, []]:
            node = self._grow(node, chunk)
        self.tails.insert(number, node)
        return number

    def _next(self, node: Chunk, tokens: Sequence[int]) -> Chunk | None:
        """The child with just these tokens, if it is full and no tail."""
        alike = (child for child in node.children if child.children and child.tokens == list(tokens))
        return next(alike, None) if len(tokens) == self.size else None

    def _grow(self, node: Chunk, tokens: list[int]) -> Chunk:
        child = Chunk(tokens, node, sequences=1)
        node.children.append(child)
        return child

    def append(self, tokens: Sequence[int]) -> None:
        """One more token for every sequence, in the order of their numbers."""
        if len(tokens) != len(self.tails):
            raise ValueError(f"{len(tokens)} tokens for {len(self.tails)} sequences")
        for number, token in enumerate(tokens):
            if len(self.tails[number].tokens) == self.size:
                self.tails[number] = self._grow(self.tails[number], [])
            self.tails[number].tokens.append(token)

    def remove(self, number: int) -> None:
        """Forget a sequence, and the chunks that no other has."""
        if not 0 <= number < len(self.tails):
            raise ValueError(f"there is no sequence {number}; there are {len(self.tails)}")
        node: Chunk | None = self.tails.pop(number)
        while node is not None:
            node.sequences -= 1
            if node.sequences == 0 and node.parent is not None:
                node.parent.children.remove(node)
            node = node.parent

    def spans(self) -> Iterator[tuple[Chunk, int, int]]:
        """Every chunk, depth first, with its sequences first to last - 1."""
        waiting = [(self.root, 0)]
        while waiting:
            node, first = waiting.pop()
            if node is not self.root:
                yield node, first, first + node.sequences
            ends = first + node.sequences
            for child in reversed(node.children):
                ends -= child.sequences
                waiting.append((child, ends))

    def runs(self, least: int = 2) -> list[Run]:
        """Chunks of at least so many sequences, those of the same sequences joined; each after the one that it follows.

        What is left of a sequence begins where its runs end (`shared`).
        """
        runs: list[Run] = []
        place: dict[Chunk, int] = {}
        for chunk, first, last in self.spans():
            if last - first < least:
                continue
            before = place.get(cast(Chunk, chunk.parent))
            if before is not None and (runs[before].first, runs[before].last) == (first, last):
                runs[before].tokens.extend(chunk.tokens)
            else:
                start = 0 if before is None else runs[before].start + len(runs[before].tokens)
                runs.append(Run([*chunk.tokens], start, first, last, before))
                before = len(runs) - 1
            place[chunk] = before
        return runs

    def shared(self, least: int = 2) -> list[int]:
        """Of each sequence, how many of its first tokens are in runs."""
        counts = [0] * len(self.tails)
        for run in self.runs(least):
            counts[run.first : run.last] = [run.start + len(run.tokens)] * (run.last - run.first)
        return counts

    @property
    def unique(self) -> int:
        """Tokens stored."""
        return sum(len(chunk.tokens) for chunk, _, _ in self.spans())

    @property
    def total(self) -> int:
        """Tokens of all sequences, as if each had its own."""
        return sum(len(chunk.tokens) * (last - first) for chunk, first, last in self.spans())


class Held(NamedTuple):
    """A cache of batch 1 whose rows sequences first to last - 1 begin with."""

    cache: PrefixCache
    first: int
    last: int


class PrefixCache(Cache):
    """A cache whose sequences share rows of what they begin with.

    >>> prefix = PrefixCache()
    >>> layer(x[:1], cache=prefix)         # what all have in common
    >>> cache = prefix.branch(32)          # 32 sequences that go on from there
    >>> layer(y, cache=cache)              # each appends rows of its own

    `beside` puts branches of several prefixes into one batch, `keep` frees the rows of sequences that have ended.
    Sequences of one pass with fewer tokens than others are padded on the left, and `expect` says so beforehand.
    """

    def __init__(self, held: Sequence[Held] = (), batch: int = 1) -> None:
        super().__init__()
        self.held = tuple(held)
        self.batch = batch
        self._expected: tuple[int, Tensor] | None = None  # tokens before the pass, and how many each sequence adds

    def branch(self, sequences: int) -> PrefixCache:
        """A cache of `sequences` that continue this one and share its rows, which no longer change."""
        if self.batch != 1:
            raise ValueError(f"a batch of {self.batch} sequences has no one prefix to share")
        if sequences < 1:
            raise ValueError(f"{sequences} sequences; at least 1")
        own = [] if self.axis is None else [Held(self, 0, 1)]
        return PrefixCache([each._replace(last=sequences) for each in (*self.held, *own)], sequences)

    @classmethod
    def beside(cls, branches: Sequence[PrefixCache]) -> PrefixCache:
        """One cache of all their sequences in a row; branches of one prefix go on sharing it."""
        if any(each.axis is not None for each in branches):
            raise ValueError("branches that have rows of their own cannot be put side by side")
        held: dict[PrefixCache, Held] = {}
        batch = 0
        for each in branches:
            for cache, first, last in each.held:
                known = held.get(cache)
                if known is not None and known.last != batch + first:
                    raise ValueError("sequences that share rows must stand side by side")
                held[cache] = Held(cache, batch + first if known is None else known.first, batch + last)
            batch += each.batch
        return cls([*held.values()], batch)

    @classmethod
    def of(cls, tree: PrefixTree, read: Callable[[list[int], PrefixCache], None]) -> PrefixCache:
        """The cache of a tree's sequences, whose runs `read` passes through the model, each into its own cache."""
        caches: list[PrefixCache] = []
        last: list[PrefixCache | None] = [None] * len(tree.tails)
        for run in tree.runs():
            caches.append(cls() if run.after is None else caches[run.after].branch(1))
            read(run.tokens, caches[-1])
            last[run.first : run.last] = [caches[-1]] * (run.last - run.first)
        return cls.beside([cls() if cache is None else cache.branch(1) for cache in last])

    def starts(self) -> list[int]:
        """Of each sequence, how many tokens it shares."""
        counts = [0] * self.batch
        for cache, first, last in self.held:
            counts[first:last] = [count + cache.length() for count in counts[first:last]]
        return counts

    def expect(self, lengths: Sequence[int]) -> None:
        """In the next pass sequence i adds its last `lengths[i]` tokens; what is before them is padding."""
        if len(lengths) != self.batch:
            raise ValueError(f"{len(lengths)} lengths for {self.batch} sequences")
        self._expected = self.length(), torch.tensor(lengths)

    def coming(self, tokens: int, past: int, valid: Tensor | None, device: torch.device) -> Axis:
        starts = self.starts()
        log = None if self.axis is None or not past else self.axis[:past]
        if self._expected is not None and self._expected[0] == past:
            padding = tokens - self._expected[1].to(device)[:, None]
            if (padding < 0).any():
                raise ValueError(f"a pass of {tokens} tokens, where {int(self._expected[1].max())} were expected")
            valid = torch.arange(tokens, device=device)[None] >= padding
        if valid is None and len({*starts}) == 1 and (log is None or log.start is not None):
            return Axis(tokens, starts[0] + past, device=device)
        newest = torch.tensor(starts, device=device)[:, None] - 1
        if log is not None:
            newest = newest.maximum(torch.where(log.validity, log.time, -1).amax(-1, keepdim=True))
        new = torch.arange(1, tokens + 1, device=device)[None] if valid is None else valid.long().cumsum(-1)
        return Axis(tokens, None, None, (newest + new).clamp_min(0), valid=valid, device=device)

    def write(self, site: int, rows: Mapping[str, Tensor], entries: Mapping[str, Entry], axis: Axis) -> Rows:
        for name, row in rows.items():
            if len(row) != self.batch:
                raise ValueError(f"this cache has {self.batch} sequences; this pass has {len(row)}")
            if entries[name].stride > 1:
                raise ValueError(f"{name!r} merges tokens into slots, whose rows sequences cannot share")
        shared = tuple(Shared(cache.kept(site, rows), first, last) for cache, first, last in self.held)
        return replace(super().write(site, rows, entries, axis), shared=shared)

    def kept(self, site: int, like: Mapping[str, Tensor]) -> Rows:
        """The rows of a site that later tokens can see, checked against those of a layer that is to read them."""
        store = self.site(site)
        held = {name: growing.rows() for name, growing in store.growing.items()}
        if held.keys() != like.keys():
            raise ValueError(
                f"the shared prefix has rows {', '.join(held) or 'of no kind'} at layer {site}; this layer writes "
                f"{', '.join(like)}"
            )
        for name, row in held.items():
            (_, heads, count, width), (_, h, _, w) = row.shape, like[name].shape
            if (heads, width, row.dtype) != (h, w, like[name].dtype):
                raise ValueError(
                    f"the shared prefix has {heads} x {width} numbers of {name!r} a token at layer {site}, "
                    f"{row.dtype}; this layer has {h} x {w}, {like[name].dtype}"
                )
        assert self.axis is not None
        if store.length != self.axis.length or len({row.shape[2] for row in held.values()}) > 1:
            raise ValueError(
                f"the shared prefix has {self.axis.length} tokens, of which layer {site} has seen {store.length}"
            )
        pinned = min((growing.pinned for growing in store.growing.values()), default=0)
        return Rows(held, axis_left(self.axis, pinned, self.axis.length - count))

    def bytes(self) -> int:
        """Bytes of the rows stored, what is shared counted once."""
        return super().bytes() + sum(Cache.bytes(cache) for cache, _, _ in self.held)

    def reserved_bytes(self) -> int:
        return super().reserved_bytes() + sum(Cache.reserved_bytes(cache) for cache, _, _ in self.held)

    def apart_bytes(self) -> int:
        """Bytes that the same sequences would take if each had rows of its own for all its tokens, without padding."""
        own = super().bytes()
        if self.axis is not None and self.axis.valid is not None:
            own = own * int(self.axis.valid.sum()) // self.axis.valid.numel()
        return own + sum(Cache.bytes(cache) * (last - first) for cache, first, last in self.held)

    def keep(self, sequences: Sequence[int]) -> None:
        """Go on with these sequences; the rows of the others are freed, and those that only they shared."""
        if not sequences:
            return self.reset()
        self.batch_select_indices(torch.tensor(sequences, device=self._device))
        if self.axis is not None and self.axis.valid is not None:
            padding = int(self.axis.valid.any(0).long().argmax())
            for layer in self.layers:
                layer.forget(padding)
            self.axis = replace(self.axis[padding:], rows=None)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        order = change(torch.arange(self.batch, device=self._device)).tolist()
        held = []
        for cache, first, last in self.held:
            places = [place for place, sequence in enumerate(order) if first <= sequence < last]
            if places and places[-1] - places[0] + 1 != len(places):
                raise ValueError("sequences that share rows must stand side by side")
            if places:
                held.append(Held(cache, places[0], places[-1] + 1))
        super()._change(change)
        self.held, self.batch, self._expected = tuple(held), len(order), None

    def reset(self) -> None:
        super().reset()
        self.held, self.batch, self._expected = (), 1, None

    def fork(self, batch: Tensor) -> PrefixCache:
        other = cast(PrefixCache, super().fork(torch.arange(self.batch, device=batch.device)))
        other.held, other.batch = self.held, self.batch
        other.batch_select_indices(batch)
        return other

    @property
    def _device(self) -> torch.device | None:
        caches = (self, *(held.cache for held in self.held))
        return next((t.device for cache in caches for layer in cache.layers for t in layer.buffers()), None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.starts()) + self.length()
