"""A selective state space (Mamba), or a mixture of several, in place of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from manyheads.attention.ssm import SelectiveSSM, check_ssm, ssm_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import IN_ORDER, SCORELESS, Heads, OptionError, Part, Project, Scan, Site
from manyheads.core.registry import register
from manyheads.core.selective import CHUNK


@register
@dataclass(frozen=True)
class SelectiveSSMPart(Part):
    """S_t = e^{Δ_t ∘ A} ∘ S_{t-1} + B_t (Δ_t ∘ u_t)ᵀ `[N, I]`, o_t = S_tᵀ C_t + δ ∘ u_t, y = o W_O.

    u = silu(conv(x W_u)) `[B, T, I]`, I = expand·D; [d; B; C] = u W, Δ = softplus(d W_Δ + b), d of `dt_rank` numbers.
    Every channel has a step and N rates of its own, and there are no queries and keys that other parts could meet.
    Gates take o in H heads of I/H channels: with `output_gate(activation=silu)` it is a Mamba block (preset `mamba`).

    A mixture of E experts (preset `mossnet`): gates g are the softmax of x W_r over the `top` likeliest experts. mixed:
    W is Σ_e g_e W^e for each token, one state. apart: an expert has its own W, b, A, δ and state; a token changes the
    states of its experts alone, and o is Σ_e g_e o^e: E heads that are read and written sparsely. In training E Σ_e
    mean(π_e) (share of choices of e) goes to the auxiliary losses (1 when all is even).

    Options: state N. expand. taps of the convolution. dt_rank: default D/16. experts E, top, kind.

    Choices: where MossNet's experts act is not public in detail; these are its two readings, with one router, on x, for
    B, C and Δ. Apart, the states of all experts are stepped, those not chosen by Δ = 0.

    Source: Gu and Dao 2023, arXiv 2312.00752; the mixture: arXiv 2510.26182.
    """

    name: ClassVar[str] = "selective_ssm"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2312.00752"
    examples: ClassVar = (
        {"state": 5}, {"state": 3, "expand": 1, "experts": 3, "top": 2},
        {"state": 3, "expand": 1, "experts": 3, "top": 2, "kind": "apart"},
    )  # fmt: skip

    state: int = 16
    expand: int = 2
    taps: int = 4
    dt_rank: int | None = None
    experts: int = 1
    top: int = 1
    kind: Literal["mixed", "apart"] = "mixed"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "own rows", "own tokens"})

    @property
    def breaks(self) -> frozenset[str]:
        return SCORELESS | {"plain outputs"}

    @property
    def hint(self) -> Mapping[str, str]:
        return IN_ORDER

    def rank(self, dim: int) -> int:
        return -(-dim // 16) if self.dt_rank is None else self.dt_rank

    def layout(self, heads: Heads, site: Site) -> Heads:
        check_ssm(self.name, self.state, self.taps, self.rank(heads.dim), self.experts, self.top)
        inner = self.expand * heads.dim
        if self.expand < 1 or inner % heads.q:
            raise OptionError(
                f"selective_ssm: {inner} channels (expand={self.expand} times dim={heads.dim}) are no multiple of "
                f"{heads.q} heads"
            )
        width = inner // heads.q
        return Heads(heads.dim, heads.q, heads.q, width, width, heads.q, width, 1.0, keep=0)

    def build(self, before: Heads, after: Heads, site: Site) -> SelectiveSSMProject:
        return SelectiveSSMProject(self, after)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        dim, inner, apart = after.dim, self.expand * after.dim, self.kind == "apart" and self.experts > 1
        maps = 2 * dim * inner
        ssm = ssm_cost(dim, inner, self.state, self.taps, self.rank(dim), self.experts, self.top, apart=apart)
        return Cost(maps, token_flops=2 * maps) + ssm


class SelectiveSSMProject(Project, Scan):
    work, chunk = "steps", CHUNK

    def __init__(self, options: SelectiveSSMPart, heads: Heads) -> None:
        super().__init__()
        inner = heads.out * heads.out_width
        self.heads = heads.out
        self.u_proj = nn.Linear(heads.dim, inner, bias=False)
        self.ssm = SelectiveSSM(
            "scan", heads.dim, inner, state=options.state, taps=options.taps, rank=options.rank(heads.dim),
            experts=options.experts, top=options.top, apart=options.kind == "apart",
        )  # fmt: skip
        self.states = self.ssm.states
        self.o_proj = nn.Linear(inner, heads.dim, bias=False)

    def queries(self, flow: Flow) -> Tensor:
        """The inner channels, which are all that there is."""
        return self.u_proj(flow.x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        return q, q, q, flow.q

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        y = self.ssm(q.transpose(1, 2).flatten(2), flow)
        return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
