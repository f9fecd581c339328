"""Cog attention: weights that keep the sign of their score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.core.flow import Flow
from manyheads.core.kernel import Term
from manyheads.core.kernels.common import masked_softmax
from manyheads.core.part import Heads, Part, Piece, Program, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class CogAttention(Part):
    """w_ij = sign(s_ij) exp|s_ij| / Σ_l exp|s_il| over the visible keys l: a query can subtract what it attends to.

    s `[B, H, T, S]` are the scaled scores, a bias included; Σ_j |w_ij| = 1, while Σ_j w_ij is anywhere in [-1, 1]. The
    mask comes after the absolute value. It is the difference of two softmaxes, over the keys with positive and with
    negative scores, merged by their log-sum-exp: FlexAttention runs it fused (exact but for a score of exactly zero,
    whose weight is zero and which here counts in the denominator); elsewhere the signs are only known from the scores.

    Options: soft_ends: the first and the last layer keep plain softmax, for stability, as the authors' code has it;
    then a lone layer is a softmax layer too.

    w jumps where a score crosses zero; its gradient does not see the jump. A trained softmax model changes with it,
    since its negative scores were small weights.

    Source: More Expressive Attention with Negative Weights 2024, arXiv 2411.07176.
    """

    name: ClassVar[str] = "cog-attention"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2411.07176"
    slot: ClassVar[str | None] = "normalise"
    examples: ClassVar = ({"soft_ends": False}, {})

    soft_ends: bool = True

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"softmax"})

    def build(self, before: Heads, after: Heads, site: Site) -> Piece:
        return Piece() if self.soft_ends and site.layer in (0, site.layers - 1) else CogProgram()


class CogProgram(Program):
    terms = (
        Term(1, lambda score: torch.where(score > 0, score, -torch.inf)),
        Term(-1, lambda score: torch.where(score < 0, -score, -torch.inf)),
    )

    def normalise(self, scores: Tensor, visible: Tensor, flow: Flow) -> Tensor:
        return scores.sign() * masked_softmax(scores.abs(), visible)
