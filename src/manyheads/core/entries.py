"""What a layer declares that it caches: rows of every token, and states of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.core.packing import Packing


class Entry(NamedTuple):
    """A tensor cached for every token, `[B, heads, slots, width]`.

    role: which transforms touch it when written ("k", "v", or None for rows that are neither yet). stride: tokens that
    share one slot, the last of them being what the slot holds. keep: how many of the newest rows later queries can
    still see (None: all; 0: none, and the row is not stored); `first` of these are the first rows instead. packing:
    how rows are stored, if not as they are; they are read as they come back, in the pass that makes them too.
    """

    heads: int
    width: int
    role: str | None = None
    stride: int = 1
    keep: int | None = None
    dtype: torch.dtype | None = None
    first: int = 0
    packing: Packing | None = None

    def read(self, rows: Tensor) -> Tensor:
        """Rows as a pass reads them that has no cache."""
        return rows if self.packing is None else self.packing.through(rows)


class State(NamedTuple):
    """A tensor kept for every sequence, `[B, *shape]`; history: it can be given for earlier tokens too.

    every: tokens that add one to its dimension 2 (0: its size is fixed).
    """

    shape: tuple[int, ...]
    history: bool = False
    dtype: torch.dtype | None = None
    every: int = 0
