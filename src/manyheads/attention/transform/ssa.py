"""Selective self-attention: a temperature for each query, and one for each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Site, Transform
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class SSA(Part):
    """score(n, j) = τ(n) q_n·k_j · scale over values τ(j) v_j; τ is an inverse temperature, larger is spikier.

    τ(n) = 1 + tanh f(x_n) + c log n, n = 1, 2, … counts the tokens of the sequence without padding; values have no log.
    token, the form of f: `shared`, w_h·GELU(q_h) for each head (values: w_g·GELU(v_g)), q and v as projected, before
    rotation; `mlp`, w·GELU(W x), one number for all heads; `none`. w = 0 at the start.
    position, the form of c: `sigmoid`, σ(a); `exponential`, e^(-e^a), all that the authors' code has; `none`.

    Options: value: whether values have a temperature (what is cached is scaled). value_position: with c log j too and
    an a of their own, as in a public implementation; heavier late values are no part of the paper's argument. start: a,
    by default 0, or 2 in the exponential form (0.0006 log n, for pretrained models; the authors take 1.5 for GPT-2).
    longest: where n ends, such as the size of a window. hidden: rows of W (default D/10, 5% more parameters).

    Choices the sources leave open: GELU; a number for each head in the shared form; a temperature scales q·k alone, not
    a bias, before a soft cap. Without causal order or with another sequence's keys a query's place does not say how
    many keys it sees: c is left out. So is f of token frequencies, which no layer has.

    Source: Zhang et al. 2024, arXiv 2411.12892.
    """

    name: ClassVar[str] = "ssa"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2411.12892"
    slot: ClassVar[str | None] = "temperature"
    at: ClassVar = "either"
    examples: ClassVar = (
        {},
        {"token": "mlp", "position": "exponential", "value_position": True, "longest": 6},
        {"position": "none", "value": False},
    )

    token: Literal["shared", "mlp", "none"] = "shared"
    position: Literal["sigmoid", "exponential", "none"] = "sigmoid"
    value: bool = True
    value_position: bool = False
    start: float | None = None
    longest: int | None = None
    hidden: int | None = None

    @property
    def scales_values(self) -> bool:
        return self.value and (self.token != "none" or self.value_position)

    @property
    def needs(self) -> frozenset[str]:
        keeps_x = self.token == "mlp"  # a value read from a cache has no x any more
        values = {"cached heads" if keeps_x else "head keys", "paired heads"}
        return frozenset({"token queries"} | (values if self.scales_values else set()))

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"token queries", "query lengths"})

    @property
    def hint(self) -> dict[str, str]:
        return dict.fromkeys(("cached heads", "head keys", "paired heads"), "ssa(value=false)")

    def counts(self, site: Site) -> bool:
        """Whether a query's place says how many keys it sees."""
        return self.position != "none" and site.causal and not site.cross

    def width(self, heads: Heads) -> int:
        """Rows of the map in `mlp`."""
        return max(heads.dim // 10, 1) if self.hidden is None else self.hidden

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.token == "none" and not self.counts(site):
            raise OptionError("ssa(token=none): without a position part nothing is left; take token=shared")
        if self.value_position and not (self.value and self.position != "none"):
            raise OptionError("ssa(value_position=true): needs value=true and position=sigmoid or exponential")
        if self.width(heads) < 1 or (self.longest is not None and self.longest < 1):
            raise OptionError(f"ssa: hidden={self.width(heads)} and longest={self.longest} must be positive")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> SSATransform:
        return SSATransform(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        values, hidden = self.scales_values and site.kv_source is None, self.width(before)
        q, v = before.q * before.qk_width, before.kv * before.v_width
        if self.token == "mlp":
            q, v = hidden * (before.dim + 1), hidden * ((site.context_dim or before.dim) + 1)
        weights = (q + v * values) * (self.token != "none")
        return Cost(weights + self.counts(site) * (1 + values * self.value_position), token_flops=2 * weights)


class SSATransform(Transform):
    def __init__(self, options: SSA, heads: Heads, site: Site) -> None:
        super().__init__()
        counts, hidden = options.counts(site), options.width(heads)
        self.linear = not options.scales_values
        self.q = Temperature(options, heads.q, heads.qk_width, heads.dim, hidden, counts)
        self.v = None
        if options.scales_values and site.kv_source is None:
            counts, source = counts and options.value_position, site.context_dim or heads.dim
            self.v = Temperature(options, heads.kv, heads.v_width, source, hidden, counts)

    def ask(self, q: Tensor, flow: Flow) -> Tensor:
        return q * self.q(flow.memo["queries"], flow.x, flow.q)

    def on_v(self, v: Tensor, flow: Flow) -> Tensor:
        axis = flow.new if flow.rows is None else flow.rows.axis
        return v if self.v is None else v * self.v(v, flow.source, axis)


class Temperature(nn.Module):
    """1 + tanh f + c log n, `[B, heads or 1, N, 1]`, of head features `[B, heads, N, width]` or of x `[B, N, D]`."""

    def __init__(self, options: SSA, heads: int, width: int, dim: int, hidden: int, counts: bool) -> None:
        super().__init__()
        self.longest, self.sigmoid = options.longest, options.position == "sigmoid"
        if options.token == "mlp":
            self.map = nn.Linear(dim, hidden, bias=False)
        shapes = {"shared": (heads, width, 1), "mlp": (hidden, 1)}
        self.weight = None if options.token == "none" else nn.Parameter(torch.zeros(shapes[options.token]))
        start = (0.0 if self.sigmoid else 2.0) if options.start is None else options.start
        self.growth = nn.Parameter(torch.tensor([start])) if counts else None

    def forward(self, features: Tensor, x: Tensor, axis: Axis) -> Tensor:
        tau = features.new_ones(1, 1, 1, 1)
        if self.weight is not None:
            read = features if self.weight.ndim == 3 else self.map(x)[:, None]
            tau = tau + torch.tanh(F.gelu(read) @ self.weight)
        if self.growth is not None:
            n = (axis.position + 1).clamp(1, self.longest)[:, None, :, None]
            c = self.growth.sigmoid() if self.sigmoid else (-self.growth.exp()).exp()
            tau = tau + c * n.to(torch.promote_types(c.dtype, torch.float32)).log()
        return tau.to(features.dtype)
