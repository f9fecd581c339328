"""Schedules over depth that several parts share."""

import math


def differential_lambda(layer: int, offset: int = 0) -> float:
    """0.8 - 0.6 exp(-0.3 l), l the 0-based layer: 0.2 at the first, towards 0.8 with depth.

    The paper writes it for 1-based layers as exp(-0.3 (l - 1)). `offset` -1 reproduces checkpoints trained with code
    that subtracts one from the 0-based index.
    """
    return 0.8 - 0.6 * math.exp(-0.3 * (layer + offset))
