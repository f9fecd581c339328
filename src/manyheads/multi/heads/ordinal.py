"""One of several levels that have an order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.multi.head import Head, register_head


class _Levels(nn.Module):
    """One score, and thresholds that keep their order: the first, and gaps that are positive."""

    def __init__(self, score: nn.Module, levels: int) -> None:
        super().__init__()
        self.score = score
        even = torch.linspace(-1, 1, levels - 1) if levels > 2 else torch.zeros(1)
        self.first = nn.Parameter(even[:1].clone())
        self.gaps = nn.Parameter((even[1:] - even[:-1]).expm1().log()) if levels > 2 else None

    def forward(self, features: Tensor) -> Tensor:
        steps = self.first if self.gaps is None else torch.cat([self.first, F.softplus(self.gaps) + 1e-4])
        return self.score(features) - steps.cumsum(0)


@register_head("ordinal")
@dataclass(frozen=True)
class Ordinal(Head):
    """Logits of P(y > k) = σ(f - θ_k), θ increasing, `[B, levels - 1]`; labels `[B]`, 0 to levels - 1.

    Loss: -log P(y) of the proportional-odds model, with P(y = k) = σ(a) - σ(b) = σ(a) σ(-b) (1 - exp(b - a)), so that
    no difference of near numbers is taken. The prediction is the median level.

    Source: McCullagh, Regression Models for Ordinal Data (1980).
    """

    levels: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.levels > 1, f"levels={self.levels}; at least 2")

    def build(self, width: int) -> nn.Module:
        return _Levels(self.layers(width, 1), self.levels)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.within(target, known, self.levels)

    def log_probabilities(self, output: Tensor) -> Tensor:
        """log P(y = k), `[B, levels]`."""
        above = F.logsigmoid(output)  # log σ(a): y is above the threshold before
        below = F.logsigmoid(-output)
        between = (-(output[..., :-1] - output[..., 1:])).expm1().neg().log()
        middle = above[..., :-1] + below[..., 1:] + between
        return torch.cat([below[..., :1], middle, above[..., -1:]], -1)

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        return F.nll_loss(self.log_probabilities(output[known]), target[known], reduction="none")

    def predict(self, output: Tensor) -> Tensor:
        return (output > 0).sum(-1)

    def likely(self, output: Tensor) -> Tensor:
        return self.log_probabilities(output).exp().gather(-1, self.predict(output)[..., None]).squeeze(-1)

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        off = (self.predict(output) - target)[known].abs()
        return torch.stack([(off == 0).sum(), off.sum(), known.sum()]).double()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        same, off, count = sums.tolist()
        return {name: value / count if count else math.nan for name, value in (("accuracy", same), ("mae", off))}
