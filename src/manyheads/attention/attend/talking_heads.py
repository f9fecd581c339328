"""Talking heads: learned mixing across heads on both sides of the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.mixing import mixed
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Part, Program, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class TalkingHeads(Part):
    """Scores and weights mixed over the heads: L[g] = Σ_i P_l[i, g] J[i], W = softmax(L), U[v] = Σ_g P_w[g, v] W[g].

    J = q kᵀ · scale `[B, H, T, S]`; the mask comes after the first mix, so hidden scores never leak through it, and
    hidden weights stay zero through the second. P_l and P_w `[H, H]` start as identities, where the layer is plain
    attention. Grouped key heads are repeated over their query heads first.

    Choices the paper leaves open: a score bias is added after the first mix; as many softmax and value heads as query
    heads.

    Source: Shazeer et al. 2020, arXiv 2003.02436.
    """

    name: ClassVar[str] = "talking_heads"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2003.02436"
    slot: ClassVar[str | None] = "head mix"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"one map"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"softmax", "one map"})

    def build(self, before: Heads, after: Heads, site: Site) -> TalkingHeadsProgram:
        return TalkingHeadsProgram(before.q)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(2 * before.q**2, pair_flops=4 * before.q**2)


class TalkingHeadsProgram(Program):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.eye(heads))
        self.weights = nn.Parameter(torch.eye(heads))

    def before(self, scores: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        return mixed(scores, self.logits)

    def after(self, weights: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        return mixed(weights, self.weights)
