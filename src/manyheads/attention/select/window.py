"""Sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Rule, cols_of, rows_of
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
        keep = max(max(self.sizes) - 1, 1)
        if not site.causal or site.cross or (heads.keep is not None and heads.keep < keep):
            return heads
        return heads._replace(keep=keep)

    def build(self, before: Heads, after: Heads, site: Site) -> WindowSelect:
        return WindowSelect(self.sizes)


class WindowSelect(Piece):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (self._near,)

    def _near(self, q: Axis, k: Axis) -> Tensor:
        sizes = torch.tensor(self.sizes, device=q.device)[None, :, None, None]
        return (rows_of(q.time) - cols_of(k.time)).abs() < sizes
