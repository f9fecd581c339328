"""What relational heads read: symbols (what a token stands for) and relations (how two tokens compare)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis, cols_of, rows_of
from manyheads.core.part import Program

ACTS = {"relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "identity": lambda x: x}


class SymbolicAttention(nn.Module):
    """s_j = softmax(q_j T_hᵀ / √(D/H)) S_h for each of H symbol heads, side by side `[B, S, D]`; q = x W + b.

    T and S `[count, D]` are learned, from N(0, 1). A token looks at symbols alone, never at other tokens.
    """

    def __init__(self, source: int, dim: int, count: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(source, dim)
        self.templates = nn.Parameter(torch.randn(count, dim))
        self.symbols = nn.Parameter(torch.randn(count, dim))

    def forward(self, x: Tensor, axis: Axis) -> Tensor:
        q, templates, symbols = (
            rows.unflatten(-1, (self.heads, -1)).transpose(1, 2).expand(len(x), -1, -1, -1)
            for rows in (self.query(x), self.templates[None], self.symbols[None])
        )
        return F.scaled_dot_product_attention(q, templates, symbols).transpose(1, 2).flatten(2)


class PositionSymbols(nn.Module):
    """s_j is the row of j's position in a learned table `[count, D]`, from N(0, 1); positions must be below count."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(count, dim))

    def forward(self, x: Tensor, axis: Axis) -> Tensor:
        return F.embedding(axis.position, self.table).expand(len(x), -1, -1)


class Relations(Program):
    """Σ_j α_ij act(r_ij), on the explicit path; the call's values are the relation keys. `[B, heads, t, relations]`."""

    def __init__(self, act: str, relations: int) -> None:
        super().__init__()
        self.act, self.relations = ACTS[act], relations

    def read(self, weights: Tensor, call: Call, rows: slice, flow: Flow) -> Tensor:
        q = flow.memo["relation queries"][:, :, rows]
        k = call.v[:, 0].unflatten(-1, (self.relations, -1)).transpose(1, 2)
        related = self.act(q @ k.transpose(-1, -2))
        return torch.einsum("bhts,brts->bhtr", weights, related)


class RelativeSymbols(Program):
    """Σ_j α_ij s_(j-i) W_s, s a learned table `[2·count + 1, D]` of distances, which end at ±count."""

    def __init__(self, dim: int, count: int, heads: int, width: int) -> None:
        super().__init__()
        self.count, self.heads = count, heads
        self.table = nn.Parameter(nn.init.xavier_uniform_(torch.empty(2 * count + 1, dim)))
        self.symbol_proj = nn.Linear(dim, heads * width, bias=False)

    def read(self, weights: Tensor, call: Call, rows: slice, flow: Flow) -> Tensor:
        distance = cols_of(call.mask.k.position) - rows_of(call.mask.q.position[:, rows])
        bins = (distance.clamp(-self.count, self.count) + self.count).expand_as(weights)
        mass = weights.new_zeros(*weights.shape[:3], len(self.table)).scatter_add(-1, bins, weights)
        symbols = self.symbol_proj(self.table).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        return mass @ symbols.repeat_interleave(weights.shape[1] // self.heads, 0)
