"""Head counts by depth: fewer, wider heads in early layers, more and narrower ones in late layers, on equal matrices.

A layer of H heads on width D has heads of D/H channels, so the weights, their names and shapes, the matrix products and
the cache of full multi-head attention are the same for every H; with `gqa(group=…)` those of grouped heads are too.

Source: Prism, arXiv 2606.27449 (widths 256, then 128; where it switches was not seen, taken as half way).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from manyheads.core.check import OptionError, check_whole
from manyheads.core.spec import printed, read_one
from manyheads.stack.sources import per_layer

WIDEST = 256
"""Channels of a head that fused kernels take."""


@dataclass(frozen=True)
class Schedule:
    """Head counts that do not fall with depth; `reverse` turns them round. A list says freely what each layer has."""

    name: ClassVar[str]

    def grow(self, dim: int, layers: int) -> list[int]:
        """The counts, first to last."""
        raise NotImplementedError

    def counts(self, dim: int, layers: int) -> list[int]:
        """The counts for that width and depth, held to what kernels and matrices take."""
        counts = self.grow(dim, layers)
        fits, turned = divisors(dim), getattr(self, "reverse", False)
        for index, heads in enumerate(counts):
            layer = layers - 1 - index if turned else index
            if heads not in fits:
                why = f"of {dim // heads} channels" if heads > 0 and dim % heads == 0 else "which do not divide it"
                raise OptionError(
                    f"{self}: dim={dim} in layer {layer} as {heads} heads {why}; heads may be {fits}, so that each has "
                    f"{WIDEST} channels at most (a list of counts may have wider ones)"
                )
            if index and heads < counts[index - 1]:
                raise OptionError(
                    f"{self}: {counts[index - 1]} heads, then {heads} in layer {layer}; name the smaller count first, "
                    f"and reverse=true where heads are to grow wider"
                )
        return counts[::-1] if turned else counts

    def __str__(self) -> str:
        return printed(self)


@dataclass(frozen=True)
class Step(Schedule):
    """`early` heads in the layers before `switch` (default: half of them), `late` heads from there on."""

    name: ClassVar[str] = "step"
    unnamed: ClassVar[int] = 2

    early: int
    late: int
    switch: int | None = None
    reverse: bool = False

    def grow(self, dim: int, layers: int) -> list[int]:
        switch = layers // 2 if self.switch is None else self.switch
        if not 0 <= switch <= layers:
            raise OptionError(f"{self}: a switch in layer {switch} of {layers}; it may be 0 to {layers}")
        return [self.early] * switch + [self.late] * (layers - switch)


@dataclass(frozen=True)
class Prism(Schedule):
    """A `Step` by the width of a head: `early` channels, then `late` ones."""

    name: ClassVar[str] = "prism"
    unnamed: ClassVar[int] = 2

    early: int = 256
    late: int = 128
    switch: int | None = None
    reverse: bool = False

    def grow(self, dim: int, layers: int) -> list[int]:
        for width in (self.early, self.late):
            if width < 1 or dim % width:
                fits = [dim // heads for heads in reversed(divisors(dim))]
                raise OptionError(f"{self}: dim={dim} is no multiple of a head's {width} channels; it may have {fits}")
        return Step(dim // self.early, dim // self.late, self.switch).grow(dim, layers)


@dataclass(frozen=True)
class Geometric(Schedule):
    """Counts in equal ratios from `first` to `last`, each the nearest that divides D and is a multiple of `multiple`.

    (A `gqa(group=g)` in every layer takes multiples of g.)
    """

    name: ClassVar[str] = "geometric"
    unnamed: ClassVar[int] = 2

    first: int
    last: int
    multiple: int = 1
    reverse: bool = False

    def grow(self, dim: int, layers: int) -> list[int]:
        fits = [heads for heads in divisors(dim) if self.multiple > 0 and heads % self.multiple == 0]
        for heads in (self.first, self.last):
            if heads not in fits:
                raise OptionError(f"{self}: {heads} heads do not fit dim={dim}; they may be {fits}")
        ratio = self.last / self.first
        wanted = [self.first * ratio ** (layer / max(1, layers - 1)) for layer in range(layers)]
        return [min(fits, key=lambda heads: (max(heads / each, each / heads), heads)) for each in wanted]


SCHEDULES: dict[str, type[Schedule]] = {each.name: each for each in (Step, Prism, Geometric)}

HeadCounts = int | str | Sequence[int] | Schedule
"""One count for all layers, one a layer, or a schedule or its text, such as `step(3, 6, switch=4)`."""


def head_counts(heads: HeadCounts, dim: int, layers: int, what: str = "heads") -> list[int]:
    """Query heads of each layer. what: the argument they are."""
    if isinstance(heads, str):
        numbers = [each.strip() for each in heads.strip().strip("[]").split(",")]
        if not all(each.isdigit() for each in numbers):
            heads = cast(Schedule, read_one(heads, _find))
        else:
            heads = [int(each) for each in numbers] if len(numbers) > 1 else int(heads)
    counts = heads.counts(dim, layers) if isinstance(heads, Schedule) else per_layer(heads, layers, "head counts")
    counts = cast("list[int]", counts)
    for count in counts:
        check_whole(**{what: count})
    return counts


def divisors(dim: int) -> list[int]:
    """Head counts that divide D into heads of `WIDEST` channels at most."""
    return [heads for heads in range(1, dim + 1) if dim % heads == 0 and dim // heads <= WIDEST]


def _find(name: str) -> type[Schedule]:
    if name not in SCHEDULES:
        raise OptionError(f"no schedule of heads {name!r}; there are {', '.join(SCHEDULES)}, or one count or a list")
    return SCHEDULES[name]
