"""Sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyheads.attention.windows import Near, keep_newest
from manyheads.core.flow import Flow
from manyheads.core.mask import Rule
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Window(Part):
    """A query sees the `size` newest tokens up to itself (bidirectional: tokens nearer than `size` on both sides).

    The cache keeps only rows that a later query can still see: size - 1 of them.

    Options: size, one number, or a list with one for each head.

    Source: Beltagy et al. 2020, arXiv 2004.05150; sizes count the query itself, as in Mistral.
    """

    name: ClassVar[str] = "window"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2004.05150"
    examples: ClassVar = ({"size": 5}, {"size": (2, 3, 9, 4)})

    size: int | tuple[int, ...] = 4096

    def __post_init__(self) -> None:
        if min(self.sizes) < 1:
            raise OptionError(f"a window of {min(self.sizes)} tokens sees nothing; the smallest is 1 (itself)")

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.size if isinstance(self.size, tuple) else (self.size,)

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads"} if len(self.sizes) > 1 else ())

    def layout(self, heads: Heads, site: Site) -> Heads:
        if len(self.sizes) not in (1, heads.q):
            raise OptionError(f"window: {len(self.sizes)} sizes for {heads.q} heads; give one, or one for each")
        return keep_newest(heads, site, max(self.sizes))

    def build(self, before: Heads, after: Heads, site: Site) -> WindowSelect:
        return WindowSelect(self.sizes)


class WindowSelect(Piece):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.near = Near(sizes)

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (self.near,)
