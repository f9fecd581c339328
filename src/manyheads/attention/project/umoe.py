"""Attention whose experts are those of the feed-forward: mix tokens first, then send each mixture through an expert."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.check import check_top, check_whole
from manyheads.core.cost import Cost, windows
from manyheads.core.dispatch import group
from manyheads.core.entries import Entry
from manyheads.core.experts import Act, Experts, borrow_experts, experts_cost, shared_cost, through
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register
from manyheads.core.router import Choice, Chooser


@register
@dataclass(frozen=True)
class UMoE(Part):
    """y_t = E_0(c_t0) + Σ_(i in I) p_i E_i(c_ti), with mixtures c_ti = Σ_s a_ti,s x_s of what the layer reads.

    p = softmax(x W_r) over N experts E_i(u) = W_down^i act(W_up^i u), D -> m -> D; I the `top` largest, p_i as they
    are. q_i = x W_Q + (x A_i) B_i `[B, top, T, dk]`, q_0 = x W_Q0; one key a token, κ = x W_K `[B, 1, S, dk]`;
    a_i = softmax(q_i κᵀ / √dk). A head of multi-head attention, (a x) W_V W_O, is such an expert without act. In a
    stack the feed-forward `umoe` of the same layer has the same E_i; with another one, attention alone has experts.
    Caches κ (rotated) and x, dk + D numbers a token.

    In training the balance loss N Σ_i f_i P_i, within each sequence, goes to the auxiliary losses as `umoe`; the
    authors weigh it by 0.001.

    Options: experts N, top (0: E_0 alone). hidden m, qk_dim dk (default D/4 each). q_rank: of A_i B_i. fixed: how many
        experts serve every token, each with queries of its own. shared_fixed: these too are the feed-forward's. act:
        see `moe`. maps=one: one map for all, q = x W_Q. (The layer's number of heads plays no part.)

    Choices: all channels of q and κ rotate, as in the authors' code; their configs speak of 128 that do not.

    Source: Yang et al. 2025, arXiv 2505.07260.
    """

    name: ClassVar[str] = "umoe"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2505.07260"
    slot: ClassVar[str | None] = "router"
    examples: ClassVar = (
        {"experts": 5, "top": 2, "hidden": 7, "qk_dim": 8, "q_rank": 3},
        {"experts": 4, "top": 1, "hidden": 5, "fixed": 0, "act": "swiglu", "q_rank": 2},
        {"experts": 4, "top": 2, "fixed": 2, "maps": "one"},
    )

    experts: int = 128
    top: int = 3
    hidden: int | None = None
    qk_dim: int | None = None
    q_rank: int = 16
    fixed: int = 1
    shared_fixed: bool = False
    act: Act = "silu"
    maps: Literal["expert", "one"] = "expert"

    def __post_init__(self) -> None:
        check_whole(0, fixed=self.fixed)
        check_top(self.top, self.experts, least=0 if self.fixed else 1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"self"})

    @property
    def hint(self) -> dict[str, str]:
        return {"self": "moa, whose experts read a context of any width"}

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"plain outputs"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"alike heads", "one map"})

    def width(self, dim: int) -> int:
        return dim // 4 if self.hidden is None else self.hidden

    def layout(self, heads: Heads, site: Site) -> Heads:
        dim, maps = heads.dim, self.top + self.fixed if self.maps == "expert" else 1
        width = dim // 4 if self.qk_dim is None else self.qk_dim
        if min(width, self.width(dim), self.q_rank) < 1:
            raise OptionError(
                f"umoe: qk_dim={width}, hidden={self.width(dim)} and q_rank={self.q_rank} must be positive"
            )
        return Heads(dim, maps, 1, width, dim, maps, dim, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> UMoEProject:
        return UMoEProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        dim, dk, own = after.dim, after.qk_width, site.kv_source is None
        each, routed = self.maps == "expert", self.top > 0
        maps = dim * dk * ((routed or not each) + self.fixed * each + own)
        router, one = dim * self.experts * routed, self.q_rank * (dim + dk) * (each and routed)
        parameters = maps + router + self.experts * one
        idle = (self.experts - self.top) * one
        cached, pair = Fraction((dk + dim) * own), 2 * after.q * (dk + dim)
        work = 2 * (maps + router + self.top * one)
        cost = Cost(parameters, cached, 0, work, pair, windows(after.keep, cached), idle=idle)
        fixed = experts_cost(self.fixed, self.fixed, dim, self.width(dim), self.act)
        cost = cost + (shared_cost(f"umoe-fixed-{site.layer}", fixed) if self.shared_fixed else fixed)
        if not routed:
            return cost
        experts = experts_cost(self.experts, self.top, dim, self.width(dim), self.act)
        return cost + shared_cost(f"umoe-{site.layer}", experts)


class UMoEProject(Project):
    experts: Experts
    fixed: Experts

    def __init__(self, options: UMoE, heads: Heads, site: Site) -> None:
        super().__init__()
        dim, dk = heads.dim, heads.qk_width
        self.dk, self.each, self.count, self.always = dk, options.maps == "expert", options.experts, options.fixed
        self.turns, routed = heads.rotary, options.top > 0
        shape: tuple[int, int, Act] = (dim, options.width(dim), options.act)
        self.router = Chooser(dim, options.experts, options.top, per_sequence=True) if routed else None
        if routed:
            borrow_experts(self, "experts", site, f"umoe-{site.layer}", options.experts, *shape)
        if self.always and options.shared_fixed:
            borrow_experts(self, "fixed", site, f"umoe-fixed-{site.layer}", self.always, *shape)
        elif self.always:
            self.fixed = Experts(self.always, *shape)
        self.q_proj = nn.Linear(dim, dk, bias=False) if routed or not self.each else None
        self.fixed_q_proj = nn.Linear(dim, self.always * dk, bias=False) if self.always and self.each else None
        self.q_down = self.q_up = None
        if routed and self.each:
            self.q_down = nn.Parameter(0.02 * torch.randn(options.experts, options.q_rank, dim))
            self.q_up = nn.Parameter(0.02 * torch.randn(options.experts, dk, options.q_rank))
        if site.kv_source is None:
            self.k_proj = nn.Linear(dim, dk, bias=False)
            self.entries = {"k": Entry(1, dk, "k"), "v": Entry(1, dim, "v")}

    def queries(self, flow: Flow) -> Tensor:
        x, queries = flow.x, []
        if self.fixed_q_proj is not None:
            queries.append(self.fixed_q_proj(x).unflatten(-1, (-1, self.dk)))
        if self.router is not None:
            flow.memo["choice"] = self.router.choose(x, flow.q.valid, flow, "umoe")
        if self.q_proj is not None:
            shared = self.q_proj(x)[:, :, None]
            queries.append(shared if self.q_down is None else shared + self._own(x, flow.memo["choice"]))
        return torch.cat(queries, 2).transpose(1, 2)

    def _own(self, x: Tensor, choice: Choice) -> Tensor:
        """(x A_i) B_i of each token's experts, `[B, T, top, dk]`."""
        assert self.q_down is not None and self.q_up is not None
        work = self.q_down[0].numel() + self.q_up[0].numel()
        groups = group(choice.chosen.flatten(0, 1), self.count, size=work)
        rows = groups.each(
            x.flatten(0, 1)[:, None], lambda rows, down, up: through(through(rows, down), up), self.q_down, self.q_up
        )
        return rows.unflatten(0, x.shape[:2])

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {"k": self.k_proj(flow.source)[:, None], "v": flow.source[:, None]}

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        mixed = o.transpose(1, 2)  # [B, T, maps, D]
        y = torch.zeros_like(mixed[:, :, 0])
        for index in range(self.always):
            y = y + self.fixed.alone(mixed[:, :, index if self.each else 0], index)
        if self.router is None:
            return y
        rows = mixed[:, :, self.always :] if self.each else mixed
        return y + self.experts(rows.flatten(0, 1), flow.memo["choice"].flatten()).view_as(y)
