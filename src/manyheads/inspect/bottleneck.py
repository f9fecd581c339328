"""A layer of one head that nothing can go around: what it does not look at cannot pass, and users may edit its map."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import check_whole


class Seen(NamedTuple):
    """z `[B, T, D]`; map `[B, S]`, what the first token looks at before the gate (or the map that was given)."""

    z: Tensor
    map: Tensor


class Bottleneck(nn.Module):
    """One head of width D between two sets of tokens, whose first ones are CLS: z = o + MLP(LN(o)), without x itself.

    q = W_q LN(x), k, v = W LN(y), A = softmax(qkᵀ / √D), o = A v W_O + b. The row of the first query is gated by what
    it gives to the first key, A_0 ← (1 - A_00) A_0, so that its mass on all others is (1 - A_00)², and at A_00 = 1
    nothing of y passes. This is a factor of one output row: all rows are fused, and only the first one's map exists.

    A layer for the end of an encoder that is read out at its first token; of two halves, run it both ways (they share
    its weights). Supervise `map` with targets, and edit it afterwards: o_0 = m v W_O + b for a map m of any mass,
    where zeros say that nothing is there.

    Args:
        dim: D. hidden: of the MLP, default 4 D.

    Shapes: x `[B, T, D]`, y `[B, S, D]`, map `[B, S]`.

    Source: Rahmanzadehgervi et al. 2024 (TAB), arXiv 2412.18675.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        check_whole(dim=dim, hidden=hidden)
        self.dim = dim
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        for module in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor, map: Tensor | None = None) -> Seen:
        """z and the first token's map. map: what the first token is to look at instead, from 0 on, of any sum.

        Raises:
            ValueError: shapes that do not fit, a map that is negative.
        """
        if x.ndim != 3 or y.ndim != 3 or x.shape[::2] != y.shape[::2] or x.shape[-1] != self.dim:
            raise ValueError(f"x {[*x.shape]} and y {[*y.shape]}: [B, T, {self.dim}] and [B, S, {self.dim}]")
        if map is not None and (map.shape != y.shape[:2] or bool((map < 0).any())):
            raise ValueError(f"a map {[*map.shape]} of {[*y.shape[:2]]} keys; [B, S], from 0 on")
        x, y = self.norm(x), self.norm(y)
        q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)
        if map is None:
            seen = ((q[:, :1] @ k.mT) * self.dim**-0.5).softmax(-1)[:, 0]
            first = (seen * (1 - seen[:, :1])).to(v.dtype)
        else:
            seen, first = map, map.to(v.dtype)
        o = F.scaled_dot_product_attention(q[:, 1:], k, v)
        o = self.o_proj(torch.cat([first[:, None] @ v, o], 1))
        return Seen(o + self.mlp(self.mlp_norm(o)), seen)


def map_loss(seen: Tensor, target: Tensor) -> Tensor:
    """1 - cos of the first token's map and a target `[B, S]`, mean over the batch; pairs without change have one."""
    return (1 - F.cosine_similarity(seen, target.to(seen), dim=-1)).mean()


__all__ = ["Bottleneck", "Seen", "map_loss"]
