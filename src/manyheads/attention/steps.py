"""The steps of discretised state spaces: how far one token moves the state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyheads.core.part import OptionError


def step_range(part: str, least: float, most: float) -> None:
    """Refuse what is no range of steps."""
    if not 0 < least <= most:
        raise OptionError(f"{part}: steps from dt_min={least} to dt_max={most}; 0 < dt_min ≤ dt_max")


def first_steps(n: int, least: float, most: float) -> Tensor:
    """The bias b with softplus(b) drawn from [least, most] evenly in its logarithm, `[n]`."""
    step = torch.empty(n).uniform_(math.log(least), math.log(most)).exp()
    return step + torch.log(-torch.expm1(-step))
