"""The feed-forward of the first transformers, with gelu."""

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
class GELUFeed(Feed):
    """y = W_down gelu(W_up x + b) + b', 4 D wide by default.

    Source: Hendrycks & Gimpel 2016, arXiv 1606.08415.
    """

    name: ClassVar[str] = "gelu"
    paper: ClassVar[str] = "arXiv 1606.08415"

    def width(self, dim: int, hidden: int | None = None) -> int:
        return hidden or default_hidden(dim, "gelu")

    def build(self, dim: int, hidden: int | None, site: Site) -> MLP:
        return MLP(dim, self.width(dim, hidden))

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        hidden = self.width(dim, hidden)
        return Cost(2 * dim * hidden + hidden + dim, token_flops=4 * dim * hidden)


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = default_hidden(dim, "gelu") if hidden is None else hidden
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))
