"""The machinery of projections whose heads have keys and values of their own, each shared by a group of queries."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Project, Site

Biases = Literal["none", "qkv", "qkvo", "o"]
"""Which projections have a bias."""
SomeBiases = Literal["none", "qkv", "qkvo", "o", "qvo"]
"""The same, where keys may also be without one that queries and values have."""


def biased(bias: SomeBiases, projection: Literal["q", "k", "v", "o"]) -> bool:
    """Whether a projection has a bias."""
    return bias != "none" and projection in bias


def same_biases(bias: SomeBiases, name: str) -> Biases:
    """The biases of a layer that becomes another part, whose keys have one where queries and values do."""
    if bias == "qvo":
        raise OptionError(f"{name} has a bias for keys where queries and values have one; these keys have none")
    return bias


class GQAProject(Project):
    """q_proj, k_proj and v_proj from x to heads, o_proj back; caches k (rotated) and v of every key head.

    A layer that reads another's rows has no k_proj and v_proj, one that takes another's weights no q_proj and k_proj.
    """

    def __init__(self, heads: Heads, site: Site, bias: SomeBiases) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads.q, heads.kv, heads.qk_width
        self.turns = heads.rotary
        source, keys = site.context_dim or heads.dim, heads.kv * heads.keys
        entries: dict[str, Entry] = {}
        if site.attn_source is None:
            self.q_proj = nn.Linear(heads.dim, heads.q * heads.qk_width, bias=biased(bias, "q"))
            if site.kv_source is None:
                self.k_proj = nn.Linear(source, keys * heads.qk_width, bias=biased(bias, "k"))
                entries["k"] = Entry(keys, heads.qk_width, "k")
        if site.kv_source is None:
            self.v_proj = nn.Linear(source, heads.kv * heads.v_width, bias=biased(bias, "v"))
            entries["v"] = Entry(heads.kv, heads.v_width, "v")
        self.entries = entries
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=biased(bias, "o"))

    def queries(self, flow: Flow) -> Tensor:
        return self.q_proj(flow.x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        rows = {name: self.get_submodule(f"{name}_proj")(flow.source) for name in self.entries}
        return {name: row.unflatten(-1, (self.entries[name].heads, -1)).transpose(1, 2) for name, row in rows.items()}


def grouped_layout(name: str, heads: Heads, kv_heads: int | None, head_dim: int | None, scale: float | None) -> Heads:
    """Heads of one width for queries, keys and values, key heads that divide the query heads."""
    width, kv = heads.head_width(name, head_dim), heads.q if kv_heads is None else kv_heads
    if kv < 1 or heads.q % kv:
        fits = [n for n in range(1, heads.q + 1) if heads.q % n == 0]
        raise OptionError(f"{name}: kv_heads={kv} of {heads.q} query heads; kv_heads may be {fits}")
    factor = width**-0.5 if scale is None else scale
    return Heads(heads.dim, heads.q, kv, width, width, heads.q, width, factor, slice(0, width))


def grouped_cost(after: Heads, site: Site, bias: SomeBiases, queries: int | None = None) -> Cost:
    """Cost of a grouped projection; `queries`: projected query heads, where they are fewer than score heads."""
    scores = site.attn_source is None
    q, k = (queries or after.q) * after.qk_width * scores, after.kv * after.keys * after.qk_width * scores
    kv = k + after.kv * after.v_width
    o, own, source = after.out * after.out_width, site.kv_source is None, site.context_dim or after.dim
    weights = after.dim * (q + o) + (source * kv if own else 0)
    biases = q * biased(bias, "q") + after.dim * biased(bias, "o")
    biases += (k * biased(bias, "k") + (kv - k) * biased(bias, "v")) * own
    pair = 2 * after.q * (after.qk_width + after.v_width)
    cached = Fraction(kv if own else 0)
    return Cost(weights + biases, cached, 0, 2 * weights, pair, windows(after.keep, cached))
