"""The contract of an aggregator: many tokens to one, to few, or to those of each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.core.kinds import Kinds, Named
from manyheads.core.spec import printed


class Pooled(NamedTuple):
    """What an aggregator gives. M is the number of results.

    out: `[B, M, D']`. weights: `[B, H, M, N]`, of each token in each result, by head. assign: long `[B, N]`, the result
    that a token went to, -1 for padding and what was dropped. size: `[B, M]`, how many originals a result stands for;
    0 where a place holds no token.
    """

    out: Tensor
    weights: Tensor | None = None
    assign: Tensor | None = None
    size: Tensor | None = None


@dataclass(frozen=True)
class Options(Named):
    """What one aggregator is. A kind of aggregator is one file in this room: a frozen dataclass of options under
    `register_aggregator(name)`, whose `build(width)` gives the `Aggregator`. It prints as the line that reads back.
    """

    ordered: ClassVar[bool] = False
    """Whether the order of tokens counts."""
    repeats: ClassVar[bool] = True
    """Whether a token of size 2 is the token twice. Where it is not, `size` is refused."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of `query` and `cond` it may be given."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Those of them that it must be given."""
    merges: ClassVar[bool] = False
    """Whether it gives M of N tokens with `assign` and `size`, so that `unmerge` is possible."""

    def build(self, width: int) -> Aggregator:
        """The module, for tokens `width` wide."""
        raise NotImplementedError

    def tokens(self) -> int | None:
        """How many tokens it is made for; None: any number."""
        return None

    @classmethod
    def examples(cls) -> tuple[Options, ...]:
        """Option sets that go other ways through the code, for width 8; the laws are held to them and the defaults."""
        return ()

    def __str__(self) -> str:
        return printed(self)


class Aggregator(nn.Module):
    """Tokens x `[B, N, D]` to `Pooled`. A subclass gives `pool`.

    Padding is left out exactly: whatever is in it, NaN too, reaches nothing. A row without any token gives exactly 0,
    with weights 0, and passes no gradient. Rows know nothing of each other.

    options: what it was built from; `str(aggregator.options)` is its line. width: D.
    """

    options: Any

    def __init__(self, options: Options, width: int) -> None:
        super().__init__()
        check_whole(width=width)
        self.options, self.width = options, width

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, size: Tensor | None = None, query: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Pooled:  # fmt: skip
        """Pool.

        Args:
            x: `[B, N, D]`. mask: bool `[B, N]`, False on padding. size: `[B, N]`, how many originals a token stands for
                (0: none, as padding). query: `[B, M, D]`, who asks. cond: what the way of pooling depends on, `[B, …]`.

        Raises:
            ValueError: shapes that disagree, negative sizes, an argument that this aggregator does not take or lacks.
        """
        x, mask, size = self.cleaned(x, mask, size)
        self._given(query=query, cond=cond)
        if query is not None and (query.dim() != 3 or query.shape[::2] != x.shape[::2]):
            raise ValueError(f"{self.options.name}: query is {list(query.shape)}; [{len(x)}, queries, {self.width}]")
        made = self.options.tokens()
        if made is not None and x.shape[1] != made:
            raise ValueError(f"{self.options.name}: it was built for {made} tokens, x has {x.shape[1]}")
        if not len(x):  # of no rows, what one row has but the row
            more = {"size": size, "query": query, "cond": cond}
            one = self(x.new_zeros(1, *x.shape[1:]), **{
                what: None if each is None else each.new_ones(1, *each.shape[1:]) for what, each in more.items()
            })  # fmt: skip
            return Pooled._make(None if each is None else each[:0] for each in one)
        if not x.shape[1]:
            x, mask = x.new_zeros(len(x), 1, self.width), mask.new_zeros(len(x), 1)
            size = None if size is None else size.new_zeros(len(x), 1)
        filled = mask.any(1)
        first = torch.arange(x.shape[1], device=x.device) == 0
        seen = mask | (~filled[:, None] & first)  # a row without tokens is one token 0, whose result is then left out
        found = self.pool(x, seen, size if size is None else torch.where(mask, size, 1.0), query=query, cond=cond)
        out = torch.where(filled[:, None, None], found.out, 0.0)
        weights, assign, sizes = found.weights, found.assign, found.size
        return Pooled(
            out,
            None if weights is None else torch.where(mask[:, None, None], weights, 0.0),
            None if assign is None else assign.masked_fill(~mask, -1),
            None if sizes is None else sizes * filled[:, None],
        )

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        """Pool rows that each have a token. x: 0 on padding. mask: there is one. size: above 0, or None."""
        raise NotImplementedError

    @torch.no_grad()
    def results(self, tokens: int = 1) -> tuple[int, int]:
        """M and D': how many results so many tokens give, and how wide they are."""
        like = next(chain(self.parameters(), self.buffers()), torch.zeros(()))
        return tuple(self(like.new_zeros(1, tokens, self.width)).out.shape[1:])  # type: ignore[return-value]

    def unmerge(self, pooled: Pooled, of: Tensor | None = None) -> Tensor:
        """`[B, N, D']`: to each token the result that it went to. of: what those get that went nowhere (default 0)."""
        if pooled.assign is None:
            raise ValueError(f"{self.options.name}: there is no saying which result a token went to")
        gone = pooled.assign < 0
        at = pooled.assign.clamp(min=0)[..., None].expand(-1, -1, pooled.out.shape[-1])
        return torch.where(gone[..., None], 0.0 if of is None else of, pooled.out.gather(1, at))

    def mix(self, parts: Sequence[Tensor], cond: Tensor | None = None) -> Tensor:
        """One tensor of several alike `[B, …, D]`, of layers, scales, heads or models: each place is a set of them.

        cond: `[B, C]`, the same at each place of a row, or `[B, …, C]`.
        """
        if not parts:
            raise ValueError(f"{self.options.name}: there is nothing to mix")
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            raise ValueError(f"{self.options.name}: what is mixed has one shape, not {' and '.join(map(str, shapes))}")
        places = parts[0].shape[:-1]
        if cond is not None:
            if cond.dim() == 2:
                cond = cond.reshape(len(cond), *[1] * (len(places) - 1), cond.shape[-1])
            cond = cond.expand(*places, cond.shape[-1]).flatten(0, -2)
        out = self(torch.stack(list(parts), -2).flatten(0, -3), cond=cond).out
        if out.shape[1] != 1:
            raise ValueError(f"{self.options.name}: it gives {out.shape[1]} results, and a mixture is one")
        return out.reshape(*places, out.shape[-1])

    def cleaned(self, x: Tensor, mask: Tensor | None, size: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x with 0 on padding, the mask, sizes; checked."""
        name = self.options.name
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(f"{name}: x is [rows, tokens, {self.width}], not {list(x.shape)}")
        for what, given in (("mask", mask), ("size", size)):
            if given is not None and given.shape != x.shape[:2]:
                raise ValueError(f"{name}: {what} is {list(given.shape)}, x needs {list(x.shape[:2])}")
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        elif mask.dtype != torch.bool:
            raise ValueError(f"{name}: mask is bool, True on tokens, not {mask.dtype}")
        if size is not None:
            if not self.options.repeats:
                raise ValueError(f"{name}: it takes no size: a token of size 2 would not be the token twice")
            size = torch.where(mask, size.to(x.dtype), 0.0)
            if not bool((size >= 0).all()):
                raise ValueError(f"{name}: a size is a number from 0 on, not {size[~(size >= 0)][0].item():g}")
            mask = mask & (size > 0)
        return torch.where(mask[..., None], x, 0.0), mask, size

    def _given(self, **given: Tensor | None) -> None:
        for what, value in given.items():
            if value is not None and what not in self.options.takes:
                raise ValueError(f"{self.options.name}: it takes no {what}")
            if value is None and what in self.options.needs:
                raise ValueError(f"{self.options.name}: it needs a {what}")

    def extra_repr(self) -> str:
        return str(self.options)


class Streamed(Aggregator):
    """An aggregator whose result follows exactly from a state of fixed size, so that a set may come in blocks.

    >>> state = agg.update(agg.update(agg.init(2), first), second)
    >>> agg.finalize(state).out  # that of both at once

    A subclass gives `observe`, `merge` and `finalize`; a state is a tuple of tensors `[B, …]`.
    """

    @property
    def exact(self) -> bool:
        """Whether blocks give just what one pass gives, however a set is cut."""
        return True

    def init(self, rows: int, like: Tensor | None = None) -> Any:
        """The state of no token, in the type and on the device of the weights, or of `like`."""
        like = next(chain(self.parameters(), self.buffers()), torch.zeros(())) if like is None else like
        none = torch.zeros(rows, 1, dtype=torch.bool, device=like.device)
        return self.observe(like.new_zeros(rows, 1, self.width), none)

    def update(self, state: Any, x: Tensor, mask: Tensor | None = None, *, size: Tensor | None = None) -> Any:
        """The state with more tokens `[B, n, D]`."""
        x, mask, size = self.cleaned(x, mask, size)
        return self.merge(state, self.observe(x, mask, size)) if x.shape[1] else state

    def observe(self, x: Tensor, mask: Tensor, size: Tensor | None = None) -> Any:
        """The state of one block; rows may have no token."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any) -> Any:
        """The state of two sets together."""
        raise NotImplementedError

    def finalize(self, state: Any) -> Pooled:
        """The result of a state: that of one pass; 0 of no token."""
        raise NotImplementedError


def counted(mask: Tensor, size: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[B, N]`: how many originals each token stands for, 0 on padding."""
    return mask.to(dtype) if size is None else torch.where(mask, size.to(dtype), 0.0)


def size_bias(mask: Tensor, size: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[B, N]`: ln(size), added to scores, so that a token of size s weighs as much as s of it; -inf on padding."""
    return counted(mask, size, dtype).log()


def weigh(scores: Tensor, mask: Tensor, size: Tensor | None = None) -> Tensor:
    """Softmax over tokens of scores `[B, H, M, N]`, with sizes `[B, N]`, without padding."""
    return (scores + size_bias(mask, size, scores.dtype)[:, None, None]).softmax(-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, size: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Proportional attention of queries `[B, H, M, d]` to keys and values `[B, H, N, d]`: head outputs and weights.

    softmax(q kᵀ·scale + ln size) v, scale 1/sqrt(d). Maps are formed: M is small where tokens are pooled.
    """
    weights = weigh((q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT, mask, size)
    return weights @ v, weights


KINDS = Kinds(Options, "aggregator {}")
register_aggregator, find_aggregator, read_aggregator = KINDS.register, KINDS.find, KINDS.read


def build(line: str | Options, width: int) -> Aggregator:
    """The aggregator of a line, for tokens `width` wide.

    >>> build("abmil(gated=true)", 64)(x, mask).out  # [B, 1, 64]
    """
    return read_aggregator(line).build(width)


__all__ = [
    "Aggregator", "Options", "Pooled", "Streamed", "attend", "build", "counted", "find_aggregator", "read_aggregator",
    "register_aggregator", "size_bias", "weigh",
]  # fmt: skip
