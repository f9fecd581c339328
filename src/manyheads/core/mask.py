"""Which query may attend to which key, said once for every kernel.

A sequence axis is described by an `Axis` (position, time, segment, validity of each row) and a `Mask` is two axes and
a tuple of rules over them. One polarity everywhere: True means "may attend".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Axis:
    """What each of the `length` rows of a sequence axis is. Every tensor is `[B or 1, length]`.

    `time` orders tokens (causality, windows); `position` is what rotations and biases read and equals `time` unless
    given. `segment` separates packed documents; `valid` is False on padding (None: all rows are tokens).
    `start` is set when time is `start, start + 1, …` in every row, so that tensors need not exist at all.
    """

    length: int
    start: int | None = None
    given_position: Tensor | None = None
    given_time: Tensor | None = None
    segment: Tensor | None = None
    valid: Tensor | None = None
    rows: Tensor | None = None  # which rows of the whole axis these are, None: all of them in order
    device: torch.device | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def time(self) -> Tensor:
        if self.given_time is not None:
            return self.given_time
        first = self.start
        assert first is not None
        return self.once("time", lambda: torch.arange(first, first + self.length, device=self.device)[None])

    @property
    def position(self) -> Tensor:
        return self.time if self.given_position is None else self.given_position

    @property
    def counted(self) -> int | None:
        """The first position where positions count on from it in every row, known without looking at data."""
        return self.start if self.given_position is None else None

    @property
    def whole(self) -> bool:
        """Every row is a token of one and the same document."""
        return self.valid is None and self.segment is None

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, computed once for this axis (layers of one pass share their axis, and so its rotations)."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def map(self, change: Callable[[Tensor], Tensor], length: int) -> Axis:
        """The axis whose every tensor went through `change`."""
        all_rows = torch.arange(self.length, device=self.device)[None] if self.rows is None else self.rows
        parts = (self.given_position, self.time, self.segment, self.valid, all_rows)
        position, time, segment, valid, rows = (None if part is None else change(part) for part in parts)
        return Axis(length, None, position, time, segment, valid, rows, self.device)

    def to(self, device: torch.device) -> Axis:
        """The same axis on a device."""
        return self._each(lambda t: t.to(device), device)

    def batch(self, change: Callable[[Tensor], Tensor]) -> Axis:
        """The axis after a change of the batch (reorder, repeat, select) of whatever differs between sequences."""
        return self._each(lambda t: t if len(t) == 1 else change(t), self.device)

    def _each(self, change: Callable[[Tensor], Tensor], device: torch.device | None) -> Axis:
        parts = (self.given_position, self.given_time, self.segment, self.valid, self.rows)
        return Axis(self.length, self.start, *(None if t is None else change(t) for t in parts), device=device)

    def __getitem__(self, cut: slice) -> Axis:
        first, last, _ = cut.indices(self.length)
        last = max(first, last)
        if (first, last) == (0, self.length):
            return self
        rows = torch.arange(first, last, device=self.device)[None] if self.rows is None else self.rows[..., first:last]
        given = (self.given_position, self.given_time, self.segment, self.valid)
        position, time, segment, valid = (None if t is None else t[..., first:last] for t in given)
        start = None if self.start is None else self.start + first
        return Axis(last - first, start, position, time, segment, valid, rows, self.device)

    def take(self, index: Tensor) -> Axis:
        """Rows by index `[B or 1, M]`, one choice for each sequence."""

        def pick(t: Tensor) -> Tensor:
            batch = max(len(t), len(index))
            return t.expand(batch, -1).gather(1, index.expand(batch, -1))

        return self.map(pick, index.shape[-1])

    def within(self, whole: Axis) -> Tensor | slice:
        """Where these rows, cut from `whole`, stand in it."""
        if self.rows is None or self is whole:
            return slice(None)
        return self.rows[0] if whole.rows is None else self.rows[0] - whole.rows[0, :1]

    def repeat(self, times: int) -> Axis:
        """Every row `times` times in a row (pseudo-tokens share their token's place)."""
        return self.map(lambda t: t.repeat_interleave(times, -1), self.length * times)

    def cat(self, other: Axis) -> Axis:
        """This axis followed by the other; `rows` counts on."""
        start = None
        if self.start is not None and other.start == self.start + self.length:
            start = self.start
        placed = self.given_position is not None or other.given_position is not None
        segmented = self.segment is not None or other.segment is not None
        masked = self.valid is not None or other.valid is not None
        return Axis(
            self.length + other.length,
            start,
            _join(self.position, other.position) if placed or start is None else None,
            None if start is not None else _join(self.time, other.time),
            _join(self._segment(), other._segment()) if segmented else None,
            _join(self.validity, other.validity) if masked else None,
            device=self.device,
        )

    @property
    def validity(self) -> Tensor:
        """`valid` as a tensor, bool `[B or 1, length]`."""
        return torch.ones_like(self.time, dtype=torch.bool) if self.valid is None else self.valid

    def _segment(self) -> Tensor:
        return torch.zeros_like(self.time) if self.segment is None else self.segment


def _join(a: Tensor, b: Tensor) -> Tensor:
    batch = max(len(a), len(b))
    return torch.cat([a.expand(batch, -1), b.expand(batch, -1)], -1)


class Rule(Protocol):
    """Of two axes: which query may see which key, bool `[B or 1, H or 1, T, S]`."""

    def __call__(self, q: Axis, k: Axis) -> Tensor: ...


class Span(NamedTuple):
    """The times of keys that a query may see at most, counted from its own: `first` to `last`."""

    first: float = -inf
    last: float = inf


@runtime_checkable
class Bounded(Rule, Protocol):
    """A rule that bounds by time alone what is seen, so that kernels need not look further.

    spans: one for all heads, or one for each. of: the rule of some heads alone, None where it hides nothing from them.
    """

    @property
    def spans(self) -> tuple[Span, ...]: ...
    def of(self, heads: slice) -> Rule | None: ...


def rows_of(t: Tensor) -> Tensor:
    """A `[B, T]` tensor of queries, ready to be compared with keys: `[B, 1, T, 1]`."""
    return t[:, None, :, None]


def cols_of(t: Tensor) -> Tensor:
    """A `[B, S]` tensor of keys, ready to be compared with queries: `[B, 1, 1, S]`."""
    return t[:, None, None, :]


class Causal:
    """A query sees keys of its own time and earlier: the newest query lines up with the newest key."""

    spans = (Span(last=0),)

    def of(self, heads: slice) -> Causal:
        return self

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        return cols_of(k.time) <= rows_of(q.time)


causal = Causal()


@dataclass(frozen=True, eq=False)
class Given:
    """A mask that came from outside, bool `[B or 1, H or 1, T, S]`, True = may attend."""

    mask: Tensor

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        mask = self.mask
        for rows, dim in ((q.rows, -2), (k.rows, -1)):
            if rows is None or mask.shape[dim] == 1:  # one row that serves all
                continue
            if len(rows) == 1:
                mask = mask.index_select(dim, rows[0])
                continue
            index = rows[:, None, :, None] if dim == -2 else rows[:, None, None, :]
            mask = mask.expand(len(rows), -1, -1, -1)
            other = mask.shape[-1] if dim == -2 else mask.shape[-2]
            shape = (-1, mask.shape[1], -1, other) if dim == -2 else (-1, mask.shape[1], other, -1)
            mask = mask.gather(dim, index.expand(*shape))
        return mask


@dataclass(frozen=True, eq=False)
class Mask:
    """Two axes and the rules between them. Padding and packed documents are in the axes, not in the rules.

    A query that sees no key gets exactly zero and passes no gradient; every kernel holds to it.
    """

    q: Axis
    k: Axis
    rules: tuple[Rule, ...] = (causal,)

    def __and__(self, rule: Rule) -> Mask:
        return replace(self, rules=(*self.rules, rule))

    @property
    def is_full(self) -> bool:
        """Every query sees every key, known without looking at data."""
        if not (self.q.whole and self.k.whole):
            return False
        if self.rules == (causal,):
            q, k = self.q.start, self.k.start
            return self.q.length == 1 and q is not None and k is not None and k + self.k.length - 1 <= q
        return len(self.rules) == 0  # `not` on a tuple stops torch.compile

    @property
    def is_causal(self) -> bool:
        """The square causal triangle and nothing else."""
        aligned = self.q.start is not None and self.q.start == self.k.start and self.q.length == self.k.length
        return aligned and self.rules == (causal,) and self.q.whole and self.k.whole

    @property
    def sees_some(self) -> bool:
        """Every query sees a key, known without looking at data."""
        if not (self.q.whole and self.k.whole and self.k.length):
            return False
        q, k = self.q.start, self.k.start
        return len(self.rules) == 0 or (self.rules == (causal,) and q is not None and k is not None and k <= q)

    @property
    def spans(self) -> tuple[Span, ...]:
        """What all heads see at most, or what each does, known without looking at data."""
        bounds = [rule.spans for rule in self.rules if isinstance(rule, Bounded)]
        heads = max([1, *map(len, bounds)])
        each = zip(*(spans * (heads // len(spans)) for spans in bounds), strict=True)
        return tuple(Span(max(s.first for s in of), min(s.last for s in of)) for of in each) or (Span(),)

    def reach(self, rows: slice) -> slice:
        """The keys that hold all that these query rows may see, known without looking at data."""
        q, k, keys = self.q.start, self.k.start, self.k.length
        if q is None or k is None:
            return slice(0, keys)
        first, last = min(span.first for span in self.spans), max(span.last for span in self.spans)
        stop = int(min(keys, max(0, q + rows.stop + last - k)))
        return slice(int(min(stop, max(0, q + rows.start + first - k))), stop)

    def of(self, heads: slice) -> Mask:
        """The mask of some heads alone."""

        def cut(rule: Rule) -> Rule:
            return lambda q, k: seen if (seen := rule(q, k)).shape[1] == 1 else seen[:, heads]

        each = (rule.of(heads) if isinstance(rule, Bounded) else cut(rule) for rule in self.rules)
        return replace(self, rules=tuple(rule for rule in each if rule is not None))

    def tile(self, q: slice = slice(None), k: slice = slice(None)) -> Tensor:
        """The mask of some query rows and some keys, bool `[B or 1, H or 1, t, s]`."""
        rows, keys = self.q[q], self.k[k]
        seen = torch.ones(1, 1, rows.length, keys.length, dtype=torch.bool, device=keys.device)
        for rule in self.rules:
            seen = seen & rule(rows, keys)
        if keys.valid is not None:
            seen = seen & cols_of(keys.valid)
        if rows.valid is not None:
            seen = seen & rows_of(rows.valid)
        if rows.segment is not None and keys.segment is not None:
            seen = seen & (rows_of(rows.segment) == cols_of(keys.segment))
        return seen

    def visible(self) -> Tensor:
        """How many keys each query sees, int64 `[B or 1, H or 1, T]`."""
        return self.tile().sum(-1)

    def additive(self, dtype: torch.dtype) -> Tensor:
        """0 where a query may look, -inf elsewhere, `[B or 1, H or 1, T, S]`."""
        hidden = self.tile().logical_not().view(torch.int8).to(dtype)
        return hidden.mul_(-torch.finfo(dtype).max).mul_(2)  # several times faster than to fill by a mask
