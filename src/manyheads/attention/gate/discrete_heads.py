"""Recurrent heads beside attention heads, each with its own slice of one output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.attention.discrete import DiscreteHeads, check_discrete, discrete_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import IN_ORDER, Gate, Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DiscreteHeadsPart(Part):
    """y = Σ_h o_h W_O^h + Σ_r s_r W_O^r: `heads` recurrent heads s behind the layer's attention heads o.

    S_t = sigmoid(-a_t) S_{t-1} + B_t v_tᵀ `[N, d]`, s_t = (S_tᵀ C_t + δ v_t) ∘ silu(z_t + b_z), where C, B, v, z and a
    are linear in x and C, B and v pass a convolution over tokens (see `discrete_ssm`, a layer of such heads alone).
    They are as wide as the attention heads' outputs, know no positions, and keep a state in place of keys: the cache
    holds rows of the layer's own heads only.

    Options: heads, how many. state N: default d. taps of the convolution. bias: of the projection from x.

    Source: the layout of heads arXiv 2602.11374; the recurrence arXiv 2408.10189 (discrete Mamba-2).
    """

    name: ClassVar[str] = "discrete_heads"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2602.11374"
    slot: ClassVar[str | None] = "discrete_heads"
    examples: ClassVar = ({}, {"heads": 3, "state": 4, "bias": True}, {"heads": 2, "taps": 1})

    heads: int = 1
    state: int | None = None
    taps: int = 4
    bias: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "own tokens", "token queries", "plain outputs"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"token keys"})

    @property
    def hint(self) -> Mapping[str, str]:
        return IN_ORDER

    def layout(self, heads: Heads, site: Site) -> Heads:
        check_discrete(self.name, heads=self.heads, state=self._state(heads), taps=self.taps)
        return heads._replace(out=heads.out + self.heads)

    def _state(self, heads: Heads) -> int:
        return heads.out_width if self.state is None else self.state

    def build(self, before: Heads, after: Heads, site: Site) -> DiscreteHeadsGate:
        made = DiscreteHeads(
            "discrete", before.dim, self.heads, self._state(before), before.out_width, self.taps, self.bias
        )
        return DiscreteHeadsGate(made)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return discrete_cost(before.dim, self.heads, self._state(before), before.out_width, self.taps, self.bias)


class DiscreteHeadsGate(Gate):
    in_order = True

    def __init__(self, heads: DiscreteHeads) -> None:
        super().__init__()
        self.heads, self.states = heads, heads.states

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        return torch.cat([o, self.heads(self.heads.rows(flow.x), flow).to(o.dtype)], 1)
