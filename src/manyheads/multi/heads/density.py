"""A distribution of numbers: a mixture of Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.multi.head import register_head
from manyheads.multi.heads.numbers import RowHead
from manyheads.multi.heads.regression import SOFT


@register_head("density")
@dataclass(frozen=True)
class Density(RowHead):
    """p(y) = Σ_m π_m Π_d N(y_d; μ_md, σ_md²); outputs `[B, components, 1 + 2 size]`: a logit, means, log deviations.

    Loss: -log p(y). Labels `[B, size]`, or `[B]` where size is 1; a place is a row with any known number, and missing
    ones are integrated out, which a diagonal Gaussian does exactly. Means start spread out, so that components differ.
    shift, scale: as in `regression`. The prediction is the mixture's mean.

    Source: Bishop, Mixture Density Networks (1994).
    """

    better = "lower"
    temper = None

    components: int = 5
    size: int = 1
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.components > 0, f"components={self.components}; at least 1")
        self.ask_numbers()

    def build(self, width: int) -> nn.Module:
        net = self.layers(width, self.components * (1 + 2 * self.size))
        last = net[-1] if isinstance(net, nn.Sequential) else net
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias.zero_().view(self.components, -1)[:, 1 : 1 + self.size].normal_()
        return net

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        return net(features).unflatten(-1, (self.components, 1 + 2 * self.size))

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, means, spreads = output.split([1, self.size, self.size], -1)
        return logits.squeeze(-1).log_softmax(-1), means, SOFT * (spreads / SOFT).tanh()

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        weights, means, spreads = self._parts(output[known])
        true, missing = self.scaled(target, known)
        gap = (true - means) * (-spreads).exp()
        each = (-0.5 * gap**2 - spreads - 0.5 * math.log(2 * math.pi)).masked_fill(missing, 0)
        return -(weights + each.sum(-1)).logsumexp(-1)

    def predict(self, output: Tensor) -> Tensor:
        weights, means, _ = self._parts(output)
        return self.labels((weights.exp()[..., None] * means).sum(-2))

    def below(self, output: Tensor, target: Tensor) -> Tensor:
        weights, means, spreads = self._parts(output)
        true = ((target - self.shift) / self.scale).view(-1, 1, self.size)
        return (weights.exp()[..., None] * torch.special.ndtr((true - means) * (-spreads).exp())).sum(1).view_as(target)

    def sample(self, output: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One draw of each row, in the labels' unit."""
        weights, means, spreads = self._parts(output)
        pick = torch.multinomial(weights.exp(), 1, generator=generator)[..., None].expand(-1, 1, self.size)
        noise = torch.randn(means.shape[0], self.size, generator=generator, device=means.device, dtype=means.dtype)
        return self.labels(means.gather(1, pick).squeeze(1) + spreads.gather(1, pick).squeeze(1).exp() * noise)

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        cells = ~target.isnan()
        gap = (self.predict(output) - target)[cells].double()
        # The density of the label itself, not of the scaled one.
        scaled = cells.sum() * math.log(self.scale)
        loss = self.losses(output, target, known).double().sum() + scaled
        return torch.stack([loss, known.sum().double(), (gap**2).sum(), cells.sum().double()])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        loss, rows, square, cells = sums.tolist()
        if not rows:
            return dict.fromkeys(("nll", "rmse"), math.nan)
        return {"nll": loss / rows, "rmse": math.sqrt(square / cells)}
