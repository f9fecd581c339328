"""Directional routing: a router says how strongly directions of each head's output are projected out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.pool import pooled_width, running_mean, running_state, runs, whole_mean
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DirectionalRouting(Part):
    """o'_h = o_h - Σ_k r_hk (o_h · u_hk) u_hk, r = σ(temperature · ρ(x̄)) `[H, K]`, u_hk = v_hk / |v_hk| `[d]`.

    ρ is four linear layers with GELU between them, one for all heads of the layer; v is drawn from N(0, 1). All
    projections are of o_h itself, so that r = 1 on directions that are not orthogonal is no exact projection.

    A pass may replace r by a function of it, in `links.memo` under the gate: `lambda r: 0 * r` switches routing off,
    and a function may as well note what it is given.

    Options: k directions a head. hidden: width of ρ (default a third of the pooled width). temperature. start: of ρ's
    last bias; -2 leaves a pretrained layer nearly as it was. pool, what x̄ is: `sequence`, the mean of the sequence,
    or of the context in cross-attention; `causal`, the mean of the tokens so far, with a state of one sum for each
    sequence; `token`, x itself. By default `causal` in causal attention and `sequence` elsewhere.

    Choices: the author's language model pools the whole sequence, which tells every position the future; here that is
    refused in causal attention. ρ's widths are inferred from the reported size; its activation, and that it reads the
    layer's (normed) input, are ours. The author trains both at half the learning rate, without an auxiliary loss.

    Source: Taylor 2026, arXiv 2603.14923.
    """

    name: ClassVar[str] = "directional_routing"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2603.14923"
    slot: ClassVar[str | None] = "directions"
    examples: ClassVar = ({"k": 2}, {"k": 1, "pool": "token", "hidden": 5}, {"pool": "sequence"})

    k: int = 4
    hidden: int | None = None
    temperature: float = 5.0
    start: float = 0.0
    pool: Literal["causal", "sequence", "token"] | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"sequence": {"bidirectional"}, "causal": {"self"}}.get(self.pool or "", ()))

    @property
    def hint(self) -> dict[str, str]:
        return {"bidirectional": "directional_routing(pool=causal)", "self": "directional_routing(pool=sequence)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.k < 1 or self.width(heads, site) < 1:
            raise OptionError(
                f"directional_routing: k={self.k} directions and hidden={self.width(heads, site)}; both at least 1"
            )
        return heads

    def pooled(self, site: Site) -> Literal["causal", "sequence", "token"]:
        return self.pool or ("causal" if runs(site) else "sequence")

    def source(self, heads: Heads, site: Site) -> int:
        """The width of x̄."""
        return pooled_width(heads, site) if self.pooled(site) == "sequence" else heads.dim

    def width(self, heads: Heads, site: Site) -> int:
        return self.source(heads, site) // 3 if self.hidden is None else self.hidden

    def build(self, before: Heads, after: Heads, site: Site) -> DirectionalGate:
        return DirectionalGate(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        source, width, pool = self.source(before, site), self.width(before, site), self.pooled(site)
        directions = before.out * self.k
        router = width * (source + 2 * width + directions) + 3 * width + directions
        remove = 4 * directions * before.out_width
        return Cost(
            router + directions * before.out_width,
            state_floats=running_state(self.name, source)[self.name].shape[0] if pool == "causal" else 0,
            token_flops=remove + (source if pool == "sequence" else 2 * router),
        )


class DirectionalGate(Gate):
    def __init__(self, options: DirectionalRouting, heads: Heads, site: Site) -> None:
        super().__init__()
        self.temperature, self.pool, self.cross = options.temperature, options.pooled(site), site.cross
        source, width = options.source(heads, site), options.width(heads, site)
        self.states = running_state(options.name, source) if self.pool == "causal" else {}
        self.directions = nn.Parameter(torch.randn(heads.out, options.k, heads.out_width))
        self.router = nn.Sequential(
            *(layer for w in (source, width, width) for layer in (nn.Linear(w, width), nn.GELU())),
            nn.Linear(width, heads.out * options.k, bias=False),
        )
        self.bias = nn.Parameter(torch.full((heads.out, options.k), options.start))

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        change = flow.links.memo.get(self)
        strength = self.strength(flow)
        strength = strength if change is None else change(strength)
        u = F.normalize(self.directions, dim=-1)
        along = o @ u.transpose(-1, -2)
        return o - (along * strength.transpose(1, 2)) @ u

    def strength(self, flow: Flow) -> Tensor:
        """r `[B, 1 or T, H, K]`."""
        if self.pool == "causal":
            x = running_mean(flow, DirectionalRouting.name)
        else:
            x = flow.x if self.pool == "token" else whole_mean(flow, self.cross)
        logits = self.router(x).unflatten(-1, self.bias.shape) + self.bias
        return torch.sigmoid(self.temperature * logits)
