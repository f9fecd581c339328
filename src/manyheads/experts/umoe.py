"""Feed-forward whose experts are those of the layer's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyheads.core.check import check_top
from manyheads.core.cost import Cost
from manyheads.core.experts import Act, Experts, borrow_experts, experts_cost, shared_cost
from manyheads.core.feed import Feed, FeedPiece
from manyheads.core.flow import Flow
from manyheads.core.part import OptionError, Site
from manyheads.core.registry import register_feed
from manyheads.core.router import Chooser


@register_feed
@dataclass(frozen=True)
class UMoEFeed(Feed):
    """y = E_0'(x) + Σ_(i in I) p_i E_i(x), with the experts E_i of the attention part `umoe` in the same layer.

    p = softmax(x W_r') over N experts E_i(u) = W_down^i act(W_up^i u), D -> m -> D, by a router of its own; I the `top`
    largest, p_i as they are. In training the balance loss N Σ_i f_i P_i, within each sequence, goes to the auxiliary
    losses as `umoe_ffn`; the authors weigh it by 0.001.

    Options: experts N, hidden m (default D/4), act: those of the attention, or they are not the same experts (another
        attention part leaves them to the feed-forward alone). top: of its own. fixed: how many experts serve every
        token; shared_fixed: these too are the attention's. The stack's width of feed-forwards plays no part.

    Source: Yang et al. 2025, arXiv 2505.07260.
    """

    name: ClassVar[str] = "umoe"
    paper: ClassVar[str] = "arXiv 2505.07260"
    examples: ClassVar = (
        {"experts": 5, "top": 3, "hidden": 7},
        {"experts": 4, "top": 2, "fixed": 2, "act": "swiglu"},
        {"experts": 4, "top": 2, "fixed": 0},
    )

    experts: int = 128
    top: int = 15
    hidden: int | None = None
    fixed: int = 1
    shared_fixed: bool = False
    act: Act = "silu"

    def __post_init__(self) -> None:
        check_top(self.top, self.experts)
        if self.fixed < 0 or (self.hidden is not None and self.hidden < 1):
            raise OptionError(f"fixed={self.fixed}, hidden={self.hidden}; at least 0 and 1")

    def width(self, dim: int, hidden: int | None = None) -> int:
        return dim // 4 if self.hidden is None else self.hidden

    def check(self, dim: int, hidden: int | None, site: Site) -> None:
        super().check(dim, hidden, site)
        if self.width(dim) < 1:
            raise OptionError(f"umoe: dim={dim} has no quarter; give hidden")

    def build(self, dim: int, hidden: int | None, site: Site) -> UMoEFeedPiece:
        return UMoEFeedPiece(self, dim, site)

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        width, router = self.width(dim), dim * self.experts
        fixed = experts_cost(self.fixed, self.fixed, dim, width, self.act)
        cost = Cost(router, token_flops=2 * router)
        cost = cost + (shared_cost(f"umoe-fixed-{site.layer}", fixed) if self.shared_fixed else fixed)
        experts = experts_cost(self.experts, self.top, dim, width, self.act)
        return cost + shared_cost(f"umoe-{site.layer}", experts)


class UMoEFeedPiece(FeedPiece):
    experts: Experts
    fixed: Experts

    def __init__(self, options: UMoEFeed, dim: int, site: Site) -> None:
        super().__init__()
        self.always = options.fixed
        shape: tuple[int, int, Act] = (dim, options.width(dim), options.act)
        self.router = Chooser(dim, options.experts, options.top, per_sequence=True)
        borrow_experts(self, "experts", site, f"umoe-{site.layer}", options.experts, *shape)
        if self.always and options.shared_fixed:
            borrow_experts(self, "fixed", site, f"umoe-fixed-{site.layer}", self.always, *shape)
        elif self.always:
            self.fixed = Experts(self.always, *shape)

    def feed(self, x: Tensor, flow: Flow) -> Tensor:
        choice = self.router.choose(x, flow.q.valid, flow, "umoe_ffn").flatten()
        y = self.experts(x.flatten(0, 1)[:, None], choice).view_as(x)
        for index in range(self.always):
            y = y + self.fixed.alone(x, index)
        return y
