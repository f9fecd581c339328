"""Grouped-tied attention: a value whose first half is also the key."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.grouped import Biases
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class GTA(Part):
    """One state s_g a group is value and half of the key; the other half is a rotary key common to all groups.

    s = x W_KV `[B, G, T, d]`, k_r = x W_KR `[B, 1, T, rope_dim]` rotated; k_g = [s_g[: d - rope_dim] ; k_r], v_g = s_g
    (never rotated); q `[B, H, T, d]`, of which the last rope_dim channels rotate; grouped attention over √d. Caches s
    and the rotated k_r, G·d + rope_dim numbers a token: about half of what `gqa` does.

    Options: kv_heads G (default H/4). rope_dim: even, default d/2; 0 ties the whole key to the value. head_dim d:
    default D/H. bias: which projections have one (W_KV and W_KR are of `qkv`; the authors' file leaves the bias of W_KR
    on by its framework's default).

    A transform of keys and one of values part what is tied: both act when the state is read, and the cache keeps the
    state itself. Not grouped-head latent attention (arXiv 2506.17286), which has the same name.

    Source: Zadouri et al. 2025, arXiv 2505.21487.
    """

    name: ClassVar[str] = "gta"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2505.21487"
    examples: ClassVar = ({"kv_heads": 2, "bias": "qkvo"}, {"head_dim": 8}, {"kv_heads": 2, "rope_dim": 0})

    kv_heads: int | None = None
    rope_dim: int | None = None
    head_dim: int | None = None
    bias: Biases = "none"

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"})

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        rope = width // 4 * 2 if self.rope_dim is None else self.rope_dim
        kv = max(1, heads.q // 4) if self.kv_heads is None else self.kv_heads
        if kv < 1 or width < 1:
            raise OptionError(f"gta: kv_heads={kv}, head_dim={width}; at least 1")
        if rope % 2 or not 0 <= rope <= width:
            raise OptionError(f"gta: rope_dim={rope} of head_dim={width}; even numbers from 0 to {width // 2 * 2} fit")
        turns = slice(width - rope, width) if rope else None
        return Heads(
            heads.dim, heads.q, kv, width, width, heads.q, width, width**-0.5, turns, slice(0, width - rope)
        )  # fmt: skip

    def build(self, before: Heads, after: Heads, site: Site) -> GTAProject:
        return GTAProject(after, site, self.bias)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        q, kv = after.q * after.qk_width, after.kv * after.v_width + after.qk_width - after.content_width
        own, source, o = site.kv_source is None, site.context_dim or after.dim, after.out * after.out_width
        weights = after.dim * (q + o) + (source * kv if own else 0)
        biases = (q + (kv if own else 0)) * ("qkv" in self.bias) + after.dim * (self.bias in ("o", "qkvo"))
        cached = Fraction(kv if own else 0)
        return Cost(weights + biases, cached, 0, 2 * weights, 4 * q, windows(after.keep, cached))


class GTAProject(Project):
    def __init__(self, heads: Heads, site: Site, bias: Biases) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.tied = heads.q, heads.kv, heads.content_width
        self._turns, rope = heads.rotary, heads.qk_width - heads.content_width
        source, qkv = site.context_dim or heads.dim, "qkv" in bias
        self.q_proj = nn.Linear(heads.dim, heads.q * heads.qk_width, bias=qkv)
        if site.kv_source is None:
            self.kv_proj = nn.Linear(source, heads.kv * heads.v_width, bias=qkv)
            self.rotary_proj = nn.Linear(source, rope, bias=qkv) if rope else None
            self.entries = {"state": Entry(heads.kv, heads.v_width)} | ({"rotary": Entry(1, rope)} if rope else {})
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=bias in ("o", "qkvo"))

    def queries(self, flow: Flow) -> Tensor:
        return self.q_proj(flow.x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        rows = {"state": self.kv_proj(flow.source).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)}
        return rows if self.rotary_proj is None else rows | {"rotary": self.rotary_proj(flow.source)[:, None]}

    def rotary(self, name: str) -> slice | None:
        if self._turns is None or name == "state":
            return None
        first = 0 if name == "rotary" else self.tied
        return slice(first, first + self._turns.stop - self._turns.start)

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        state = flow.rows["state"]
        k = state[..., : self.tied]
        if "rotary" in flow.rows.tensors:
            k = torch.cat([k, flow.rows["rotary"].expand(-1, self.kv_heads, -1, -1)], -1)
        return q, k, state, flow.rows.axis
