"""Multiple head embeddings: one shared projection, and a learned vector that tells each head apart."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.kernel import FEW_ROWS
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MHE(Part):
    """Single-head q = x W_Q, k = x W_K, v = x W_V `[B, T, d]`; e^q, e^k, e^v `[H, d]` make heads of them.

    mul: q_h = q ∘ (1 + e^q_h), k_h = k ∘ (1 + e^k_h), v_h = v ∘ (1 + e^v_h); add: q_h = q + e^q_h and so on.
    o_h = softmax(q_h k_hᵀ / √d) v_h, y = concat(o) W_O. Caches the shared k and v, 2d numbers a token.

    Absorbed, this is multi-query attention: mul moves e^k onto the queries and e^v onto the outputs; add gives scores a
    part q_h·e^k_h and outputs the part e^v_h · Σ weights. Where keys do not rotate, the former is the same for every
    key, so e^k of add is inert there and left out, unless key_embedding asks for it. With RoPE the embeddings come
    before rotation, where e^k matters (it sees distances); few queries then read k ∘ cos and k ∘ sin in place of every
    head's rotated keys, at twice the width (add: cos and sin alone too, four times).

    Options: combine. head_dim (default D/H). key_embedding: whether e^k exists; by default for mul, and for add where
    keys rotate. view: `auto` absorbs where nothing rotates, or for few queries; `expanded` forms every head's keys,
    which parts that need them ask for.

    Choices the paper leaves open: embeddings from N(0, 0.02²); the 1 + of mul, without which heads would start near
    zero; the order with RoPE (the paper's models have absolute positions).

    Source: Xue and Aletras 2023, arXiv 2310.07911.
    """

    name: ClassVar[str] = "mhe"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2310.07911"
    examples: ClassVar = ({}, {"combine": "add"}, {"combine": "add", "head_dim": 8, "view": "expanded"})

    combine: Literal["mul", "add"] = "mul"
    head_dim: int | None = None
    key_embedding: bool | None = None
    view: Literal["auto", "expanded"] = "auto"

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"})

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.view == "expanded" else ())

    @property
    def hint(self) -> dict[str, str]:
        return {"gives head keys": "mhe(view=expanded)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        return Heads(heads.dim, heads.q, heads.q, width, width, heads.q, width, width**-0.5, slice(0, width))

    def embeds_keys(self, after: Heads) -> bool:
        inert = self.combine == "add" and after.rotary is None
        return not inert if self.key_embedding is None else self.key_embedding

    def build(self, before: Heads, after: Heads, site: Site) -> MHEProject:
        return MHEProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        own, width = site.kv_source is None, after.qk_width
        weights = after.dim * (width + after.out * after.out_width)
        weights += 2 * (site.context_dim or after.dim) * width if own else 0
        embeddings = (2 + self.embeds_keys(after)) * after.q * width
        cached = Fraction(2 * width if own else 0)
        return Cost(weights + embeddings, cached, 0, 2 * weights, 4 * after.q * width, windows(after.keep, cached))


class MHEProject(Project):
    rotate = "read"  # each head turns its own key

    def __init__(self, options: MHE, heads: Heads, site: Site) -> None:
        super().__init__()
        self.heads, self.mul = heads.q, options.combine == "mul"
        self.turns = heads.rotary
        if options.view == "auto":
            self.views = ("expanded", "absorbed")
            self.absorb_below = max(1, FEW_ROWS // heads.q) if heads.rotary else 2**31
        width, source = heads.qk_width, site.context_dim or heads.dim

        def embedding() -> nn.Parameter:
            return nn.Parameter(0.02 * torch.randn(heads.q, width))

        self.q_proj = nn.Linear(heads.dim, width, bias=False)
        if site.kv_source is None:
            self.k_proj = nn.Linear(source, width, bias=False)
            self.v_proj = nn.Linear(source, width, bias=False)
            self.entries = {"k": Entry(1, width), "v": Entry(1, width)}
        self.q_heads, self.v_heads = embedding(), embedding()
        self.k_heads = embedding() if options.embeds_keys(heads) else None
        self.key_heads = {"absorbed": 1 if self.mul or self.k_heads is None else 2}
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=False)

    def _embed(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """`[B, 1, N, d]` to every head's `[B, H, N, d]`."""
        if embedding is None:
            return x.expand(-1, self.heads, -1, -1)
        return x * (1 + embedding[:, None]) if self.mul else x + embedding[:, None]

    def queries(self, flow: Flow) -> Tensor:
        return self._embed(self.q_proj(flow.x)[:, None], self.q_heads)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {"k": self.k_proj(flow.source)[:, None], "v": self.v_proj(flow.source)[:, None]}

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        k, v, axis = flow.rows["k"], flow.rows["v"], flow.rows.axis
        if flow.view == "expanded":
            return q, self._embed(k, self.k_heads), self._embed(v, self.v_heads), axis
        if self.k_heads is not None:  # before any rotation, which leaves each channel of q by itself
            parts = q.unflatten(-1, (-1, k.shape[-1]))
            own = parts * self.k_heads[:, None, None]
            if self.mul:
                q = (parts + own).flatten(-2)
            else:  # k + e, as k beside ones
                q, k = torch.stack([parts, own], -2).flatten(-3), torch.cat([k, torch.ones_like(k)], 1)
        return q, k, v if self.mul else F.pad(v, (0, 1), value=1.0), axis  # ones return the sum of the weights

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        if flow.view == "expanded":
            return o
        if self.mul:
            return o * (1 + self.v_heads[:, None])
        return o[..., :-1] + o[..., -1:] * self.v_heads[:, None]
