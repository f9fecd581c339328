"""A dense feed-forward cut into experts that sum to it, of which a router keeps a few for each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.check import check_top
from manyheads.core.cost import Cost
from manyheads.core.experts import Act, Experts, default_hidden, experts_cost
from manyheads.core.feed import Feed, FeedPiece
from manyheads.core.flow import Flow
from manyheads.core.part import OptionError, Site
from manyheads.core.registry import register_feed
from manyheads.core.router import Chooser, Routing


@register_feed
@dataclass(frozen=True)
class UoME(Feed):
    """MLP(x) = Σ_e act(x W_up^e) W_down^e over cuts of its hidden channels; y = G Σ_(e in I) act(x W_up^e) W_down^e.

    p = softmax(x W_g + b) `[B, T, E]`, I the `top` largest, G = Σ_I p. Experts add up and are never averaged, so that
    with all of them y is the dense feed-forward (G = 1); `UoME.split` makes one from the weights of a dense one.

    Options: experts, top (default half of them). hidden: channels of all experts together (default the stack's, else as
        of a dense feed-forward). act; bias: on every map, the last one's a share of the dense bias each. gate: `sum` as
        above; `none`, G = 1, as in the authors' language models, where nothing then trains the router; `straight`, each
        expert times 1 + p_e - stop(p_e): the same output, and a gradient. balance: weight 1 of `moe`'s loss, as `uome`
        (the authors have none).

    Choices: in the authors' code each expert also picks among the tokens of a sequence, as many for every expert, which
    looks at later tokens and at other sequences; here a token's own choice is all, whatever load that makes.

    Source: Yang et al. 2025, arXiv 2503.02495.
    """

    name: ClassVar[str] = "uome"
    paper: ClassVar[str] = "arXiv 2503.02495"
    examples: ClassVar = (
        {"experts": 4, "hidden": 24},
        {"experts": 4, "top": 1, "hidden": 20, "act": "gelu", "bias": True, "gate": "straight"},
        {"experts": 3, "top": 2, "hidden": 12, "balance": True},
    )

    experts: int = 8
    top: int | None = None
    hidden: int | None = None
    act: Act = "swiglu"
    bias: bool = False
    gate: Literal["sum", "straight", "none"] = "sum"
    balance: bool = False

    def __post_init__(self) -> None:
        check_top(self.active, self.experts)

    @property
    def active(self) -> int:
        return max(1, self.experts // 2) if self.top is None else self.top

    def width(self, dim: int, hidden: int | None = None) -> int:
        """Channels of all experts together."""
        return self.hidden or hidden or default_hidden(dim, self.act)

    def check(self, dim: int, hidden: int | None, site: Site) -> None:
        super().check(dim, hidden, site)
        width = self.width(dim, hidden)
        if width < 1 or width % self.experts:
            near = max(1, round(width / self.experts)) * self.experts
            raise OptionError(f"uome: {width} channels do not cut into experts={self.experts}; hidden={near} does")

    def build(self, dim: int, hidden: int | None, site: Site) -> UoMEFeed:
        return UoMEFeed(self, dim, self.width(dim, hidden) // self.experts)

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        cut = self.width(dim, hidden) // self.experts
        router = Cost((dim + 1) * self.experts, token_flops=2 * dim * self.experts)
        return router + experts_cost(self.experts, self.active, dim, cut, self.act, self.bias)

    def split(self, dense: nn.Module, act: Act | None = None) -> UoMEFeed:
        """The experts of a dense feed-forward with linear maps `up_proj`, `down_proj` and perhaps `gate_proj`.

        hidden, act (gelu, or swiglu where there is a `gate_proj`) and bias are the dense one's; exact with all experts.
        """
        maps = {name: child for name, child in dense.named_children() if isinstance(child, nn.Linear)}
        up, down, gated = maps["up_proj"], maps["down_proj"], "gate_proj" in maps
        options = replace(
            self, hidden=up.out_features, act=act or ("swiglu" if gated else "gelu"), bias=down.bias is not None
        )
        options.check(up.in_features, None, Site())
        piece = options.build(up.in_features, None, Site()).to(up.weight)
        with torch.no_grad():
            for name in piece.experts.names:
                weight, bias, own = maps[name].weight, maps[name].bias, piece.experts.get_parameter(name)
                inner = name != "down_proj"
                own.copy_(torch.stack(weight.chunk(self.experts, 0 if inner else 1)))
                if bias is not None:
                    shares = bias.chunk(self.experts) if inner else [bias / self.experts] * self.experts
                    piece.experts.get_parameter(name + "_bias").copy_(torch.stack(list(shares)))
        return piece


class UoMEFeed(FeedPiece):
    def __init__(self, options: UoME, dim: int, cut: int) -> None:
        super().__init__()
        self.balance = options.balance
        self.router = SumChooser(options.gate, dim, options.experts, options.active)
        self.experts = Experts(options.experts, dim, cut, options.act, bias=options.bias)

    def feed(self, x: Tensor, flow: Flow) -> Tensor:
        choice = self.router.choose(x, flow.q.valid, flow, "uome" if self.balance else None).flatten()
        return self.experts(x.flatten(0, 1)[:, None], choice).view_as(x)


class SumChooser(Chooser):
    """A router with a bias whose gates weigh a token's total, not one expert against another."""

    def __init__(self, gate: str, dim: int, experts: int, top: int) -> None:
        super().__init__(dim, experts, top, bias=True)
        self.gate = gate

    def gates(self, routing: Routing) -> Tensor:
        kept = routing.gates()
        if self.gate == "sum":
            return kept.sum(-1, keepdim=True).expand_as(kept)
        one = torch.ones_like(kept)
        return one if self.gate == "none" else one + kept - kept.detach()
