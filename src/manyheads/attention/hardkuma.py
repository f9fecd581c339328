"""HardKuma gates: stochastic gates in [0, 1] that are exactly 0 or 1 with positive probability, and differentiable.

Bastings et al. 2019, arXiv 1905.08160.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class HardKuma(nn.Module):
    """z = clip(p + (q - p) s, 0, 1), s = (1 - u^(1/β))^(1/α), u uniform; p < 0 < 1 < q. α = β = 1 at the start.

    Of each of `gates` gates: `shape` `[2, gates]` holds log α and log β.
    """

    def __init__(self, gates: int, low: float = -0.1, high: float = 1.1) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.shape = nn.Parameter(torch.zeros(2, gates))

    def forward(self) -> Tensor:
        """One draw of each gate."""
        alpha, beta = self.shape.exp()
        u = torch.rand_like(alpha).clamp(1e-6, 1 - 1e-6)
        s = (1 - u ** (1 / beta)) ** (1 / alpha)
        return (self.low + (self.high - self.low) * s).clamp(0, 1)

    def below(self, z: Tensor | float) -> Tensor:
        """P(unclipped gate <= z)."""
        alpha, beta = self.shape.exp()
        return 1 - (1 - ((z - self.low) / (self.high - self.low)) ** alpha) ** beta

    def zero(self) -> Tensor:
        return self.below(0.0)

    def one(self) -> Tensor:
        return 1 - self.below(1.0)

    def mean(self, points: int = 512) -> Tensor:
        """E z = ∫₀¹ P(z > t) dt, by midpoints."""
        t = (torch.arange(points, device=self.shape.device, dtype=self.shape.dtype) + 0.5) / points
        return (1 - self.below(t[:, None])).mean(0)


def ascend(multiplier: float, expected: float, target: float, rate: float) -> float:
    """A step up of the multiplier of `expected <= target`: it rises while the bound is broken and is never negative."""
    return max(0.0, multiplier + rate * (expected - target))
