"""Retention: a sum of values that fades at a rate of its own for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.core import fla
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream, decayed_sum


@register
@dataclass(frozen=True)
class Retention(Recurrence):
    """S_t = γ_g S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √d: no softmax; γ_g = 1 - 2^(-first - g) is fixed, g = 0 … G - 1.

    S `[B, G, K, V]` for each key head, read by its H/G query heads. Equal to o_t = Σ_{s≤t} γ^(t-s) (q_t·k_s) v_s / √d.

    The preset `retnet` adds what the paper's layer has around it: rotation, the norm of each head, the swish gate.

    Options: first: 5 as in the paper (γ_0 = 31/32).

    Source: Sun et al. 2023, arXiv 2307.08621.
    """

    name: ClassVar[str] = "retention"
    paper: ClassVar[str] = "arXiv 2307.08621"
    examples: ClassVar = ({}, {"first": 1})

    first: int = 5

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.first < 1:
            raise OptionError(f"retention: first={self.first} leaves a head nothing of what it saw; at least 1")
        return super().layout(heads, site)

    def build(self, before: Heads, after: Heads, site: Site) -> RetentionScan:
        return RetentionScan(before, self.first)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return self.state_cost(before)


class RetentionScan(Scan):
    fused = fla.SINGLE

    def __init__(self, heads: Heads, first: int) -> None:
        super().__init__()
        self.first = first
        self.states = {"scan": State((heads.kv, heads.qk_width, heads.v_width))}

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        head = torch.arange(self.first, self.first + k.shape[1], device=v.device, dtype=wide)
        decay = torch.log1p(-torch.exp2(-head))[None, :, None]
        o, flow.new_state["scan"] = decayed_sum(q, k, v, decay.expand(1, -1, k.shape[2]), Stream.of(flow))
        return o
