"""Windows that slide with the query: their rule, and what a cache needs to keep for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.core.mask import Axis, Rule, Span, cols_of, rows_of
from manyheads.core.part import Heads, Site


@dataclass(frozen=True)
class Near:
    """The rule of keys nearer than `sizes` tokens on either side: one size, or one for each head."""

    sizes: tuple[int, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(1 - size, size - 1) for size in self.sizes)

    def of(self, heads: slice) -> Near:
        sizes = self.sizes if len(self.sizes) == 1 else self.sizes[heads]
        return Near(sizes if len({*sizes}) > 1 else sizes[:1])

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        sizes = torch.tensor(self.sizes, device=q.device)[None, :, None, None]
        return (rows_of(q.time) - cols_of(k.time)).abs() < sizes


@dataclass(frozen=True)
class Far:
    """The rule of all other keys, `size` tokens away or farther. causal: those of them that are earlier."""

    size: int
    causal: bool

    @property
    def spans(self) -> tuple[Span, ...]:
        return (Span(last=-self.size) if self.causal else Span(),)

    def of(self, heads: slice) -> Far:
        return self

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        back = rows_of(q.time) - cols_of(k.time)
        return (back if self.causal else back.abs()) >= self.size


@dataclass(frozen=True)
class First:
    """The rule of a document's first `count` tokens, which are seen beside those that another rule lets see."""

    count: int
    beside: Rule

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        return self.beside(q, k) | cols_of(k.position < self.count)


@dataclass(frozen=True)
class After:
    """The rule of all other tokens of a document, those behind its first `count`."""

    count: int

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        return cols_of(k.position >= self.count)


def keep_newest(heads: Heads, site: Site, window: int, first: int = 0) -> Heads:
    """The layout when nobody looks back over more than `window` tokens, its own included, but at the `first` ones."""
    newest = max(window - 1, 1)
    if not site.causal or site.cross:
        return heads
    if heads.keep is not None:
        other, others = heads.keep - heads.first, heads.first
        if first and others:
            newest, first = max(newest, other), min(first, others)
        elif first or others:  # what one of the two windows does not see
            newest, first = (other if first else newest), 0
        else:
            newest = min(newest, other)
    return heads._replace(keep=newest + first, first=first)
