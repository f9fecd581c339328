"""Tied projections: values that are the keys, queries that are the keys, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class QKVSharing(Part):
    """k = x W_K `[B, G, S, d]` stands in for another projection; scores over √d and outputs as ever.

    tie kv (Q-K=V): v = k, so that each head's output is a convex combination of visible keys. qk (Q=K-V): q = k, so
    that scores are symmetric before the mask. qkv (Q=K=V): both. Caches G·d numbers a token where v = k, 2·H·d for qk.
    G key heads of H as in grouped-query attention for kv; a tied query needs a key head of its own (G = H). A layer
    that reads another's rows makes its own queries.

    The authors' models have no RoPE. A value that is a key must not carry the key's absolute phase; three ways:
        rotation=read: the key is cached before rotation and rotated when read; the value never is.
        rotation=back: the rotated key is cached and is the value; each output turns back by its query's position:
            o_t = Σ_s A_ts R(s - t) k_s (as DeepSeek-V4's public implementation does). With a transform behind it, the
            key is cached as for read, and key and value are transformed, then rotated.
        rope_dim > 0: so many more key channels, one set for all heads, rotate, are cached and are no part of the value;
            the tied channels do not rotate. Scores over √(d + rope_dim).
    The asymmetric forms, written (X)⁺, add the part `pair-bias`: see the preset `qkv-sharing-plus`.

    Options: tie. kv_heads G (default H). head_dim d (default D/H). rotation, rope_dim (even): see above. bias: of all
    projections but the rotary one, as the authors have it.

    Source: Do Transformers Need Three Projections? 2026, arXiv 2606.04032.
    """

    name: ClassVar[str] = "qkv-sharing"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2606.04032"
    examples: ClassVar = (
        {"kv_heads": 2},
        {"kv_heads": 2, "rotation": "back", "bias": False},
        {"tie": "qkv", "rope_dim": 4},
    )

    tie: Literal["kv", "qk", "qkv"] = "kv"
    kv_heads: int | None = None
    head_dim: int | None = None
    rotation: Literal["read", "back"] = "read"
    rope_dim: int = 0
    bias: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"self"} if self.tie != "kv" else ())

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.rotation != "back" else ())

    @property
    def breaks(self) -> frozenset[str]:
        tied = set() if self.tie == "qk" else {"cached heads"}
        return frozenset(tied | ({"still values"} if self.rotation == "back" else set()))

    @property
    def hint(self) -> dict[str, str]:
        still = "qkv-sharing(rotation=read)"
        return {"self": "qkv-sharing(tie=kv)", "gives head keys": still, "gives still values": still}

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        kv = heads.q if self.kv_heads is None else self.kv_heads
        if kv < 1 or width < 1:
            raise OptionError(f"qkv-sharing: kv_heads={kv} and head_dim={width} must be positive")
        if self.tie != "kv" and kv != heads.q:
            raise OptionError(f"qkv-sharing(tie={self.tie}): kv_heads={kv}; each of {heads.q} queries is a key itself")
        if (self.tie == "qk") + (self.rotation == "back") + (self.rope_dim != 0) > 1:
            raise OptionError("qkv-sharing: tie=qk (a value of its own), rotation=back and rope_dim exclude each other")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise OptionError(f"qkv-sharing: rope_dim={self.rope_dim} does not pair up; it is even, or 0")
        whole = width + self.rope_dim
        turns = slice(width if self.rope_dim else 0, whole)
        return Heads(heads.dim, heads.q, kv, whole, width, heads.q, width, whole**-0.5, turns, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> QKVSharingProject:
        return QKVSharingProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        own, rope = site.kv_source is None, self.rope_dim
        q = 0 if own and self.tie != "kv" else after.q * after.qk_width
        k = after.kv * after.v_width if own else 0
        v, o = k * (self.tie == "qk"), after.out * after.out_width
        weights = after.dim * (q + o) + (site.context_dim or after.dim) * (k + v + rope * own)
        biases = (q + k + v + after.dim) * self.bias
        cached, pair = Fraction(k + v + rope * own), 2 * after.q * (after.qk_width + after.v_width)
        return Cost(weights + biases, cached, 0, 2 * weights, pair, windows(after.keep, cached))


class QKVSharingProject(Project):
    def __init__(self, options: QKVSharing, heads: Heads, site: Site) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads.q, heads.kv, heads.v_width
        self.rope, self.turns = options.rope_dim, heads.rotary
        own, source = site.kv_source is None, site.context_dim or heads.dim
        self.ties_q, self.ties_v = own and options.tie != "kv", options.tie != "qk"
        self.turns_values = options.rotation == "back"
        self.rotate = "write" if options.tie == "qk" or self.turns_values or self.rope else "read"
        if not self.ties_q:
            self.q_proj = nn.Linear(heads.dim, heads.q * heads.qk_width, bias=options.bias)
        if own:
            self.k_proj = nn.Linear(source, heads.kv * self.width, bias=options.bias)
            self.entries = {"tied": Entry(heads.kv, self.width)}
            if self.rope:
                self.rope_proj = nn.Linear(source, self.rope, bias=False)
                self.entries["rope"] = Entry(1, self.rope)
            if not self.ties_v:
                self.v_proj = nn.Linear(source, heads.kv * self.width, bias=options.bias)
                self.entries = {"k": Entry(heads.kv, self.width, "k"), "v": Entry(heads.kv, self.width, "v")}
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=options.bias)

    def _keys(self, flow: Flow) -> dict[str, Tensor]:
        """Keys of this pass and what rotates apart; queries may be them."""
        if "tied" not in flow.memo:
            flow.memo["tied"] = {"tied": heads_of(self.k_proj(flow.source), self.kv_heads)}
            if self.rope:
                flow.memo["tied"]["rope"] = self.rope_proj(flow.source)[:, None]
        return flow.memo["tied"]

    def _whole(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Keys `[B, G, S, d]` with the channels that rotate apart behind them."""
        k = rows["tied"]
        return torch.cat([k, rows["rope"].expand(-1, k.shape[1], -1, -1)], -1) if self.rope else k

    def queries(self, flow: Flow) -> Tensor:
        return self._whole(self._keys(flow)) if self.ties_q else heads_of(self.q_proj(flow.x), self.heads)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        rows = self._keys(flow)
        if self.ties_v:
            return dict(rows)
        return {"k": rows["tied"], "v": heads_of(self.v_proj(flow.source), self.kv_heads)}

    def rotary(self, name: str) -> slice | None:
        turns = self.turns
        if turns is None or (name == "v" and not self.turns_values) or (name == "tied" and self.rope):
            return None
        return slice(0, turns.stop - turns.start) if name == "rope" else turns

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        rows = flow.rows
        assert rows is not None
        k, v = (self._whole(rows.tensors), rows["tied"]) if self.ties_v else (rows["k"], rows["v"])
        return q, k, v, rows.axis


def heads_of(x: Tensor, heads: int) -> Tensor:
    """`[B, T, heads·d]` to `[B, heads, T, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
