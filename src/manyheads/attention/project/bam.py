"""Mixture of whole attention modules, weighed softly: N grown models in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.grouped import GQAProject, grouped_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class BAM(Part):
    """y = Σ_j g_j MHA_j(x) over all N experts, g = softmax(x W_r) `[B, T, N]`; an expert has the layer's H heads.

    q^j = x W_Q^j `[B, H, T, d]`; o^j = softmax(q^j kᵀ / √d) v; MHA_j(x) = concat_h(o^j_h) W_O^j. kv=expert: k = x W_K^j
    and v = x W_V^j, G heads an expert: N whole attention modules, and N 2 G d numbers cached a token. kv=shared: one
    W_K, W_V for all experts, 2 G d numbers. Computed as one attention of N H heads, whose outputs are weighed before
    one W_O. `manyheads.convert.upcycle` makes such a model of N dense ones, with `moe(top=1)` as its feed-forward.

    Options: experts N. kv: as above. kv_heads G, head_dim d, bias: as in `gqa`, without one of W_O.

    Choices: no loss acts on g, as in the paper. An expert is a module of its own, so what makes one map of several
    heads is refused.

    Source: Zhang et al. 2024, arXiv 2408.08274.
    """

    name: ClassVar[str] = "bam"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2408.08274"
    examples: ClassVar = (
        {"experts": 2},
        {"experts": 3, "kv": "shared", "kv_heads": 2},
        {"experts": 2, "kv_heads": 2, "head_dim": 8, "bias": "qkv"},
    )

    experts: int = 4
    kv: Literal["expert", "shared"] = "expert"
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Literal["none", "qkv"] = "none"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"plain outputs"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"one map"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        kv = heads.q if self.kv_heads is None else self.kv_heads
        if self.experts < 1:
            raise OptionError(f"bam: experts={self.experts}; at least 1")
        if kv < 1 or heads.q % kv:
            fits = [each for each in range(1, heads.q + 1) if heads.q % each == 0]
            raise OptionError(f"bam: {heads.q} heads of an expert cannot share kv_heads={kv}; kv_heads may be {fits}")
        width, all_heads = heads.head_width(self.name, self.head_dim), self.experts * heads.q
        kv *= self.experts if self.kv == "expert" else 1
        return Heads(heads.dim, all_heads, kv, width, width, all_heads, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> BAMProject:
        return BAMProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        router = after.dim * self.experts
        return grouped_cost(after, site, self.bias) + Cost(router, token_flops=2 * router)


class BAMProject(GQAProject):
    """Rows of q_proj (k_proj, v_proj) and columns of o_proj are those of expert 1, then 2, …"""

    def __init__(self, options: BAM, heads: Heads, site: Site) -> None:
        super().__init__(heads, site, options.bias)
        self.experts, self.shared = options.experts, options.kv == "shared"
        self.router = nn.Linear(heads.dim, options.experts, bias=False)

    def queries(self, flow: Flow) -> Tensor:
        q = super().queries(flow)
        if not self.shared:
            return q
        # a key head's queries lie side by side, from every expert
        return q.unflatten(1, (self.experts, self.kv_heads, -1)).transpose(1, 2).flatten(1, 3)

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        if self.shared:
            o = o.unflatten(1, (self.kv_heads, self.experts, -1)).transpose(1, 2).flatten(1, 3)
        gates = self.gates(flow.x).to(o.dtype)
        weighed = o.transpose(1, 2).unflatten(2, (self.experts, -1)) * gates[..., None, None]
        return self.o_proj(weighed.flatten(2))

    def gates(self, x: Tensor) -> Tensor:
        """How much each expert says, `[B, T, N]`, in float32 or better."""
        logits = self.router(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
