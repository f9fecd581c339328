"""A learned bias on distances shorter than a window, of another length for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias
from manyheads.core.mask import Mask
from manyheads.core.part import Heads, OptionError, Part, Position, Site
from manyheads.core.position import of_distance
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class WindowBias(Part):
    """score_h(p, s) += table_h[p - s + w_h - 1] for positions less than w_h apart, else nothing; w_h = 0: never.

    A table has 2 w_h - 1 numbers and belongs to one head. They start from a normal distribution cut at two deviations,
    of variance 0.02 / (2 w_h - 1), as the authors' do. Nothing rotates.

    Options: windows, one for each head.

    Source: Yadav et al. 2023, arXiv 2306.00561.
    """

    name: ClassVar[str] = "window_bias"
    stage: ClassVar = "position"
    paper: ClassVar[str] = "arXiv 2306.00561"
    slot: ClassVar[str | None] = "position"
    examples: ClassVar = ({"windows": (2, 5, 0, 3)},)

    windows: tuple[int, ...] = (2, 5, 10, 25, 50, 125, 0, 0)

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads", "bare scores"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if len(self.windows) != heads.q or min(self.windows) < 0:
            raise OptionError(
                f"window_bias: windows {[*self.windows]} for {heads.q} heads; give one for each, of 0 (none) or more"
            )
        return heads._replace(rotary=None)

    def build(self, before: Heads, after: Heads, site: Site) -> WindowBiasPosition:
        return WindowBiasPosition(self.windows)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(sum(map(_entries, self.windows)))


class WindowBiasPosition(Position):
    """table: those of all heads behind one another."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        super().__init__()
        self.windows = windows
        self.table = nn.Parameter(torch.empty(sum(map(_entries, windows))))
        for part in self.table.detach().split([_entries(window) for window in windows]):
            if len(part):
                deviation = (0.02 / len(part)) ** 0.5
                nn.init.trunc_normal_(part, std=deviation, a=-2 * deviation, b=2 * deviation)

    def bias(self, mask: Mask, flow: Flow) -> Bias | None:
        if not len(self.table):
            return None
        windows = torch.tensor(self.windows, device=flow.x.device)
        first = (2 * windows - 1).clamp_min(0).cumsum(0).roll(1)
        first[0] = 0
        middle, reach = ((t[None, :, None, None]) for t in (first + windows - 1, windows))

        table = self.table.to(flow.x.dtype)

        def values(distance: Tensor) -> Tensor:
            within = distance.abs() < reach
            return table[torch.where(within, middle + distance, 0)] * within

        return lambda q, k: of_distance(values, mask.q[q], mask.k[k])


def _entries(window: int) -> int:
    return max(2 * window - 1, 0)
