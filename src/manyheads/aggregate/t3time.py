"""T3Time: several heads mixed by weights that depend on what they say, and a gate that knows a condition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Aggregator, Options, Pooled, register_aggregator
from manyheads.core.check import check_share, check_whole, is_number


@register_aggregator("t3time")
@dataclass(frozen=True)
class T3Time(Options):
    """O = Σ_h w_h O_h, w = softmax_h(W_2 drop(relu(LN(W_1 [O_1; …; O_H])))): a mixture of H heads at each place.

    Tokens are the heads, `[B, H, D]`, out `[B, 1, D]`, weights `[B, 1, 1, H]`; `mix` takes a list of tensors. A head
    that is masked enters as zeros and has no weight.

    Args:
        count: H. hidden: rows of W_1. dropout: ASSUMED.

    Source: T3Time (adaptive multi-head alignment). W_2 = 0 is the mean of heads.
    """

    ordered = True
    repeats = False
    count: int = 4
    hidden: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_whole(count=self.count, hidden=self.hidden)
        check_share(dropout=self.dropout)

    def tokens(self) -> int:
        return self.count

    def build(self, width: int) -> HeadMix:
        return HeadMix(self, width)

    @classmethod
    def examples(cls) -> tuple[T3Time, ...]:
        return (cls(2, hidden=4),)


class HeadMix(Aggregator):
    options: T3Time

    def __init__(self, options: T3Time, width: int) -> None:
        super().__init__(options, width)
        self.scores = nn.Sequential(
            nn.Linear(options.count * width, options.hidden), nn.LayerNorm(options.hidden), nn.ReLU(),
            nn.Dropout(options.dropout), nn.Linear(options.hidden, options.count),
        )  # fmt: skip

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        weights = self.scores(x.flatten(1)).masked_fill(~mask, -torch.inf).softmax(-1)[:, None]
        return Pooled(weights @ x, weights[:, None])


class ConditionGate(nn.Module):
    """g ∘ b + (1 - g) ∘ a, g = σ(W_2 relu(W_1 [mean_n a; c/scale])): two views of a set, and a number that decides.

    a and b `[B, N, D]`, c a number for all rows or `[B]` (a forecast's horizon), g `[B, 1, D]`. With one c in all of
    training its input is a bias.

    Source: T3Time (horizon-aware gating), hidden 64, scale 1000.
    """

    def __init__(self, width: int, hidden: int = 64, scale: float = 1000.0) -> None:
        super().__init__()
        check_whole(width=width, hidden=hidden)
        if not is_number(scale) or scale == 0:
            raise ValueError(f"scale={scale} divides the condition; a finite number other than 0")
        self.scale = scale
        self.net = nn.Sequential(nn.Linear(width + 1, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Sigmoid())

    def gate(self, a: Tensor, condition: Tensor | float, mask: Tensor | None = None) -> Tensor:
        """g. mask: bool `[B, N]`, of which tokens the mean is."""
        seen = torch.ones_like(a[..., 0], dtype=torch.bool) if mask is None else mask
        mean = torch.where(seen[..., None], a, 0.0).sum(1) / seen.sum(1, keepdim=True).clamp(min=1)
        c = torch.as_tensor(condition, dtype=a.dtype, device=a.device).expand(len(a))[:, None] / self.scale
        return self.net(torch.cat([mean, c], -1))[:, None]

    def forward(self, a: Tensor, b: Tensor, condition: Tensor | float, mask: Tensor | None = None) -> Tensor:
        if a.shape != b.shape:
            raise ValueError(f"a gate takes two tensors alike, not {list(a.shape)} and {list(b.shape)}")
        gate = self.gate(a, condition, mask)
        return gate * b + (1 - gate) * a


class ScaledResidual(nn.Module):
    """α ∘ o + (1 - α) ∘ z, α `[D]` learned, 0.5 at first. α = 1: no residual; α = 0: o is not used.

    Source: T3Time, whose program leaves α out of training on a GPU; here it is a parameter.
    """

    def __init__(self, width: int, start: float = 0.5) -> None:
        super().__init__()
        check_whole(width=width)
        self.alpha = nn.Parameter(torch.full((width,), start))

    def forward(self, o: Tensor, z: Tensor) -> Tensor:
        return self.alpha * o + (1 - self.alpha) * z
