"""The kernels that can solve a `Call`, by name. Each takes (call, program, need_lse, dropout) and returns an `Out`."""

from manyheads.core.kernels.banded import banded
from manyheads.core.kernels.flash_cpu import flash_cpu
from manyheads.core.kernels.flex import flex
from manyheads.core.kernels.grouped import grouped
from manyheads.core.kernels.sdpa import sdpa
from manyheads.core.kernels.tiled import tiled

KERNELS = {"grouped": grouped, "sdpa": sdpa, "banded": banded, "flash_cpu": flash_cpu, "flex": flex, "tiled": tiled}

__all__ = ["KERNELS", "banded", "flash_cpu", "flex", "grouped", "sdpa", "tiled"]
