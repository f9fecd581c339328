"""Mixture of attention heads: every head is an expert, and a router picks a few for each token."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.dispatch import Groups, group
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register
from manyheads.core.router import Router, Routing


@register
@dataclass(frozen=True)
class MoA(Part):
    """The layer's H heads are experts with W_Q^e `[D, d]` and W_O^e `[d, D]`; `top` of them serve a token.

    p = softmax(x W_g) `[B, T, H]`; I the `top` largest; w_e = p_e / Σ_I p, no gradient through the sum.
    q_j = x W_Q^e for e = I_j `[B, top, T, d]`; k = y W_K, v = y W_V `[B, 1, S, d]`, one for all experts;
    o_j = softmax(q_j kᵀ / √d) v; y = Σ_j w_j o_j W_O^(I_j). After dispatch it is multi-query attention with `top`
    heads. Caches 2 d numbers a token; neither scores nor projections cost more with more experts.

    In training `switch + z/10` goes to the auxiliary losses as `moa`, to be weighed by 0.01 as the authors do:
    switch = H Σ_e f_e P_e of loads and chances that each sum to one (1 when even), z = mean(logsumexp(x W_g)²).
    Their third loss, of the squared variation of gates, has weight 0 and is left out.

    Options: top (default all heads, each with its weight). head_dim d (default D/H; the authors' base has 2 D/H).
        renorm: `detach` as in the paper; `none`, w_e = p_e, as in the released code.
        noisy, sample: see `manyheads.core.router`; both act in training only.

    Choices: slot j is another head for every token, so nothing may treat heads differently behind it. The authors start
    W_g at zero, where ties send all tokens to the same experts; with top < H it starts from N(0, 0.01²) instead.

    Source: Zhang et al. 2022, arXiv 2210.05144.
    """

    name: ClassVar[str] = "moa"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2210.05144"
    slot: ClassVar[str | None] = "router"
    examples: ClassVar = ({"top": 2}, {"head_dim": 8}, {"top": 1, "renorm": "none"})

    top: int | None = None
    head_dim: int | None = None
    renorm: Literal["detach", "none"] = "detach"
    noisy: bool = False
    sample: int = 0

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"plain outputs"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"alike heads", "one map"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        top = heads.q if self.top is None else self.top
        if not 1 <= top <= heads.q:
            raise OptionError(f"moa: top={top} of {heads.q} heads; top may be 1 to {heads.q}")
        if not 0 <= self.sample <= top:
            raise OptionError(f"moa: sample={self.sample} of top={top} experts; sample may be 0 to {top}")
        width = heads.head_width(self.name, self.head_dim)
        return Heads(heads.dim, top, 1, width, width, top, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> MoAProject:
        return MoAProject(self, before.q, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        experts, top, dim, width = before.q, after.q, after.dim, after.qk_width
        kv = (width + after.v_width) * (site.kv_source is None)
        router = dim * experts * (1 + self.noisy)
        one = dim * (width + after.out_width)  # W_Q and W_O of an expert
        keys = (site.context_dim or dim) * kv
        pair = 2 * top * (width + after.v_width)
        cached = Fraction(kv)
        work = 2 * (router + top * one + keys)
        return Cost(router + experts * one + keys, cached, 0, work, pair, windows(after.keep, cached))


class MoAProject(Project):
    def __init__(self, options: MoA, experts: int, heads: Heads, site: Site) -> None:
        super().__init__()
        self.top, self.turns = heads.q, heads.rotary
        self.renorm: Literal["detach", "none"] = options.renorm
        self.router = Router(heads.dim, experts, self.top, noisy=options.noisy, sample=options.sample)
        self.q_experts = _experts(experts, heads.dim, heads.qk_width)
        self.o_experts = _experts(experts, heads.out_width, heads.dim)
        if site.kv_source is None:
            source = site.context_dim or heads.dim
            self.k_proj = nn.Linear(source, heads.qk_width, bias=False)
            self.v_proj = nn.Linear(source, heads.v_width, bias=False)
            for proj in (self.k_proj, self.v_proj):
                nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)
            self.entries = {"k": Entry(1, heads.qk_width, "k"), "v": Entry(1, heads.v_width, "v")}

    def queries(self, flow: Flow) -> Tensor:
        routing = flow.memo["routing"] = self.router(flow.x)
        if flow.training:
            valid = flow.q.validity
            flow.add_loss("moa", routing.balance(valid) / self.top + 0.1 * routing.size(valid))
        experts = self.q_experts
        groups = flow.memo["groups"] = group(routing.chosen.flatten(0, 1), len(experts), size=experts[0].numel())
        q = groups.each(flow.x.flatten(0, 1)[:, None], torch.matmul, experts)
        return q.unflatten(0, flow.x.shape[:2]).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {"k": self.k_proj(flow.source)[:, None], "v": self.v_proj(flow.source)[:, None]}

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        routing: Routing = flow.memo["routing"]
        groups: Groups = flow.memo["groups"]
        gates = routing.gates(self.renorm).flatten(0, 1)
        y = groups.sum(o.transpose(1, 2).flatten(0, 1), gates, torch.matmul, self.o_experts)
        return y.unflatten(0, flow.x.shape[:2])


def _experts(count: int, inputs: int, outputs: int) -> nn.Parameter:
    """`[count, inputs, outputs]`, each uniform after Xavier."""
    bound = (6 / (inputs + outputs)) ** 0.5
    return nn.Parameter(torch.empty(count, inputs, outputs).uniform_(-bound, bound))
