"""Windows that slide with the query: their rule, and what a cache needs to keep for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyheads.core.mask import Axis, cols_of, rows_of
from manyheads.core.part import Heads, Site


@dataclass(frozen=True)
class Near:
    """The rule of keys nearer than `sizes` tokens on either side: one size, or one for each head."""

    sizes: tuple[int, ...]

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        sizes = torch.tensor(self.sizes, device=q.device)[None, :, None, None]
        return (rows_of(q.time) - cols_of(k.time)).abs() < sizes


def keep_newest(heads: Heads, site: Site, window: int) -> Heads:
    """The layout when nobody looks back over more than `window` tokens, the query's own included."""
    keep = max(window - 1, 1)
    if not site.causal or site.cross or (heads.keep is not None and heads.keep < keep):
        return heads
    return heads._replace(keep=keep)
