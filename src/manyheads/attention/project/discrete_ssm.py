"""Recurrent heads alone: a discrete Mamba-2 in place of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from manyheads.attention.discrete import DiscreteHeads, check_discrete, discrete_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import IN_ORDER, SCORELESS, Heads, Part, Project, Scan, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DiscreteSSM(Part):
    """S_t = α_t S_{t-1} + B_t v_tᵀ `[N, d]`, o_t = (S_tᵀ C_t + δ v_t) ∘ silu(z_t + b_z), y = o W_O, for H heads.

    α_t = sigmoid(-a_t) = e^{-softplus(a_t)}, one number a head and token; what enters is not multiplied by a step. C, B
    `[B, H, T, N]`, v, z `[B, H, T, d]` and a are linear in x; C, B and v pass a causal convolution of each channel with
    a bias and without an activation. No positions, no norm inside. With α = 1, no convolution and no gate it is causal
    linear attention; with α = 0, (C_t·B_t + δ) v_t.

    Options: state N (default d). head_dim d (default D/H). taps of the convolution. bias: of the projection from x;
    out_bias: of W_O.

    Source: Bick et al. 2024, arXiv 2408.10189 (MOHAWK); heads of a hybrid: arXiv 2602.11374.
    """

    name: ClassVar[str] = "discrete_ssm"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2408.10189"
    examples: ClassVar = ({}, {"state": 4, "head_dim": 5, "bias": True, "out_bias": True}, {"taps": 1})

    state: int | None = None
    head_dim: int | None = None
    taps: int = 4
    bias: bool = False
    out_bias: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "own rows", "own tokens"})

    @property
    def breaks(self) -> frozenset[str]:
        return SCORELESS

    @property
    def hint(self) -> Mapping[str, str]:
        return IN_ORDER

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        check_discrete(self.name, state=self._state(width), taps=self.taps)
        return Heads(heads.dim, heads.q, heads.q, width, width, heads.q, width, 1.0, keep=0)

    def _state(self, width: int) -> int:
        return width if self.state is None else self.state

    def build(self, before: Heads, after: Heads, site: Site) -> DiscreteSSMProject:
        return DiscreteSSMProject(self, after, self._state(after.qk_width))

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        width, out = after.qk_width, after.dim * after.out * after.out_width
        own = discrete_cost(after.dim, after.q, self._state(width), width, self.taps, self.bias)
        return own + Cost(out + after.dim * self.out_bias, token_flops=2 * out)


class DiscreteSSMProject(Project, Scan):
    def __init__(self, options: DiscreteSSM, heads: Heads, state: int) -> None:
        super().__init__()
        self.heads = DiscreteHeads("scan", heads.dim, heads.q, state, heads.qk_width, options.taps, options.bias)
        self.states = self.heads.states
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=options.out_bias)

    def queries(self, flow: Flow) -> Tensor:
        """All rows of the heads, which are all that there is."""
        return self.heads.rows(flow.x)

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        return q, q, q, flow.q

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        return self.heads(q, flow).to(q.dtype)
