"""Feed-forwards of a block, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.part import OptionError


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ∘ W_up x); Shazeer 2020, arXiv 2002.05202. Three maps, so 8/3 D wide by default."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = -(-8 * dim // 24) * 8 if hidden is None else hidden
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    """W_down gelu(W_up x + b) + b, 4 D wide by default."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


Make = Callable[[int, "int | None"], "nn.Module | None"]

FFNS: dict[str, Make] = {"swiglu": SwiGLU, "gelu": MLP, "none": lambda dim, hidden: None}


def find_ffn(name: str) -> Make:
    """The feed-forward of that name; an unknown one raises with the names there are."""
    if name not in FFNS:
        raise OptionError(f"no feed-forward {name!r}; there are {', '.join(FFNS)}")
    return FFNS[name]


def make_ffn(name: str, dim: int, hidden: int | None = None) -> nn.Module | None:
    """A feed-forward, `[…, dim]` to `[…, dim]`, hidden wide inside; "none" is None."""
    if hidden is not None and hidden < 1:
        raise OptionError(f"a feed-forward of width hidden={hidden} has no channels")
    return find_ffn(name)(dim, hidden)
