"""Sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyheads.attention.windows import First, Near, keep_newest
from manyheads.core.flow import Flow
from manyheads.core.mask import Rule
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Window(Part):
    """A query sees the `size` newest tokens up to itself (bidirectional: tokens nearer than `size` on both sides).

    The cache keeps only rows that a later query can still see: size - 1 of them. Padding between tokens takes up places
    in a window, so pad on the left.

    Options: size, one number, or a list with one for each head. first: so many tokens at the start of a document (by
    position) are seen at any distance, and stay in the cache: meta tokens, attention sinks.

    Source: Beltagy et al. 2020, arXiv 2004.05150; sizes count the query itself, as in Mistral (a window of W tokens
    before it is `size=W+1`). The first tokens: arXiv 2309.17453, arXiv 2411.13676.
    """

    name: ClassVar[str] = "window"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2004.05150"
    examples: ClassVar = ({"size": 5}, {"size": (2, 3, 9, 4)}, {"size": 3, "first": 2})

    size: int | tuple[int, ...] = 4096
    first: int = 0

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise OptionError(f"a window of {min(self.sizes)} tokens sees nothing; the smallest is 1 (itself)")
        if self.first < 0:
            raise OptionError(f"window: first={self.first}; 0 or more")

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.size if isinstance(self.size, tuple) else (self.size,)

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset(
            ({"alike heads"} if len(self.sizes) > 1 else set()) | ({"adjacent keys"} if self.first else set())
        )

    def layout(self, heads: Heads, site: Site) -> Heads:
        if len(self.sizes) not in (1, heads.q):
            raise OptionError(f"window: {len(self.sizes)} sizes for {heads.q} heads; give one, or one for each")
        return keep_newest(heads, site, max(self.sizes), self.first)

    def build(self, before: Heads, after: Heads, site: Site) -> WindowSelect:
        return WindowSelect(self.sizes, self.first)


class WindowSelect(Piece):
    def __init__(self, sizes: tuple[int, ...], first: int) -> None:
        super().__init__()
        self.rule: Rule = First(first, Near(sizes)) if first else Near(sizes)

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (self.rule,)
