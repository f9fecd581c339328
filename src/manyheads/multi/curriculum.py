"""A curriculum of heads: harder variants of a task join, each with a head of its own, as the present ones are learned.

Source: Khajehabdollahi et al. 2024 (ICLR), Emergent mechanisms for long timescales depend on training curriculum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from manyheads.core.check import OptionError


@dataclass(frozen=True)
class Curriculum:
    """Which heads learn now, by the accuracies of those that did.

    >>> plan = Curriculum(["2", "3", "4"])
    >>> active = plan.start()                          # ("2",)
    >>> model(x, targets=labels, heads=active)
    >>> active = plan.after(active, {"2": 0.99})       # ("2", "3")

    The next one joins when the mean accuracy and that of the newest are both above `enough`; exactly `enough` is not.
    Heads are called by what they learn and keep it: the authors' code has the place in the list in their stead, so
    that heads change their task when the window moves.

    Args:
        order: names of heads, easiest first. enough: the accuracy asked for.
        window: how many of the newest learn; 0: all (cumulative), 1: the newest alone.
        reuse: with window=1, the one head learns one task after the other; `head` says which head learns a task.
    """

    order: Sequence[str]
    enough: float = 0.98
    window: int = 0
    reuse: bool = False

    def __post_init__(self) -> None:
        if not self.order or len(set(self.order)) != len(self.order):
            raise OptionError(f"curriculum: order={list(self.order)}; at least one name, each once")
        if not (isfinite(self.enough) and 0 <= self.enough < 1):
            raise OptionError(f"curriculum: enough={self.enough} is not in [0, 1)")
        if self.window < 0 or (self.reuse and self.window != 1):
            raise OptionError(
                f"curriculum: window={self.window}, reuse={self.reuse}; from 0 on, and reuse has window=1"
            )

    def start(self) -> tuple[str, ...]:
        return (self.order[0],)

    def head(self, task: str) -> str:
        """The head that learns a task."""
        return self.order[0] if self.reuse else task

    def after(self, active: Sequence[str], accuracies: Mapping[str, float]) -> tuple[str, ...]:
        """The tasks that are learned next; the same ones until the condition holds, or where there is no harder one."""
        if missing := [name for name in active if name not in accuracies]:
            raise ValueError(f"curriculum: no accuracy of {missing[0]!r}; it has {', '.join(map(repr, accuracies))}")
        if not active or active[-1] not in self.order:
            raise ValueError(f"curriculum: {list(active)} are not learned here; tasks are {list(self.order)}")
        mean = sum(accuracies[name] for name in active) / len(active)
        place = self.order.index(active[-1]) + 1
        if min(mean, accuracies[active[-1]]) <= self.enough or place == len(self.order):
            return tuple(active)
        return (*active, self.order[place])[-self.window :]
