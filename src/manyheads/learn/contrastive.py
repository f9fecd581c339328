"""Adaptive multi-head contrast: several projection heads, and a temperature that each pair has of its own.

Heads c = 1..C map the encoder's features to z_c; all similarities are cosines; n* is the negative most like the anchor.

    τ = low + (high - low) σ(φ_c(z_a, z_b)),   φ_c an MLP 2d -> hidden -> 1,   Ω(τ) = (d/2) log τ + 1/τ
    L = Σ_c mean_i [ -s⁺/τ⁺ + β Ω(τ⁺) + s⁻_n*/τ⁻_n* - β Ω(τ⁻_n*) ]

With β = 1 the first half is -log N(z⁺ | z, τ I) of unit vectors but for a constant. Heads and φ are thrown away once
the encoder has learned. Tensors have the heads first, z `[C, B, d]`.

Choices: φ reads the two vectors side by side (ASSUMED), one φ a head or one `shared`. The published bounds and weight
are low = 1e-5, β = 0.1. As -β Ω(τ⁻) rewards extreme temperatures with nothing but the bounds against it, the defaults
here are low = 0.05 and a τ⁻ that is no target of the gradient (`learn_negative`). The losses are those of the published
table; the released training script has another, of two terms.

Source: Wang et al. 2023, arXiv 2310.05615.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import OptionError, check_whole

Temperatures = Callable[[Tensor, Tensor], Tensor] | float
"""Of pairs of vectors `[C, …, d]`, or the same one for all."""


class Projections(nn.Module):
    """`[B, dim]` to `[C, B, width]`: C networks dim -> hidden -> width with a ReLU between, none sharing weights."""

    def __init__(self, dim: int, heads: int = 3, *, hidden: int = 512, width: int = 128) -> None:
        check_whole(dim=dim, heads=heads, hidden=hidden, width=width)
        super().__init__()
        self.dim = dim
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(heads)
        )

    def forward(self, features: Tensor) -> Tensor:
        if features.shape[-1:] != (self.dim,):
            raise ValueError(f"features are [B, {self.dim}], not {list(features.shape)}")
        return torch.stack([head(features) for head in self.heads])


class Temperature(nn.Module):
    """τ `[C, …]` of pairs of vectors `[C, …, width]`, whose other axes may broadcast; between `low` and `high`.

    initial: where τ starts, for all pairs. shared: one network for all heads.
    """

    def __init__(
        self, width: int, heads: int = 3, *, hidden: int = 128, low: float = 0.05, high: float = 2.0,
        initial: float = 0.1, shared: bool = False,
    ) -> None:  # fmt: skip
        check_whole(width=width, heads=heads, hidden=hidden)
        if not 0 < low < initial < high < math.inf:
            raise OptionError(
                f"temperatures: low={low}, initial={initial}, high={high} are not 0 < low < initial < high"
            )
        super().__init__()
        self.low, self.high, own = low, high, 1 if shared else heads
        reach = (2 * width) ** -0.5
        self.one, self.other = (nn.Parameter(torch.empty(own, hidden, width).uniform_(-reach, reach)) for _ in "ab")
        self.bias = nn.Parameter(torch.empty(own, hidden).uniform_(-reach, reach))
        self.out = nn.Parameter(torch.zeros(own, hidden))
        share = (initial - low) / (high - low)
        self.level = nn.Parameter(torch.full((own,), math.log(share / (1 - share))))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        own, _, width = self.one.shape
        shapes = a.shape, b.shape
        heads = own if own > 1 else len(a) if a.dim() else 1
        if (
            a.dim() < 2 or a.dim() != b.dim() or any(shape[0] != heads or shape[-1] != width for shape in shapes)
            or any(m != n and 1 not in (m, n) for m, n in zip(*shapes, strict=True))
        ):  # fmt: skip
            raise ValueError(f"pairs are [{heads}, …, {width}] each, not {list(a.shape)} and {list(b.shape)}")

        def per_head(x: Tensor, weight: Tensor) -> Tensor:
            return torch.einsum("c...d,chd->c...h", x, weight.expand(len(x), -1, -1))

        # φ of the two side by side is a sum of two products, so pairs of all rows need no copies of the rows.
        hidden = per_head(a, self.one) + per_head(b, self.other)
        lead = (-1, *[1] * (hidden.dim() - 2))
        hidden = (hidden + self.bias.view(*lead, self.bias.shape[-1])).relu()
        score = (hidden * self.out.view(*lead, self.out.shape[-1])).sum(-1) + self.level.view(lead)
        return self.low + (self.high - self.low) * score.sigmoid()


def omega(tau: Tensor, width: int) -> Tensor:
    """(d/2) log τ + 1/τ; least at τ = 2/d."""
    return width / 2 * tau.log() + 1 / tau


def adaptive_contrast(
    z: Tensor, positive: Tensor, negatives: Tensor, temperature: Temperatures, *, beta: float = 1.0,
    barred: Tensor | None = None, soft: bool = False, with_positive: bool = False, learn_negative: bool = False,
) -> Tensor:  # fmt: skip
    """Σ over heads of the mean over anchors, a number. Anchors and positives `[C, B, d]`, negatives `[C, N, d]`.

    Args:
        barred: bool `[B, N]`, True where a negative is none of this anchor. beta: weight of Ω.
        soft: log Σ_n exp(s_n/τ_n - β Ω(τ_n)) in place of its greatest term: with one temperature for all pairs and
            beta=0 the ordinary loss, at the price of a temperature of every pair.
        with_positive: the positive is among the candidates of the greatest (or of the sum), as in InfoNCE.
        learn_negative: gradients reach the temperature through negatives too.
    """
    if (
        z.shape != positive.shape or z.dim() != 3 or negatives.dim() != 3 or negatives.shape[::2] != z.shape[::2]
        or 0 in (*z.shape, *negatives.shape)
    ):  # fmt: skip
        raise ValueError(
            f"anchors {list(z.shape)}, positives {list(positive.shape)} and negatives {list(negatives.shape)} are not "
            "[heads, B, width], the same, and [heads, N, width], none of them 0"
        )
    if barred is not None and barred.shape != (z.shape[1], negatives.shape[1]):
        raise ValueError(f"barred is {list(barred.shape)}, not {[z.shape[1], negatives.shape[1]]}")
    if barred is not None and bool(barred.all(-1).any()) and not with_positive:
        raise ValueError("an anchor has no negative; a batch of at least two rows has")
    z, positive, negatives = (F.normalize(x, dim=-1) for x in (z, positive, negatives))
    tau, near = _temperature(temperature, z, positive), (z * positive).sum(-1)
    pull = -near / tau + beta * omega(tau, z.shape[-1])
    far = z @ negatives.mT
    far = far if barred is None else far.masked_fill(barred, -math.inf)
    if soft:
        rest = _temperature(temperature, z[:, :, None], negatives[:, None])
    else:
        hardest = far.detach().argmax(-1, keepdim=True)
        far = far.gather(-1, hardest)
        chosen = negatives.gather(1, hardest.expand(-1, -1, z.shape[-1]))
        rest = _temperature(temperature, z, chosen)[..., None]
    if with_positive:
        far, rest = torch.cat([near[..., None], far], -1), torch.cat([tau[..., None], rest], -1)
    rest = rest if learn_negative else rest.detach()
    push = far / rest - beta * omega(rest, z.shape[-1])
    if soft:
        push = push.logsumexp(-1)
    else:
        push = push.gather(-1, far.detach().argmax(-1, keepdim=True)).squeeze(-1)
    return (pull + push).mean(1).sum()


def adaptive_simclr(z: Tensor, other: Tensor, temperature: Temperatures, **options: bool | float) -> Tensor:
    """`adaptive_contrast` of two views `[C, B, d]` each: every row is an anchor, its view the positive, and the
    negatives are both views of all other rows. (For MoCo hand a queue to `adaptive_contrast`.)"""
    if z.shape != other.shape or z.dim() != 3:
        raise ValueError(f"views {list(z.shape)} and {list(other.shape)} are not twice the same [heads, B, width]")
    both, row = torch.cat([z, other], 1), torch.arange(z.shape[1], device=z.device).repeat(2)
    barred = row[:, None] == row
    return adaptive_contrast(both, torch.cat([other, z], 1), both, temperature, barred=barred, **options)  # type: ignore[arg-type]


def adaptive_simsiam(
    z: Tensor, other: Tensor, h: Tensor, other_h: Tensor, temperature: Temperatures, *, beta: float = 1.0
) -> Tensor:
    """Σ_c mean_i of -s(z, h⁺)/(2τ₁) - s(z⁺, h)/(2τ₂) + β Ω(τ₁) + β Ω(τ₂) of `[C, B, d]`; h, h⁺ get no gradient."""
    if not z.shape == other.shape == h.shape == other_h.shape or z.dim() != 3 or 0 in z.shape:
        shapes = [list(x.shape) for x in (z, other, h, other_h)]
        raise ValueError(f"two views and their targets have one shape, [heads, B, width] without a 0, not {shapes}")
    total = z.new_zeros(())
    for said, wanted in ((z, other_h), (other, h)):
        said, wanted = F.normalize(said, dim=-1), F.normalize(wanted.detach(), dim=-1)
        tau = _temperature(temperature, said, wanted)
        total = total + (-(said * wanted).sum(-1) / (2 * tau) + beta * omega(tau, z.shape[-1])).mean(1).sum()
    return total


def adaptive_barlow(
    z: Tensor, other: Tensor, temperature: Temperatures, *, beta: float = 1.0, redundancy: float = 5e-3,
    learn_negative: bool = False,
) -> Tensor:  # fmt: skip
    """Σ_c [ Σ_l (1 - R_ll/τ_l)² + β Ω(τ_l) + Σ_{l≠m} redundancy R_lm²/τ_lm - β Ω(τ_lm) ], R `[C, d, d]` the correlation
    of features over the batch of two views `[C, B, d]`. A pair is two features, so a `Temperature` here is B wide."""
    if z.shape != other.shape or z.dim() != 3 or z.shape[1] < 2 or 0 in z.shape:
        raise ValueError(f"views {list(z.shape)} and {list(other.shape)} are not twice the same [heads, B > 1, width]")
    one, two = (
        (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True).clamp_min(1e-8) for x in (z, other)
    )
    together = one.mT @ two / z.shape[1]
    tau = _temperature(temperature, one.mT[:, :, None], two.mT[:, None])
    own = torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
    rest = tau if learn_negative else tau.detach()
    same = (1 - together / tau).square() + beta * omega(tau, z.shape[-1])
    apart = redundancy * together.square() / rest - beta * omega(rest, z.shape[-1])
    return torch.where(own, same, apart).sum()


def _temperature(temperature: Temperatures, a: Tensor, b: Tensor) -> Tensor:
    if isinstance(temperature, float | int):
        return a.new_full(torch.broadcast_shapes(a.shape, b.shape)[:-1], temperature)
    return temperature(a, b)
