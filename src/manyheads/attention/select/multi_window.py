"""Windows that tile the sequence, of another size for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.attention.windows import keep_newest
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Rule, Span, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MultiWindow(Part):
    """Head h sees the keys of its own window: p // w_h = s // w_h for positions p and s; w_h = 0 is a global head.

    Windows are consecutive tokens in the order given, whatever that order means (for patches it is the caller's). The
    sequence may have any length: the last window is then shorter (the authors need a multiple of every window).

    Options: windows, one for each head. shift: in odd layers windows begin w // 2 later, and nothing wraps around.

    Causal use is not the authors'; a cache then keeps what the widest window can see, or all with a global head.

    Source: Yadav et al. 2023, arXiv 2306.00561.
    """

    name: ClassVar[str] = "multi_window"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2306.00561"
    examples: ClassVar = ({"windows": (2, 5, 3, 0)}, {"windows": (4, 1, 2, 6), "shift": True})

    windows: tuple[int, ...] = (2, 5, 10, 25, 50, 125, 0, 0)
    shift: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"token queries"})  # windows are counted in positions of tokens

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if len(self.windows) != heads.q or min(self.windows) < 0:
            raise OptionError(
                f"multi_window: windows {[*self.windows]} for {heads.q} heads; give one for each, of 0 (global) or more"
            )
        return keep_newest(heads, site, max(self.windows)) if min(self.windows) else heads

    def build(self, before: Heads, after: Heads, site: Site) -> MultiWindowSelect:
        return MultiWindowSelect(self.windows, self.shift and site.layer % 2 == 1)


class MultiWindowSelect(Piece):
    def __init__(self, windows: tuple[int, ...], shifted: bool) -> None:
        super().__init__()
        self.windows, self.shifted = windows, shifted

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (Together(self.windows, self.shifted),)


@dataclass(frozen=True)
class Together:
    """The rule of keys in the query's own window, of another size for each head."""

    windows: tuple[int, ...]
    shifted: bool

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(Span(1 - window, window - 1) if window else Span() for window in self.windows)

    def of(self, heads: slice) -> Together | None:
        windows = self.windows[heads]
        return Together(windows, self.shifted) if any(windows) else None

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        windows = torch.tensor(self.windows, device=q.device)[None, :, None, None]
        size = windows.clamp_min(1)
        first = size // 2 if self.shifted else 0
        same = (rows_of(q.position) - first) // size == (cols_of(k.position) - first) // size
        kept = (rows_of(q.time) - cols_of(k.time)).abs() < size  # always so, unless padding stands inside a window
        return (same & kept) | (windows == 0)
