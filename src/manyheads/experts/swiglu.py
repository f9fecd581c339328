"""The gated feed-forward of today's language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.experts import default_hidden
from manyheads.core.feed import Feed
from manyheads.core.part import Site
from manyheads.core.registry import register_feed


@register_feed
@dataclass(frozen=True)
class SwiGLUFeed(Feed):
    """y = W_down (silu(W_gate x) ∘ W_up x), without biases. Three maps, so 8/3 D wide by default.

    Source: Shazeer 2020, arXiv 2002.05202.
    """

    name: ClassVar[str] = "swiglu"
    paper: ClassVar[str] = "arXiv 2002.05202"

    def width(self, dim: int, hidden: int | None = None) -> int:
        return hidden or default_hidden(dim, "swiglu")

    def build(self, dim: int, hidden: int | None, site: Site) -> SwiGLU:
        return SwiGLU(dim, self.width(dim, hidden))

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        weights = 3 * dim * self.width(dim, hidden)
        return Cost(weights, token_flops=2 * weights)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = default_hidden(dim, "swiglu") if hidden is None else hidden
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
