"""Grouped-query attention; multi-head and multi-query attention are its ends."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from torch import Tensor, nn

from manyheads.core.cache import Entry
from manyheads.core.cost import Cost, windows
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class GQA(Part):
    """G key/value heads, each read by H/G consecutive query heads: h reads h // (H/G).

    q = x W_Q `[B, H, T, d]`; k = x W_K, v = x W_V `[B, G, S, d]`; o_h = softmax(q_h k_g(h)ᵀ / √d) v_g(h);
    y = concat(o) W_O. G = H is multi-head attention, G = 1 multi-query attention (Shazeer 2019, arXiv 1911.02150).
    Caches k (rotated) and v, 2·G·d numbers a token.

    Options: kv_heads (default: all heads). head_dim (default D/H, free of it). bias: which projections have one.
    scale (default d^-1/2).

    Source: Ainslie et al. 2023, arXiv 2305.13245.
    """

    name: ClassVar[str] = "gqa"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2305.13245"
    examples: ClassVar = ({"kv_heads": 2}, {"head_dim": 8, "bias": "qkvo"}, {"kv_heads": 1})

    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Literal["none", "qkv", "qkvo", "o"] = "none"
    scale: float | None = None

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.head_dim is None and heads.dim % heads.q:
            raise OptionError(
                f"gqa: dim={heads.dim} is no multiple of heads={heads.q}; give head_dim, or a dim such as "
                f"{heads.dim // heads.q * heads.q or heads.q}"
            )
        width = self.head_dim or heads.dim // heads.q
        kv = heads.q if self.kv_heads is None else self.kv_heads
        if kv < 1:
            raise OptionError(f"gqa: kv_heads={kv}; at least 1")
        scale = width**-0.5 if self.scale is None else self.scale
        return Heads(heads.dim, heads.q, kv, width, width, heads.q, width, scale, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> GQAProject:
        return GQAProject(after, site, self.bias)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        q, kv, o = after.q * after.qk_width, after.kv * (after.qk_width + after.v_width), after.out * after.out_width
        own = site.kv_source is None
        source = site.context_dim or after.dim
        weights = after.dim * (q + o) + (source * kv if own else 0)
        biases = (q + (kv if own else 0)) * ("qkv" in self.bias) + after.dim * (self.bias in ("o", "qkvo"))
        pair = 2 * after.q * (after.qk_width + after.v_width)
        cached = Fraction(kv if own else 0)
        return Cost(weights + biases, cached, 0, 2 * weights, pair, windows(after.keep, cached))


class GQAProject(Project):
    def __init__(self, heads: Heads, site: Site, bias: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads.q, heads.kv, heads.qk_width
        self._rotary = heads.rotary
        source = site.context_dim or heads.dim
        self.q_proj = nn.Linear(heads.dim, heads.q * heads.qk_width, bias="qkv" in bias)
        if site.kv_source is None:
            self.k_proj = nn.Linear(source, heads.kv * heads.qk_width, bias="qkv" in bias)
            self.v_proj = nn.Linear(source, heads.kv * heads.v_width, bias="qkv" in bias)
            self.entries = {"k": Entry(heads.kv, heads.qk_width, "k"), "v": Entry(heads.kv, heads.v_width, "v")}
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=bias in ("o", "qkvo"))

    def queries(self, flow: Flow) -> Tensor:
        return self.q_proj(flow.x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        k, v = self.k_proj(flow.source), self.v_proj(flow.source)
        return {name: row.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for name, row in (("k", k), ("v", v))}

    def rotary(self, name: str) -> slice | None:
        return None if name == "v" else self._rotary

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        return q, flow.rows["k"], flow.rows["v"], flow.rows.axis

    def output(self, o: Tensor) -> Tensor:
        return self.o_proj(o.transpose(1, 2).flatten(2))
