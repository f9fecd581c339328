"""Adaptive head budgets: each sequence chooses how many heads speak, and which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.pool import pooled_width, whole_mean
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class BudgetFormer(Part):
    """y = Σ_h m_h o_h W_O^h; a budget s in (0, 1) and a distribution p over heads come from the sequence's mean x̄.

    s = σ(W₂ GELU(W₁ x̄ + b₁) + b₂), W₁ `[D, D/4]`; p = softmax((x̄ W_d + noise) / τ), W_d `[D, H]`.
    In training all heads speak: m_h = s H p_h. In evaluation the k = ⌈s H⌉ likeliest do, set K:
    m_h = s H p_h / Σ_K p on K and zero elsewhere, so Σ_h m_h = s H in both. x̄ is the context's in cross-attention.

    Progress u of training (`on_step`) takes the noise from N(0, noise²) to none and τ from `hot` to `cold`, both in a
    line; a layer that nobody schedules, and every evaluation, is at the end. The auxiliary loss `budgetformer` is
    relu(low - s) + relu(s - high) + entropy · (2u - 1) · (entropy of p): first for a choice of many, then of few.

    Options: low, high: the budgets that cost nothing. noise, hot, cold, entropy: as above. train: `soft` as above, or
    `straight`: the hard gates, with the soft ones' gradient.

    Choices: no equation of the source is public. From descriptions of it: two controllers on a mean, their depth,
    ⌈s H⌉ (the reported budgets would leave no head with ⌊s H⌋), noise, annealing, and the range 0.1 to 0.9. Ours: the
    gates' mass, widths, activation, and every other constant. Dropped heads are computed and weighed by zero here.
    A mean over the sequence knows the future, so causal attention is refused.

    Source: Adaptive Head Budgeting 2026, arXiv 2604.22583.
    """

    name: ClassVar[str] = "budgetformer"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2604.22583"
    slot: ClassVar[str | None] = "router"
    examples: ClassVar = ({}, {"train": "straight"})

    low: float = 0.1
    high: float = 0.9
    noise: float = 1.0
    hot: float = 2.0
    cold: float = 0.5
    entropy: float = 0.01
    train: Literal["soft", "straight"] = "soft"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise OptionError(f"budgetformer: budgets from low={self.low} to high={self.high}; 0 ≤ low ≤ high ≤ 1")
        if min(self.hot, self.cold) <= 0 or self.noise < 0:
            raise OptionError(
                f"budgetformer: hot={self.hot} and cold={self.cold} must be positive, noise={self.noise} not negative"
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"bidirectional"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"steady"})

    @property
    def hint(self) -> dict[str, str]:
        return {"bidirectional": "moh, which chooses for each token"}

    def build(self, before: Heads, after: Heads, site: Site) -> BudgetFormerGate:
        return BudgetFormerGate(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        dim = pooled_width(before, site)
        return Cost(_inner(dim) * (dim + 2) + 1 + dim * before.out, token_flops=dim)


def _inner(dim: int) -> int:
    return max(dim // 4, 1)


class BudgetFormerGate(Gate):
    def __init__(self, options: BudgetFormer, heads: Heads, site: Site) -> None:
        super().__init__()
        self.options, self.heads, self.cross = options, heads.out, site.cross
        dim = pooled_width(heads, site)
        self.budget = nn.Sequential(nn.Linear(dim, _inner(dim)), nn.GELU(), nn.Linear(_inner(dim), 1))
        self.relevance = nn.Linear(dim, heads.out, bias=False)
        self.progress = 1.0

    def on_step(self, progress: float) -> None:
        self.progress = progress

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        mass, chance = self.controls(flow)
        soft = mass * chance
        if not flow.training:
            gates = self.chosen(mass, chance)
        elif self.options.train == "soft":
            gates = soft
        else:
            gates = self.chosen(mass, chance).detach() + (soft - soft.detach())
        return o * gates.to(o.dtype).transpose(1, 2)[..., None]

    def controls(self, flow: Flow) -> tuple[Tensor, Tensor]:
        """s H `[B, 1 or T, 1]` and p `[B, 1 or T, H]`, in float32 or wider; notes the loss in training."""
        mean, options = whole_mean(flow, self.cross), self.options
        wide = torch.promote_types(mean.dtype, torch.float32)
        s, z = self.budget(mean).to(wide).sigmoid(), self.relevance(mean).to(wide)
        if not flow.training:
            return s * self.heads, (z / options.cold).softmax(-1)
        heat = options.hot + (options.cold - options.hot) * self.progress
        noise = options.noise * (1 - self.progress) * torch.randn_like(z)
        log_p = ((z + noise) / heat).log_softmax(-1)
        outside = (options.low - s).relu() + (s - options.high).relu()
        spread = -(log_p.exp() * log_p).sum(-1)
        flow.add_loss(options.name, outside.mean() + options.entropy * (2 * self.progress - 1) * spread.mean())
        return s * self.heads, log_p.exp()

    def chosen(self, mass: Tensor, chance: Tensor) -> Tensor:
        """The gates of the likeliest ⌈mass⌉ heads, `[B, 1 or T, H]`."""
        rank = chance.argsort(-1, descending=True).argsort(-1)
        kept = chance * (rank < mass.ceil().clamp_min(1))
        return mass * kept / kept.sum(-1, keepdim=True)
