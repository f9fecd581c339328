"""Linear attention: a sum of values by the product of query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.core import fla
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import NONE, Heads, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream, averaged, counted, decayed_sum


@register
@dataclass(frozen=True)
class Linear(Recurrence):
    """S_t = S_{t-1} + k_t v_tᵀ, z_t = z_{t-1} + k_t, o_t = S_tᵀ q_t / (z_t·q_t): weights (q_t·k_s) / Σ_s (q_t·k_s).

    S `[B, G, K, V]` for each key head, read by its H/G query heads; z is one more column of it. The feature map that
    makes weights positive is `features`, a part of its own; a query all of whose weights are zero reads zero.

    Options: normaliser: without it o_t = S_tᵀ q_t / √d, for any queries and keys, rotated ones too.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236.
    """

    name: ClassVar[str] = "linear"
    paper: ClassVar[str] = "arXiv 2006.16236"
    examples: ClassVar = ({}, {"normaliser": False})

    normaliser: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | (frozenset({"positive"}) if self.normaliser else NONE)

    @property
    def breaks(self) -> frozenset[str]:
        return super().breaks | (frozenset({"query lengths"}) if self.normaliser else NONE)

    @property
    def hint(self) -> dict[str, str]:
        return {
            **super().hint,
            "positive": "features as the last transform and no rotation, or linear(normaliser=false)",
        }

    def build(self, before: Heads, after: Heads, site: Site) -> LinearScan:
        return LinearScan(self.rows(before), self.normaliser)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return self.state_cost(self.rows(before))

    def rows(self, heads: Heads) -> Heads:
        """The layout with what is summed: values, and a one for z."""
        return heads._replace(v_width=heads.v_width + self.normaliser)


class LinearScan(Scan):
    fused = fla.SINGLE

    def __init__(self, heads: Heads, normaliser: bool) -> None:
        super().__init__()
        self.normaliser = normaliser
        self.states = {"scan": State((heads.kv, heads.qk_width, heads.v_width))}

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        if not self.normaliser:
            o, flow.new_state["scan"] = decayed_sum(q, k, v, None, Stream.of(flow))
            return o
        rows = counted(v.to(torch.promote_types(v.dtype, torch.float32)))
        o, flow.new_state["scan"] = decayed_sum(q, k, rows, None, Stream.of(flow))
        return averaged(o).to(v.dtype)
