"""Dynamically composable heads: each query and each key says how the heads' scores and weights are mixed."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.mixing import mixed
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Program, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DCMHA(Part):
    """a' = a M(t, s) for the vector a of all heads' scores, and again of their weights, at query t and key s.

    M = I + Σ_r w1_q[t, r]ᵀ w2_q[t, r] + diag g_q[t] + the same of the key, w1_k[s, r], w2_k[s, r], g_k[s], with
    [w1 ; w2] = gelu(u A) B `[2R, H]`, w1 scaled to unit rms over the heads, g = tanh(u C) `[H]`, u the layer's input at
    t or s: A `[D, K]`, B `[K, 2R·H]`, C `[D, H]` for each side of each of the two steps. Scores are composed before the
    mask, so hidden ones never mix in; there is no bias, so hidden weights stay zero. The keys' sides are cached, at
    both steps (4R + 2) H numbers a token.

    Options: rank R. hidden K (default 2·R·H). on: `scores`, `weights` or `both`. keys: whether keys have a say; if not,
    nothing more is cached. static: also a fixed W_b `[H, H]` in M, which the paper has and the released models do not.

    Choices: the gelu is the exact one; C starts as in the authors' training code, a tenth of what their inference code
    says; a score bias is added after composition; grouped key heads are repeated over their query heads first (the
    authors have as many as query heads).

    Source: Xiao et al. 2024, arXiv 2405.08553.
    """

    name: ClassVar[str] = "dcmha"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2405.08553"
    slot: ClassVar[str | None] = "head mix"
    examples: ClassVar = ({}, {"keys": False, "on": "weights"}, {"rank": 1, "static": True, "on": "scores"})

    rank: int = 2
    hidden: int | None = None
    on: Literal["both", "scores", "weights"] = "both"
    keys: bool = True
    static: bool = False

    @property
    def steps(self) -> tuple[str, ...]:
        return ("scores", "weights") if self.on == "both" else (self.on,)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"one map", "token keys"} if self.keys else {"one map"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"softmax", "one map"})

    @property
    def hint(self) -> dict[str, str]:
        return {"token keys": "dcmha(keys=false)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.rank < 1 or (self.hidden is not None and self.hidden < 1):
            raise OptionError(f"dcmha: rank={self.rank} and hidden={self.hidden} must be at least 1")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> DCMHAProgram:
        return DCMHAProgram(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        h, steps, own = before.q, len(self.steps), self.keys and site.kv_source is None
        k = self.hidden or 2 * self.rank * h

        def side(width: int) -> int:
            return width * k + k * 2 * self.rank * h + width * h

        sides = steps * (side(before.dim) + (side(site.context_dim or before.dim) if own else 0))
        static = steps * h * h if self.static else 0
        cached = Fraction(steps * (2 * self.rank + 1) * h if own else 0)
        pair = steps * (1 + self.keys) * (4 * self.rank + 2) * h + 2 * static
        return Cost(sides + static, cached, 0, 2 * sides, pair, windows(after.keep, cached))


class DCMHAProgram(Program):
    def __init__(self, options: DCMHA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.steps, self.rank, self.keys = options.steps, options.rank, options.keys
        sizes = (options.rank, heads.q, options.hidden or 2 * options.rank * heads.q)
        self.q = nn.ModuleDict({step: Side(heads.dim, *sizes) for step in self.steps})
        self.k = nn.ModuleDict()
        if self.keys and site.kv_source is None:
            self.k.update({step: Side(site.context_dim or heads.dim, *sizes) for step in self.steps})
            self.entries = {f"dcmha {step}": Entry(2 * self.rank + 1, heads.q) for step in self.steps}
        self.static = nn.ParameterDict()
        if options.static:
            self.static.update({step: 0.1 * heads.q**-0.5 * torch.randn(heads.q, heads.q) for step in self.steps})

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {f"dcmha {step}": side(flow.source) for step, side in self.k.items()}

    def before(self, scores: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        return self._compose(scores, "scores", rows, flow)

    def after(self, weights: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        return self._compose(weights, "weights", rows, flow)

    def _compose(self, a: Tensor, step: str, rows: slice, flow: Flow) -> Tensor:
        if step not in self.steps:
            return a
        total = a + self._by(a, self.q[step](flow.x[:, rows]), "t")
        if self.keys:
            assert flow.rows is not None
            total = total + self._by(
                a, flow.rows[f"dcmha {step}"][:, :, : a.shape[3]], "s"
            )  # a tile holds the keys within reach
        if step in self.static:
            total = total + mixed(a, self.static[step])
        return total

    def _by(self, a: Tensor, side: Tensor, token: str) -> Tensor:
        """What one side adds to `a` `[B, H, t, S]`; `token` names the axis of `a` that its tokens are on."""
        w1, w2, g = side.split([self.rank, self.rank, 1], 1)
        narrow = torch.einsum(f"bhts,br{token}h->brts", a, w1)
        g = g[:, 0].transpose(1, 2)
        return torch.einsum(f"brts,br{token}h->bhts", narrow, w2) + a * (
            g[..., None] if token == "t" else g[:, :, None]
        )


class Side(nn.Module):
    """u `[B, N, width]` to the rows w1 (R), w2 (R) and g of each token, `[B, 2R + 1, N, H]`."""

    def __init__(self, width: int, rank: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.rows = 2 * rank
        self.inner = nn.Linear(width, hidden, bias=False)
        self.outer = nn.Linear(hidden, self.rows * heads, bias=False)
        self.gate = nn.Linear(width, heads, bias=False)
        nn.init.normal_(self.inner.weight, std=(2 / (width + hidden)) ** 0.5)
        nn.init.normal_(self.outer.weight, std=0.02 / (hidden**0.5 * (heads + rank)))
        nn.init.normal_(self.gate.weight, std=0.005 * (2 / (width + heads)) ** 0.5)

    def forward(self, u: Tensor) -> Tensor:
        w = self.outer(F.gelu(self.inner(u))).unflatten(-1, (self.rows, -1))
        w1, w2 = w.transpose(1, 2).chunk(2, 1)
        wide = w1.to(torch.promote_types(w1.dtype, torch.float32))
        w1 = F.rms_norm(wide, wide.shape[-1:], eps=1e-6).to(w1.dtype)
        return torch.cat([w1, w2, self.gate(u).tanh()[:, None]], 1)
