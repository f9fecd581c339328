"""Mixture of heads: each token chooses which heads speak, and how loud."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, OptionError, Part, Site
from manyheads.core.registry import register
from manyheads.core.router import Routing, route


@register
@dataclass(frozen=True)
class MoH(Part):
    """Top-k routing over heads: y = Σ_h g_h o_h W_O^h, with `shared` heads always on and `top` of the others kept.

    linear router, for each token: π = softmax(x W_r) over the routed heads, m marks the `top` largest (no gradient
    through the choice), g_r = top · (π m) / Σ(π m); g_s = shared · softmax(x W_s); (a₁, a₂) = 2 softmax(x W_b);
    g = [a₁ g_s, a₂ g_r]. Gates have mean one over the heads that are on. A router over one head is one.
    norm router (for pretrained models, no weights): a routed head's score is the norm of its query before rotation over
    the standard deviation of these norms; the gate is the hard choice, with the softmax's gradient straight through.

    In training the balance loss H_r Σ_e mean(π_e) mean(m_e) (equal to `top` at perfect balance) goes to the auxiliary
    losses as `moh`; the authors weigh it by 0.01.

    Choices: the factors `shared`, `top` and 2 follow the authors' code (they make the no-drop case plain attention),
    not the paper's formula; the norm router's training gradient is not public and is the straight-through one. The
    authors' released inference code shapes the shared mask like the routed one; here it has its own length.

    Source: Jin et al. 2024, arXiv 2410.11842.
    """

    name: ClassVar[str] = "moh"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2410.11842"
    slot: ClassVar[str | None] = "router"
    examples: ClassVar = ({"top": 2}, {"top": 1, "shared": 1}, {"top": 1, "router": "norm"})

    top: int = 1
    shared: int = 0
    router: Literal["linear", "norm"] = "linear"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"own queries"} if self.router == "norm" else ())

    def layout(self, heads: Heads, site: Site) -> Heads:
        routed = heads.out - self.shared
        if self.shared < 0 or not 0 <= self.top <= routed or self.top + self.shared == 0:
            raise OptionError(
                f"moh: top={self.top} of {heads.out} heads with shared={self.shared}; top may be "
                f"{0 if self.shared else 1} to {max(routed, 0)}"
            )
        if self.router == "norm" and (heads.out != heads.q or routed < 2):
            raise OptionError("moh(router=norm): needs one query a head output, and two or more routed heads")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> MoHGate:
        return MoHGate(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        if self.router == "norm":
            return Cost()
        routed = before.out - self.shared
        outputs = routed * (self.top > 0 and routed > 1) + self.shared * (self.shared > 1)
        outputs += 2 * (self.shared > 0 and self.top > 0)
        return Cost(before.dim * outputs, token_flops=2 * before.dim * outputs)


class MoHGate(Gate):
    def __init__(self, options: MoH, heads: Heads) -> None:
        super().__init__()
        self.top, self.shared, self.router = options.top, options.shared, options.router
        self.routed = heads.out - options.shared
        linear = options.router == "linear"

        def to(width: int, wanted: bool) -> nn.Linear | None:
            return nn.Linear(heads.dim, width, bias=False) if wanted and linear else None

        self.route = to(self.routed, self.top > 0 and self.routed > 1)
        self.share = to(self.shared, self.shared > 1)
        self.balance = to(2, self.shared > 0 and self.top > 0)

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        gates = self._linear(flow) if self.router == "linear" else self._norm(flow)
        return o * gates.to(o.dtype).transpose(1, 2)[..., None]

    def _linear(self, flow: Flow) -> Tensor:
        """Gates `[B, T, H]`, mean one over the heads that are on."""
        parts = []
        if self.shared:
            one = flow.x.new_ones(*flow.x.shape[:2], self.shared)
            parts.append(one if self.share is None else self.shared * self.share(flow.x).softmax(-1))
        if self.route is not None:
            routing = self._balanced(route(self.route(flow.x), self.top), flow)
            parts.append(routing.spread(self.top * routing.gates("full")))
        else:
            parts.append(flow.x.new_full((*flow.x.shape[:2], self.routed), min(self.top, 1)))
        if self.balance is not None:
            weights = 2 * self.balance(flow.x).softmax(-1)
            parts = [part * weight for part, weight in zip(parts, weights.split(1, -1), strict=True)]
        return torch.cat(parts, -1)

    def _norm(self, flow: Flow) -> Tensor:
        queries = flow.memo["queries"]
        norms = (
            queries.to(torch.promote_types(queries.dtype, torch.float32))
            .norm(dim=-1)
            .transpose(1, 2)[..., self.shared :]
        )
        spread = norms.var(-1, keepdim=True) + 1e-12  # equal queries: a tie, not NaN
        routing = self._balanced(route(norms * spread.rsqrt(), self.top), flow)
        gate = routing.spread(torch.ones_like(routing.gates()))
        gate = gate - routing.chance.detach() + routing.chance if flow.training else gate
        return torch.cat([norms.new_ones(*norms.shape[:2], self.shared), gate], -1)

    def _balanced(self, routing: Routing, flow: Flow) -> Routing:
        """The routing, its balance loss noted in training."""
        if flow.training:
            flow.add_loss("moh", routing.balance(flow.q.validity))
        return routing
