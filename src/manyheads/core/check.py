"""What plain arguments are held to where they enter: an error names the argument, its value and what would fit."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


class OptionError(ValueError):
    """An option, or a combination of numbers, that a part cannot honour."""


def check_whole(least: int = 1, /, **numbers: Any) -> None:
    """Each is a whole number, and no smaller than `least`."""
    for name, value in numbers.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise OptionError(f"{name} is a whole number, not {value!r}")
        if value < least:
            raise OptionError(f"{name} is at least {least}, not {value}")


def check_top(top: Any, experts: Any, least: int = 1) -> None:
    """There are experts, and a token goes to `least` of them or more."""
    check_whole(experts=experts)
    if not isinstance(top, int) or not least <= top <= experts:
        raise OptionError(f"top={top} of experts={experts}; top may be {least} to {experts}")


def check_share(**numbers: Any) -> None:
    """Each is a number from 0 up to, but not, 1."""
    for name, value in numbers.items():
        if not is_number(value) or not 0 <= value < 1:
            raise OptionError(f"{name} is a number of at least 0 and below 1, not {value!r}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
