"""Gated linear attention: a state whose channels fade at rates that each token chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core import fla
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream, decayed_sum


@register
@dataclass(frozen=True)
class GatedLinear(Recurrence):
    """S_t = diag(α_t) S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √d, α_t = σ(x_t W_1 W_2 + b)^(1/τ) for each key channel.

    S `[B, G, K, V]` for each key head, read by its H/G query heads; W_1 `[D, rank]`, W_2 `[rank, G·K]`. Equal to
    o_t = Σ_{s≤t} Σ_c q_tc k_sc (Π_{s<r≤t} α_rc) v_s / √d.

    The preset `gated-linear-attention` adds what the paper's layer has around it: the norm of each head and the swish
    gate. (The paper's GLA; the part `gla` is grouped latent attention.)

    Options: rank. tau: the larger, the longer a state lasts at the start.

    Source: Yang et al. 2023, arXiv 2312.06635.
    """

    name: ClassVar[str] = "gated_linear"
    paper: ClassVar[str] = "arXiv 2312.06635"
    examples: ClassVar = ({}, {"rank": 2, "tau": 0.1})

    rank: int = 16
    tau: float = 16.0

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.rank < 1:
            raise OptionError(f"gated_linear: rank={self.rank} of the decays; at least 1")
        if not 0 < self.tau < float("inf"):
            raise OptionError(f"gated_linear: tau={self.tau} divides log decays; a positive number")
        return super().layout(heads, site)

    def build(self, before: Heads, after: Heads, site: Site) -> GatedLinearScan:
        return GatedLinearScan(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        channels = before.kv * before.qk_width
        weights = self.rank * (before.dim + channels)
        return self.state_cost(before) + Cost(weights + channels, token_flops=2 * weights)


class GatedLinearScan(Scan):
    fused = fla.SINGLE

    def __init__(self, options: GatedLinear, heads: Heads) -> None:
        super().__init__()
        self.tau = options.tau
        self.states = {"scan": State((heads.kv, heads.qk_width, heads.v_width))}
        self.decay = nn.Sequential(
            nn.Linear(heads.dim, options.rank, bias=False), nn.Linear(options.rank, heads.kv * heads.qk_width)
        )

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        logs = F.logsigmoid(self.decay(flow.source).to(wide)) / self.tau
        logs = logs.unflatten(-1, (k.shape[1], -1)).transpose(1, 2)
        o, flow.new_state["scan"] = decayed_sum(q, k, v, logs, Stream.of(flow))
        return o
