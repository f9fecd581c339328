"""State-space heads beside attention heads, under one output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.ssm import SelectiveSSM, check_ssm, ssm_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import IN_ORDER, Gate, Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class SSMHeads(Part):
    """o ← ½ (g_1 ∘ rms(o) + g_2 ∘ rms(s)): s from a selective state space that reads x beside the heads.

    u = silu(conv(x W_u)) `[B, T, I]`, I all heads' outputs side by side; [d; B; C] = u W, each normed;
    Δ = softplus(d W_Δ + b); S_t = e^{Δ_t ∘ A} ∘ S_{t-1} + B_t (Δ_t ∘ u_t)ᵀ `[N, I]`;
    s_t = (S_tᵀ C_t + δ ∘ u_t) ∘ silu(x W_z). rms over all I channels, gains g `[I]`. It has weights and a state of its
    own in layers that read the rows of others, too.

    Options: state N, taps of the convolution, dt_rank (default D/16), eps of the norms.

    Source: Dong et al. 2024, arXiv 2411.13676.
    """

    name: ClassVar[str] = "ssm_heads"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2411.13676"
    slot: ClassVar[str | None] = "ssm_heads"
    examples: ClassVar = ({"state": 5}, {"state": 2, "taps": 1, "dt_rank": 3})

    state: int = 16
    taps: int = 4
    dt_rank: int | None = None
    eps: float = 1e-6

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "own tokens", "token queries"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"token keys"})

    @property
    def hint(self) -> Mapping[str, str]:
        return IN_ORDER

    def rank(self, dim: int) -> int:
        return -(-dim // 16) if self.dt_rank is None else self.dt_rank

    def layout(self, heads: Heads, site: Site) -> Heads:
        check_ssm(self.name, self.state, self.taps, self.rank(heads.dim))
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> SSMHeadsGate:
        return SSMHeadsGate(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        inner, maps = before.out * before.out_width, 2 * before.dim * before.out * before.out_width
        ssm = ssm_cost(before.dim, inner, self.state, self.taps, self.rank(before.dim), normed=True)
        return ssm + Cost(maps + 2 * inner, token_flops=2 * maps)


class SSMHeadsGate(Gate):
    in_order = True

    def __init__(self, options: SSMHeads, heads: Heads) -> None:
        super().__init__()
        inner, self.heads = heads.out * heads.out_width, heads.out
        self.u_proj = nn.Linear(heads.dim, inner, bias=False)
        self.z_proj = nn.Linear(heads.dim, inner, bias=False)
        self.ssm = SelectiveSSM(
            "ssm", heads.dim, inner, state=options.state, taps=options.taps, rank=options.rank(heads.dim), normed=True
        )
        self.states = self.ssm.states
        self.eps, self.gains = options.eps, nn.Parameter(torch.ones(2, inner))

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        s = self.ssm(self.u_proj(flow.x), flow) * F.silu(self.z_proj(flow.x))
        both = torch.stack([o.transpose(1, 2).flatten(2), s], -2)
        both = both.to(torch.promote_types(o.dtype, torch.float32))
        mean = (F.rms_norm(both, both.shape[-1:], eps=self.eps) * self.gains).mean(-2)
        return mean.to(o.dtype).unflatten(-1, (self.heads, -1)).transpose(1, 2)
