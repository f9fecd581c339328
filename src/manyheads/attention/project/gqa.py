"""Grouped-query attention; multi-head and multi-query attention are its ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyheads.attention.grouped import GQAProject, SomeBiases, grouped_cost
from manyheads.core.cost import Cost
from manyheads.core.part import Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class GQA(Part):
    """G key/value heads, each read by H/G consecutive query heads: h reads h // (H/G).

    q = x W_Q `[B, H, T, d]`; k = x W_K, v = x W_V `[B, G, S, d]`; o_h = softmax(q_h k_g(h)ᵀ / √d) v_g(h);
    y = concat(o) W_O. G = H is multi-head attention, G = 1 multi-query attention (Shazeer 2019, arXiv 1911.02150).
    Caches k (rotated) and v, 2·G·d numbers a token.

    Options: kv_heads (default: all heads). head_dim d: default D/H, free of it (Bhojanapalli et al. 2020, arXiv
    2002.07028, keep it fixed while H grows: scores of n tokens have rank d at most, and any attention pattern needs
    d ≥ n - 1). v_dim: width of the values (default d). bias: which projections have one. scale (default d^-1/2).
    group: how many query heads share a key head, in place of kv_heads: one line for layers of different head counts,
    which then cache equally much (G d = D/group).

    Source: Ainslie et al. 2023, arXiv 2305.13245.
    """

    name: ClassVar[str] = "gqa"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2305.13245"
    examples: ClassVar = ({"kv_heads": 2}, {"head_dim": 8, "v_dim": 5, "bias": "qkvo"}, {"kv_heads": 1, "bias": "qvo"})

    kv_heads: int | None = None
    head_dim: int | None = None
    bias: SomeBiases = "none"
    scale: float | None = None
    v_dim: int | None = None
    group: int | None = None

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys", "several keys", "values alone"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.head_dim is None and heads.dim % heads.q:
            raise OptionError(
                f"gqa: dim={heads.dim} is no multiple of heads={heads.q}; give head_dim, or a dim such as "
                f"{heads.dim // heads.q * heads.q or heads.q}"
            )
        width = heads.dim // heads.q if self.head_dim is None else self.head_dim
        v = width if self.v_dim is None else self.v_dim
        kv = self._key_heads(heads.q)
        if kv < 1:
            raise OptionError(f"gqa: kv_heads={kv}; at least 1")
        if width < 1 or v < 1:
            raise OptionError(f"gqa: head_dim={width}, v_dim={v}; at least 1")
        scale = width**-0.5 if self.scale is None else self.scale
        return Heads(heads.dim, heads.q, kv, width, v, heads.q, v, scale, slice(0, width))

    def _key_heads(self, heads: int) -> int:
        if self.group is None:
            return heads if self.kv_heads is None else self.kv_heads
        if self.kv_heads is not None:
            raise OptionError(f"gqa: kv_heads={self.kv_heads} and group={self.group} say the same thing; give one")
        if self.group < 1 or heads % self.group:
            fits = [group for group in range(1, heads + 1) if heads % group == 0]
            raise OptionError(f"gqa: heads={heads} do not make groups of {self.group}; group may be {fits}")
        return heads // self.group

    def build(self, before: Heads, after: Heads, site: Site) -> GQAProject:
        return GQAProject(after, site, self.bias)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return grouped_cost(after, site, self.bias)
