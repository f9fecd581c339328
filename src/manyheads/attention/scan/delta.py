"""The delta rule: a state in which a key's new value replaces its old one, as much of it as the token says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core import fla
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream, delta_sum


@register
@dataclass(frozen=True)
class Delta(Recurrence):
    """S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t / √d, q_t and k_t of length one.

    S `[B, G, K, V]` for each key head, read by its H/G query heads. β_t = σ(x_t w_β), a number for each key head:
    with β = 1 what the state held for k_t gives way to v_t. α_t = 1, or where gated
    α_t = exp(-exp(A) softplus(x_t w_α + b)), which makes room in the state as a whole. Lengths are taken here, behind
    feature maps and rotation, so what scales keys does not reach the state.

    The presets `delta_net` and `gated_delta_net` add what the papers' layers have around it: convolutions with SiLU,
    the norm of each head, and the gated one's output gate.

    Options: gated. negative: β in (0, 2), so that a key may turn its old value round (eigenvalues of a transition are
    then in (-1, 1); Grazzi et al. 2024, arXiv 2411.12537).

    Source: Yang et al. 2024, arXiv 2406.06484; gated: Yang et al. 2024, arXiv 2412.06464. exp(A) starts uniform in
    (0, 16), softplus(b) log-uniform in (0.001, 0.1).
    """

    name: ClassVar[str] = "delta"
    paper: ClassVar[str] = "arXiv 2406.06484"
    examples: ClassVar = ({}, {"gated": True}, {"negative": True})

    gated: bool = False
    negative: bool = False

    @property
    def breaks(self) -> frozenset[str]:
        return super().breaks | {"query lengths", "key lengths"}

    def build(self, before: Heads, after: Heads, site: Site) -> DeltaScan:
        return DeltaScan(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        weights = before.dim * before.kv * (1 + self.gated)
        state = self.state_cost(before)
        parameters = weights + 2 * before.kv * self.gated
        return state + Cost(parameters, token_flops=2 * weights + 2 * before.kv * before.qk_width * before.v_width)


class DeltaScan(Scan):
    fused = fla.HALF

    def __init__(self, options: Delta, heads: Heads) -> None:
        super().__init__()
        self.scale, self.top = heads.scale, 2.0 if options.negative else 1.0
        self.states = {"scan": State((heads.kv, heads.qk_width, heads.v_width))}
        self.beta = nn.Linear(heads.dim, heads.kv, bias=False)
        self.decay = None
        if options.gated:
            self.decay = nn.Linear(heads.dim, heads.kv)
            step = torch.exp(torch.rand(heads.kv) * math.log(100) + math.log(0.001))
            self.decay.bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(bias) = step
            self.rate = nn.Parameter(torch.log(16 * (1 - torch.rand(heads.kv))))

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        q, k = (F.normalize(each.to(wide), dim=-1, eps=1e-6) for each in (q, k))
        beta, logs = self.top * self.beta(flow.source).to(wide).sigmoid().transpose(1, 2), None
        if self.decay is not None:
            logs = -self.rate.to(wide).exp()[:, None] * F.softplus(self.decay(flow.source).to(wide)).transpose(1, 2)
        o, flow.new_state["scan"] = delta_sum(q * self.scale, k, v, beta, logs, Stream.of(flow))
        return o
