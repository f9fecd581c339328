"""A bank of experts: many small feed-forwards of one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.dispatch import group
from manyheads.core.linear import linear
from manyheads.core.part import OptionError, Site, borrow
from manyheads.core.router import Choice

Act = Literal["swiglu", "geglu", "silu", "gelu", "relu", "none"]

ACTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (F.silu, True), "geglu": (F.gelu, True), "silu": (F.silu, False), "gelu": (F.gelu, False),
    "relu": (F.relu, False), "none": (lambda x: x, False),
}  # fmt: skip
"""By name: the function, and whether its output multiplies a second map of x (Shazeer 2020, arXiv 2002.05202)."""


def default_hidden(dim: int, act: Act) -> int:
    """4 D, or 8/3 D (a multiple of 8) where there are three maps: about as many weights."""
    return -(-8 * dim // 24) * 8 if ACTS[act][1] else 4 * dim


def matrices(act: Act) -> int:
    """Maps of one feed-forward."""
    return 2 + ACTS[act][1]


class Experts(nn.Module):
    """E feed-forwards, y = W_down act(W_up x) or W_down (act(W_gate x) ∘ W_up x), `[…, dim]` to `[…, dim]`.

    Weights are `[E, out, in]`, slices as `nn.Linear` has them; bias adds one to every map. to_residual: what comes out
    is added to the residual stream, so that first weights of deep stacks are scaled for it (`stack.initialise`).
    """

    def __init__(
        self, count: int, dim: int, hidden: int, act: Act = "swiglu", *, bias: bool = False, to_residual: bool = True
    ) -> None:
        super().__init__()
        self.count, self.dim, self.hidden, self.to_residual = count, dim, hidden, to_residual
        self.act: Act = act
        shapes = {"gate_proj": (hidden, dim), "up_proj": (hidden, dim), "down_proj": (dim, hidden)}
        if not ACTS[act][1]:
            del shapes["gate_proj"]
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(count, *shape)))
            self.register_parameter(name + "_bias", nn.Parameter(torch.empty(count, shape[0])) if bias else None)
        self.names = [*shapes]
        self.reset()

    def reset(self, std: float | None = None, out_std: float | None = None) -> None:
        """First weights: as `nn.Linear` draws them, or from N(0, std²), those of the last map from N(0, out_std²)."""
        for name in self.names:
            weight, bias = self.get_parameter(name), getattr(self, name + "_bias")
            bound = weight.shape[-1] ** -0.5
            if std is None:
                nn.init.uniform_(weight, -bound, bound)
            else:
                nn.init.normal_(weight, std=out_std if name == "down_proj" and out_std is not None else std)
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """Σ_j gates_j FFN_(chosen_j)(x_j): x `[N, 1, D]`, or `[N, k, D]` where each choice has its own; y `[N, D]`."""
        groups = group(choice.chosen, self.count, choice.kept, matrices(self.act) * self.dim * self.hidden)
        return groups.sum(x, choice.gates, self.one, *self.weights)

    def alone(self, x: Tensor, expert: int = 0) -> Tensor:
        """One expert on all of x `[…, D]`."""
        return self.one(x, *(weight[expert] for weight in self.weights))

    @property
    def weights(self) -> list[Tensor]:
        """All of them, in the order in which `one` takes them."""
        found = [getattr(self, name + part) for name in self.names for part in ("", "_bias")]
        return [weight for weight in found if weight is not None]

    def one(self, rows: Tensor, *weights: Tensor) -> Tensor:
        """One expert on its rows, or several on theirs: rows `[…, R, D]`, weights with the same leading axes."""
        step = 2 if self.up_proj_bias is not None else 1
        maps = [(weights[at], weights[at + 1] if step == 2 else None) for at in range(0, len(weights), step)]
        act, gated = ACTS[self.act]
        inner = act(through(rows, *maps[0]))
        return through(inner * through(rows, *maps[1]) if gated else inner, *maps[-1])

    def extra_repr(self) -> str:
        return f"{self.count} x {self.dim} -> {self.hidden} -> {self.dim}, {self.act}"


def through(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows `[…, R, D]` through `weight […, F, D]`, `bias […, F]`, of one expert or of several."""
    if weight.ndim == 2:
        return linear(rows, weight, bias)
    y = rows @ weight.transpose(-1, -2)
    return y if bias is None else y + bias[..., None, :]


def experts_cost(count: int, active: int, dim: int, hidden: int, act: Act, bias: bool = False, rows: int = 1) -> Cost:
    """`count` experts of which `active` serve a row, `rows` rows a token (that may each have other experts)."""
    n = matrices(act)
    one = n * dim * hidden + bias * ((n - 1) * hidden + dim)
    idle = max(0, count - active * rows) * one
    return Cost(count * one, token_flops=2 * n * dim * hidden * active * rows, idle=idle)


def borrow_experts(
    holder: nn.Module, attribute: str, site: Site, name: str, count: int, dim: int, hidden: int, act: Act
) -> None:
    """Give a module the experts that its site shares under a name (see `borrow`)."""
    borrow(holder, attribute, site, name, lambda: Experts(count, dim, hidden, act))
    found = getattr(holder, attribute).act
    if found != act:
        raise OptionError(f"{name!r} is shared with act={found}; another wants {act}")


def shared_cost(name: str, cost: Cost) -> Cost:
    """The cost of experts, where a stack owns them."""
    used = ((name, cost.active),) if cost.idle else ()
    return cost._replace(shared=((name, cost.parameters),), idle=0, used=used)
