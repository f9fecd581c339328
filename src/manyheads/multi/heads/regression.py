"""Numbers, if wanted with how sure the head is of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn, special, stack

from manyheads.multi.head import register_head
from manyheads.multi.heads.numbers import NumberHead

LOSSES = ("squared", "absolute", "huber")
SOFT = 10.0
"""Log variances are kept in (-SOFT, SOFT) by a tanh, which a clamp would do without a gradient."""


@register_head("regression")
@dataclass(frozen=True)
class Regression(NumberHead):
    """Means `[B, size]`; labels `[B, size]`, or `[B]` where size is 1; a place is a cell.

    uncertainty: outputs `[B, size, 2]`, the mean m and the log variance s; loss ½ (exp(-s)(y - m)² + s).
    shift, scale: of the labels; the module learns (y - shift) / scale, losses are of that, predictions and metrics are
    in the labels' unit.
    """

    better = "lower"
    temper = 0.5

    size: int = 1
    loss: str = "squared"
    uncertainty: bool = False
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask_numbers()
        self.ask(self.loss in LOSSES, f"loss={self.loss!r} is none of {', '.join(LOSSES)}")
        self.ask(not self.uncertainty or self.loss == "squared", "uncertainty goes with loss=squared")
        if self.uncertainty or self.loss != "squared":  # a likelihood of its own, or no Gaussian one
            object.__setattr__(self, "temper", None if self.uncertainty else 1.0)

    def build(self, width: int) -> nn.Module:
        return self.layers(width, self.size * (2 if self.uncertainty else 1))

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        out = net(features)
        if not self.uncertainty:
            return out
        mean, log_variance = out.unflatten(-1, (self.size, 2)).unbind(-1)
        return stack([mean, SOFT * (log_variance / SOFT).tanh()], -1)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.finite(target, known)

    def _split(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, spread = output.unbind(-1) if self.uncertainty else (output, None)
        if self.size == 1:
            mean, spread = mean.squeeze(-1), None if spread is None else spread.squeeze(-1)
        return mean, spread

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        mean, spread = self._split(output)
        mean, true = mean[known], (target[known] - self.shift) / self.scale
        if spread is not None:
            spread = spread[known]
            return 0.5 * ((-spread).exp() * (true - mean) ** 2 + spread)
        if self.loss == "squared":
            return (true - mean) ** 2
        return (true - mean).abs() if self.loss == "absolute" else F.huber_loss(mean, true, reduction="none")

    def predict(self, output: Tensor) -> Tensor:
        return self._split(output)[0] * self.scale + self.shift

    def deviation(self, output: Tensor) -> Tensor:
        """The standard deviation that the head says, in the labels' unit."""
        _, spread = self._split(output)
        if spread is None:
            raise ValueError("regression without uncertainty=true says no deviation")
        return (0.5 * spread).exp() * self.scale

    def below(self, output: Tensor, target: Tensor) -> Tensor | None:
        if not self.uncertainty:
            return None
        return special.ndtr((target - self.predict(output)) / self.deviation(output))

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        true = (target[known].double() - self.shift) / self.scale
        gap = (self.predict(output)[known].double() - self.shift) / self.scale - true
        return stack([(gap**2).sum(), gap.abs().sum(), true.sum(), (true**2).sum(), known.sum().double()])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        square, absolute, first, second, count = sums.tolist()
        if not count:
            return dict.fromkeys(("rmse", "mae", "r2"), math.nan)
        spread = second - first**2 / count
        return {
            "rmse": math.sqrt(square / count) * self.scale,
            "mae": absolute / count * self.scale,
            "r2": 1 - square / spread if spread > 0 else math.nan,
        }
