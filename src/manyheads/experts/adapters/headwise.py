"""Head-wise experts: each slice of a layer's input has a router and a bank of low-rank experts of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.core.check import check_top
from manyheads.core.cost import Cost
from manyheads.core.part import OptionError
from manyheads.core.router import Routing, route
from manyheads.experts.adapters.adapter import Adapter, Options, register_adapter


@register_adapter
@dataclass(frozen=True)
class Headwise(Options):
    """y = x W + (alpha/r) Σ_j Σ_{e in top_j} w_je (x_j A_je) B_je, x_j `[D/h]` the slices of a token's features x.

    p_j = softmax(x_j R_j), R `[h, D/h, E]`, top_j its `top` largest, w_je = p_je, over their sum where top > 1;
    A `[h, E, D/h, r]`, B `[h, E, r, F]`. A route is what all slices choose together: E^h of them with top = 1, and what
    one slice carries moves no other slice's choice. One slice is a mixture of low-rank experts with one router; one
    expert is an adapter of rank h·r with a block-diagonal A. All experts are computed, as one product of rank h·E·r,
    and weighed by zero where not chosen: exactly no gradient.

    On the linear layers of a feed-forward, whose input follows attention, residual and norm, slices are not heads of
    attention; on an output projection of attention (`targets=["o_proj"]`) they are, where h is their number.

    Options: heads h, experts E of a slice, rank r, top, alpha (default r). balance: weight of the balance loss, the
        mean over slices of E Σ_e mean(p_e) mean(e is chosen) / top, 1 when even; an output that has a loss gets it.

    First values: B = 0, so nothing changes at the start; A as a linear layer's weight, R from N(0, 0.01²).

    Choices: the paper's equations are not public. Placement, the width F of an expert's output, weights and top = 1 are
    ours; so is a router for each adapted layer. The balance loss sees every token, padding too: an adapter knows none.

    Source: Multi-Head Attention as a Source of Catastrophic Forgetting in MoE Transformers 2026, arXiv 2602.12587.
    """

    name: ClassVar[str] = "headwise-moe"
    paper: ClassVar[str] = "arXiv 2602.12587"

    heads: int = 8
    experts: int = 4
    rank: int = 4
    top: int = 1
    alpha: float | None = None
    balance: float = 0.0

    def __post_init__(self) -> None:
        if min(self.heads, self.experts, self.rank) < 1:
            raise OptionError(f"heads={self.heads}, experts={self.experts} and rank={self.rank} must be positive")
        check_top(self.top, self.experts)

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def check(self, inputs: int, outputs: int) -> None:
        if inputs % self.heads:
            fits = [n for n in range(1, inputs + 1) if inputs % n == 0]
            raise OptionError(f"headwise-moe: {inputs} features have no {self.heads} slices; heads may be {fits}")

    def build(self, inputs: int, outputs: int) -> HeadwiseAdapter:
        return HeadwiseAdapter(self, inputs, outputs)

    def cost(self, inputs: int, outputs: int) -> Cost:
        router, bank = inputs * self.experts, self.experts * self.rank * (inputs + self.heads * outputs)
        return Cost(router + bank, token_flops=2 * (router + bank))

    def active(self, inputs: int, outputs: int) -> int:
        return inputs * self.experts + self.top * self.rank * (inputs + self.heads * outputs)


class HeadwiseAdapter(Adapter):
    routing = ("router",)

    def __init__(self, options: Headwise, inputs: int, outputs: int) -> None:
        super().__init__(options)
        self.options: Headwise = options
        h, experts, rank, width = options.heads, options.experts, options.rank, inputs // options.heads
        self.router = nn.Parameter(torch.empty(h, width, experts).normal_(std=0.01))
        self.lora_a = nn.Parameter(torch.empty(h, experts, width, rank).uniform_(-(width**-0.5), width**-0.5))
        self.lora_b = nn.Parameter(torch.zeros(h, experts, rank, outputs))

    def products(self, x: Tensor, weights: Tensor) -> Tensor:
        """x_j W_j of the slices of x `[…, D]` with weights `[h, D/h, n]`: `[…, h, n]`, in the adapter's precision."""
        rows = x.to(weights.dtype).reshape(-1, *weights.shape[:2]).transpose(0, 1)  # [h, N, D/h]: one product a slice
        return (rows @ weights).transpose(0, 1).reshape(*x.shape[:-1], len(weights), -1)

    def route(self, x: Tensor) -> Routing:
        """Chances `[…, h, E]` and choices `[…, h, top]`."""
        return route(self.products(x, self.router), self.options.top)

    def gates(self, routing: Routing) -> Tensor:
        """w `[…, h, E]`, zero for experts that are not chosen."""
        return routing.spread(routing.gates("full" if self.options.top > 1 else "none"))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        routing = self.route(x)
        if self.shared.routes is not None:
            self.shared.routes.setdefault(self.at, []).append(routing.chosen.detach())
        if self.training and self.options.balance:
            self.shared.losses[self.at] = self.options.balance * self.balance(routing)
        z = self.products(x, self.lora_a.transpose(1, 2).flatten(2)).unflatten(-1, self.lora_a.shape[1::2])
        z = z * self.gates(routing)[..., None]  # [..., h, E, r]
        return y + (self.options.scale * (z.flatten(-3) @ self.lora_b.flatten(0, 2))).to(y.dtype)

    def balance(self, routing: Routing) -> Tensor:
        load = routing.spread(torch.ones_like(routing.gates()))
        chance, load = (each.flatten(0, -3).mean(0) for each in (routing.chance, load))
        return self.options.experts * (chance * load).sum(-1).mean() / self.options.top

    @torch.no_grad()
    def merged(self, weight: Tensor, bias: Tensor | None, task: int) -> tuple[Tensor, Tensor | None]:
        if self.options.experts > 1:
            raise ValueError("headwise-moe chooses for each token; only with one expert a slice is it one weight")
        update = torch.einsum("jir,jro->jio", self.lora_a[:, 0], self.lora_b[:, 0]).flatten(0, 1)
        return weight + self.options.scale * update.T, bias
