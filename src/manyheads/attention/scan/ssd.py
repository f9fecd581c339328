"""State-space duality (Mamba-2): a sum of values that fades as far as each token says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.steps import first_steps, step_range
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream, decayed_sum


@register
@dataclass(frozen=True)
class SSD(Recurrence):
    """S_t = e^{Δ_t A} S_{t-1} + Δ_t k_t v_tᵀ, o_t = S_tᵀ q_t + δ v_t: each token has a step Δ for each value head.

    Δ_t = softplus(x_t W_Δ + b) `[B, T, n]`, A = -exp(A_log) and δ numbers of a value head, n value heads (G of them, or
    as many as `multi_value` makes of each key head); S `[N, P]` each. Equal to o_t = Σ_{s≤t} e^{A(Δ_{s+1} + … + Δ_t)}
    (q_t·k_s) Δ_s v_s + δ v_t. The preset `mamba2` is the paper's layer.

    Options: dt_min, dt_max: Δ for x = 0 is drawn between them, evenly in its logarithm. At the start A is from
    [-16, -1] and δ = 1.

    Source: Dao and Gu 2024, arXiv 2405.21060.
    """

    name: ClassVar[str] = "ssd"
    paper: ClassVar[str] = "arXiv 2405.21060"

    dt_min: float = 0.001
    dt_max: float = 0.1

    def layout(self, heads: Heads, site: Site) -> Heads:
        step_range(self.name, self.dt_min, self.dt_max)
        return super().layout(heads, site)

    def build(self, before: Heads, after: Heads, site: Site) -> SSDScan:
        return SSDScan(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        heads = before.kv * before.values
        return self.state_cost(before) + Cost(heads * (before.dim + 3), token_flops=2 * heads * before.dim)


class SSDScan(Scan):
    def __init__(self, options: SSD, heads: Heads) -> None:
        super().__init__()
        n = heads.kv * heads.values
        self.values = heads.values
        self.dt_proj = nn.Linear(heads.dim, n, bias=False)
        self.dt_bias = nn.Parameter(first_steps(n, options.dt_min, options.dt_max))
        self.A_log = nn.Parameter(torch.empty(n).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(n))
        self.states = {"scan": State((heads.kv, heads.qk_width, heads.v_width))}

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        step = F.softplus(self.dt_proj(flow.source).to(wide) + self.dt_bias).transpose(1, 2)  # [B, n, T]
        v, dtype = v.to(wide), v.dtype
        decay = step * -self.A_log.to(wide).exp()[:, None]
        o, flow.new_state["scan"] = decayed_sum(q, k, v * self._columns(step, v), decay, Stream.of(flow))
        skipped = v * self._columns(self.skip.to(wide)[None, :, None], v)
        return (o + skipped.repeat_interleave(q.shape[1] // k.shape[1], 1)).to(dtype)

    def _columns(self, x: Tensor, v: Tensor) -> Tensor:
        """Numbers of value heads `[B, n, T]` for each column of v, `[B, G, T, V]`."""
        x = x.unflatten(1, (-1, self.values)).movedim(2, -1)
        return x.repeat_interleave(v.shape[-1] // self.values, -1)
