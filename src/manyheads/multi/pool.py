"""Tokens to rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pooled(x: Tensor, pool: str, mask: Tensor | None = None) -> Tensor:
    """`[B, T, D]` to `[B, D]` over tokens that are no padding; a row without any gives zeros."""
    if not x.shape[1]:
        return x.sum(1)
    if mask is None:
        mask = x.new_ones(x.shape[:2], dtype=torch.bool)
    kept = mask[..., None]
    if pool == "mean":
        return x.masked_fill(~kept, 0).sum(1) / kept.sum(1).clamp(min=1)
    if pool == "max":
        return x.masked_fill(~kept, -math.inf).amax(1).masked_fill(~mask.any(1)[:, None], 0)
    at = mask.int().argmax(1) if pool == "first" else mask.shape[1] - 1 - mask.int().flip(1).argmax(1)
    return x[torch.arange(len(x), device=x.device), at].masked_fill(~mask.any(1)[:, None], 0)
