"""The width at which a model meets another one's budget, and the feed-forward that takes up what the width leaves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, get_args

from manyheads.bench.design import Costs, Design
from manyheads.core.part import OptionError

Equal = Literal["none", "params", "flops", "cache"]
EQUAL: tuple[str, ...] = get_args(Equal)
NEAR = 0.05
"""A share of the budget; what is further off is said to miss it."""
_WIDEST = 8  # times the base's width


@dataclass(frozen=True)
class Fitted:
    """A design of the chosen width, and how far its figure is from the budget (a share of it, signed)."""

    design: Design
    costs: Costs
    off: float = 0.0

    @property
    def met(self) -> bool:
        return abs(self.off) <= NEAR


def figure(costs: Costs, equal: Equal) -> float:
    """The figure that is to be equal."""
    return {"params": costs.parameters, "flops": costs.flops, "cache": costs.cache}[equal]


def fit_width(design: Design, budget: Costs, equal: Equal, context: int, itemsize: int = 4) -> Fitted:
    """The width whose figure comes nearest to the budget's; of equally near ones the nearest to the design's own.

    Parameters and FLOPs are then met by the width of the feed-forward, which is free where that of the model goes in
    steps; a cache knows nothing of it.

    Widths are multiples of twice the head count, so that heads have an even, equal number of channels, from one such
    step to eight times the design's width, and the design's own; those that its parts do not accept are left out.

    Raises:
        OptionError: the spec accepts no width.
    """
    step = 2 * design.heads
    widths = range(step, max(_WIDEST * design.dim, step) + 1, step)
    wanted, known = figure(budget, equal), {}
    if not wanted:
        raise OptionError(f"the base has a budget of nothing to meet ({equal})")

    def at(width: int) -> Fitted | None:
        """None where the spec takes no such width."""
        if width not in known:
            try:
                made = replace(design, dim=width)
                made.check(context)
                costs = made.costs(context, itemsize)
                known[width] = Fitted(made, costs, figure(costs, equal) / wanted - 1)
            except OptionError:
                known[width] = None
        return known[width]

    def above(index: int) -> bool:
        """Whether the figure at this width, or at the next one that is accepted, reaches the budget."""
        found = next((fitted for width in widths[index:] if (fitted := at(width)) is not None), None)
        return found is None or found.off >= 0

    def some(near: Iterable[int]) -> list[Fitted]:
        """The first three that are accepted."""
        return list(islice(filter(None, map(at, near)), 3))

    crossing = bisect_left(range(len(widths)), True, key=above)
    accepted = [*some(reversed(widths[:crossing])), *some(widths[crossing:]), *some([design.dim])]
    if not accepted:
        design.check(context)  # says why
    best = min(accepted, key=lambda fitted: (abs(fitted.off), abs(fitted.design.dim - design.dim)))
    return best if equal == "cache" else _filled(best, wanted, equal, context, itemsize)


def _filled(fitted: Fitted, wanted: float, equal: Equal, context: int, itemsize: int) -> Fitted:
    """The same width with the feed-forward's own width so that the figure, which is linear in it, is met."""
    some, more = (replace(fitted.design, hidden=hidden) for hidden in (fitted.design.dim, 2 * fitted.design.dim))
    low, high = (figure(design.costs(context, itemsize), equal) for design in (some, more))
    if fitted.off == 0 or high <= low:  # met, or there is no feed-forward whose width counts
        return fitted
    hidden = round(fitted.design.dim * (1 + (wanted - low) / (high - low)))
    made = replace(fitted.design, hidden=max(hidden, 1))
    costs = made.costs(context, itemsize)
    return Fitted(made, costs, figure(costs, equal) / wanted - 1)
