"""Shares of the heads in a token, which add up to one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HeadSoftmax(nn.Module):
    """c · softmax over heads of x W + b, in float32 at least, `[B, heads, T, 1]`; equal at the start."""

    def __init__(self, dim: int, heads: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.map = nn.Linear(dim, heads)
        nn.init.zeros_(self.map.weight)
        nn.init.zeros_(self.map.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.map(x)
        shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return self.scale * shares.transpose(1, 2)[..., None]
