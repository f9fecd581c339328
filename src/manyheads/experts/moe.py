"""Mixture of experts: a router sends each token to a few of many feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from manyheads.core.check import check_top
from manyheads.core.cost import Cost
from manyheads.core.experts import Act, Experts, default_hidden, experts_cost
from manyheads.core.feed import Feed, FeedPiece
from manyheads.core.flow import Flow
from manyheads.core.part import OptionError, Site
from manyheads.core.registry import register_feed
from manyheads.core.router import Chooser


@register_feed
@dataclass(frozen=True)
class MoE(Feed):
    """y = Σ_(e in I) g_e FFN_e(x) + Σ_s FFN_s(x), I the `top` of E experts that a token likes best.

    p = softmax(x W_g) `[B, T, E]` in float32 or better; g_e = p_e, or p_e / Σ_I p. Padding is sent nowhere. No choice
    is dropped (but see capacity), so that a token gets the same alone, in a batch, and in decoding.

    In training `E Σ_e f_e P_e + z mean(logsumexp(x W_g)²)` goes to the auxiliary losses as `moe`, f the loads and P the
    mean chances, each summing to one; 1 + … when all is even.

    Options: experts, top, hidden (of one expert; default the stack's, else as of a dense feed-forward). shared: experts
        that serve every token, ungated (arXiv 2401.06066), as one feed-forward of that many widths. act: `swiglu`,
        `geglu` (three maps), `silu`, `gelu`, `relu` (two). bias: on every map of an expert. renorm: `full` divides by
        Σ_I p as GShard (arXiv 2006.16668) and Mixtral do, `detach` passes no gradient through the sum, `none` is
        Switch Transformer's; `auto` is none for one expert, where full would teach the router nothing, else full.
        capacity: in training, an expert takes the first ⌈capacity · top · n / E⌉ choices of a sequence of n tokens.
        z: as above (ST-MoE, arXiv 2202.08906, has 0.1 of the balance loss's weight). balance: loads over the batch, or
        within each sequence. noisy, sample: see `manyheads.core.router`; both act in training only.

    Choices: the authors of capacity fill it in an order of their own and over the whole batch; here it is by position
    in each sequence, so that no sequence depends on another.

    Source: Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2021, arXiv 2101.03961.
    """

    name: ClassVar[str] = "moe"
    paper: ClassVar[str] = "arXiv 2101.03961"
    examples: ClassVar = (
        {"experts": 5, "hidden": 12},
        {"experts": 4, "top": 1, "hidden": 10, "act": "gelu", "bias": True, "z": 0.1, "balance": "sequence"},
        {"experts": 6, "top": 3, "hidden": 8, "shared": 2, "renorm": "detach", "capacity": 1.0},
    )

    experts: int = 8
    top: int = 2
    hidden: int | None = None
    shared: int = 0
    act: Act = "swiglu"
    bias: bool = False
    renorm: Literal["auto", "none", "full", "detach"] = "auto"
    capacity: float | None = None
    z: float = 0.0
    balance: Literal["batch", "sequence"] = "batch"
    noisy: bool = False
    sample: int = 0

    def __post_init__(self) -> None:
        check_top(self.top, self.experts)
        if not 0 <= self.sample <= self.top:
            raise OptionError(f"sample={self.sample} of top={self.top}; sample may be 0 to {self.top}")
        if self.shared < 0 or (self.hidden is not None and self.hidden < 1):
            raise OptionError(f"shared={self.shared}, hidden={self.hidden}; at least 0 and 1")
        if self.capacity is not None and self.capacity <= 0:
            raise OptionError(f"capacity={self.capacity} leaves no room; 1.25 is usual, none drops nothing")

    @property
    def steady(self) -> bool:
        return self.capacity is None and not self.noisy and not self.sample

    def width(self, dim: int, hidden: int | None = None) -> int:
        """Channels of one expert."""
        return self.hidden or hidden or default_hidden(dim, self.act)

    def build(self, dim: int, hidden: int | None, site: Site) -> MoEFeed:
        return MoEFeed(self, dim, self.width(dim, hidden))

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        width, router = self.width(dim, hidden), dim * self.experts * (1 + self.noisy)
        routed = experts_cost(self.experts, self.top, dim, width, self.act, self.bias)
        shared = Cost()
        if self.shared:
            shared = experts_cost(1, 1, dim, self.shared * width, self.act, self.bias)
        return Cost(router, token_flops=2 * router) + routed + shared


class MoEFeed(FeedPiece):
    def __init__(self, options: MoE, dim: int, width: int) -> None:
        super().__init__()
        renorm = options.renorm
        if renorm == "auto":
            renorm = "full" if options.top > 1 else "none"
        self.router = Chooser(
            dim, options.experts, options.top, renorm=renorm, capacity=options.capacity, z=options.z,
            per_sequence=options.balance == "sequence", noisy=options.noisy, sample=options.sample,
        )  # fmt: skip
        self.experts = Experts(options.experts, dim, width, options.act, bias=options.bias)
        self.shared = None
        if options.shared:
            self.shared = Experts(1, dim, options.shared * width, options.act, bias=options.bias)

    def feed(self, x: Tensor, flow: Flow) -> Tensor:
        choice = self.router.choose(x, flow.q.valid, flow, "moe").flatten()
        y = self.experts(x.flatten(0, 1)[:, None], choice).view_as(x)
        return y if self.shared is None else y + self.shared.alone(x)
