"""Multi-head mixture of experts: a token is cut into sub-tokens, and each goes to experts of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from manyheads.core.check import check_top
from manyheads.core.cost import Cost
from manyheads.core.experts import Act, Experts, default_hidden, experts_cost, matrices
from manyheads.core.feed import Feed, FeedPiece
from manyheads.core.flow import Flow
from manyheads.core.part import OptionError, Site
from manyheads.core.registry import register_feed
from manyheads.core.router import Chooser


@register_feed
@dataclass(frozen=True)
class MHMoE(Feed):
    """[u_1 … u_h] = x W_head, sub-tokens of width D/h; y = [ŷ_1 … ŷ_h] W_merge, ŷ_j = Σ_(e in I_j) g_je FFN_e(u_j).

    p_j = softmax(u_j W_g) over E experts of D/h -> m -> D/h, W_g the same for all j; I_j the `top` largest. A token so
    meets up to h · top experts. Padding, gates and losses are those of `moe`, counted over sub-tokens (`mh_moe`; the
    authors weigh the balance loss by 0.01).

    Options: heads h (of no relation to attention heads), experts, top, hidden m; act, renorm, z: see `moe`. bias: of
        W_head and W_merge, which the authors' code has and their text has not. shared_hidden: width of a feed-forward
        that serves every whole token besides. Defaults are the authors' best at D 768, where FLOPs equal those of
        `moe(experts=8, top=1, hidden=2048)`; `parity` finds such numbers for others.

    Choices: whether gates are renormalised is left to the host by the authors, and what a shared expert reads is not
    said (here x). First weights of a lone layer follow their code: Xavier-uniform, W_head with gain 1/√2.

    Source: Wu et al. 2024, arXiv 2404.15045; Huang et al. 2024, arXiv 2411.16205.
    """

    name: ClassVar[str] = "mh_moe"
    paper: ClassVar[str] = "arXiv 2404.15045"
    examples: ClassVar = (
        {"heads": 2, "experts": 5, "hidden": 6, "top": 2},
        {"heads": 3, "experts": 4, "hidden": 7, "top": 1, "act": "gelu", "bias": True, "shared_hidden": 9, "z": 0.1},
    )

    heads: int = 3
    experts: int = 96
    hidden: int | None = 512
    top: int = 3
    act: Act = "swiglu"
    renorm: Literal["auto", "none", "full", "detach"] = "auto"
    bias: bool = False
    shared_hidden: int = 0
    z: float = 0.0

    def __post_init__(self) -> None:
        check_top(self.top, self.experts)
        if self.heads < 1 or self.shared_hidden < 0 or (self.hidden is not None and self.hidden < 1):
            raise OptionError(f"heads={self.heads}, hidden={self.hidden}, shared_hidden={self.shared_hidden}")

    @classmethod
    def parity(
        cls, dim: int, hidden_ref: int, experts_ref: int, top_ref: int, heads: int, *, top: int | None = None,
        act: Act = "swiglu", multiple: int = 8,
    ) -> MHMoE:  # fmt: skip
        """The options that cost what `moe(experts=experts_ref, top=top_ref, hidden=hidden_ref)` costs.

        FLOPs, routers apart, are equal exactly, which fixes m = (k' m' - 2 D/n) / k for n maps an expert; the number of
        experts is the multiple of `multiple` nearest to equal parameters, E = h (n m' E' - 2 D) / (n m).
        """
        top, n = (heads if top is None else top), matrices(act)
        left = n * top_ref * hidden_ref - 2 * dim  # n k m
        hidden, rest = divmod(left, n * top)
        if rest or hidden < 1:
            raise OptionError(
                f"mh_moe: no hidden gives the FLOPs of hidden={hidden_ref}, top={top_ref} at dim={dim}: "
                f"({n}·{top_ref}·{hidden_ref} - 2·{dim}) / ({n}·{top}) = {left / (n * top):.4g}"
            )
        exact = heads * (n * hidden_ref * experts_ref - 2 * dim) / (n * hidden)
        experts = max(-(-top // multiple), round(exact / multiple)) * multiple
        return cls(heads=heads, experts=experts, hidden=hidden, top=top, act=act)

    def check(self, dim: int, hidden: int | None, site: Site) -> None:
        super().check(dim, hidden, site)
        if dim % self.heads:
            fits = [heads for heads in range(1, min(dim, 16) + 1) if dim % heads == 0]
            raise OptionError(f"mh_moe: dim={dim} is no multiple of heads={self.heads}; heads may be {fits}")

    def width(self, dim: int, hidden: int | None = None) -> int:
        """Channels of one expert."""
        return self.hidden or hidden or default_hidden(dim // self.heads, self.act)

    def build(self, dim: int, hidden: int | None, site: Site) -> MHMoEFeed:
        return MHMoEFeed(self, dim, self.width(dim, hidden))

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        sub, width = dim // self.heads, self.width(dim, hidden)
        outer, router = 2 * dim * dim, sub * self.experts
        own = Cost(outer + 2 * dim * self.bias + router, token_flops=2 * (outer + self.heads * router))
        routed = experts_cost(self.experts, self.top, sub, width, self.act, rows=self.heads)
        shared = experts_cost(1, 1, dim, self.shared_hidden, self.act) if self.shared_hidden else Cost()
        return own + routed + shared


class MHMoEFeed(FeedPiece):
    def __init__(self, options: MHMoE, dim: int, width: int) -> None:
        super().__init__()
        self.heads, sub = options.heads, dim // options.heads
        renorm = options.renorm
        if renorm == "auto":
            renorm = "full" if options.top > 1 else "none"
        self.head_proj = nn.Linear(dim, dim, bias=options.bias)
        self.router = Chooser(sub, options.experts, options.top, renorm=renorm, z=options.z)
        self.experts = Experts(options.experts, sub, width, options.act, to_residual=False)
        self.merge_proj = nn.Linear(dim, dim, bias=options.bias)
        self.shared = Experts(1, dim, options.shared_hidden, options.act) if options.shared_hidden else None
        nn.init.xavier_uniform_(self.head_proj.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.merge_proj.weight)
        if options.bias:
            nn.init.zeros_(self.merge_proj.bias)

    def feed(self, x: Tensor, flow: Flow) -> Tensor:
        valid = None if flow.q.valid is None else flow.q.valid.repeat_interleave(self.heads, -1)
        parts = self.head_proj(x).unflatten(-1, (self.heads, -1)).flatten(1, 2)  # sub-tokens, in order of their tokens
        choice = self.router.choose(parts, valid, flow, "mh_moe").flatten()
        y = self.merge_proj(self.experts(parts.flatten(0, 1)[:, None], choice).view_as(x))
        return y if self.shared is None else y + self.shared.alone(x)
