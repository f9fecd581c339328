"""Tucker attention: the query-key and value-output maps of all heads as two factorised tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

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
class Tucker(Part):
    """Score maps W_h = W_Q^h W_K^hᵀ and output maps W_V^h W_O^h of all heads, each a tensor `[H, D, D]` in Tucker form.

    q_h = Σ_a U_ha (x W_q) C_a `[B, H, T, r3]`; one latent for all heads is the key, k = x W_k `[B, 1, S, r3]`, another
    the value, v = x W_v `[B, 1, S, s3]`; z_h = softmax(q_h kᵀ scale) v; y = (Σ_h,a Ũ_ha z_h C̃_aᵀ) W_o. C `[r1, r2, r3]`
    and U `[H, r1]` mix heads, C̃ `[s1, s2, s3]` and Ũ `[H, s1]` likewise: multi-query attention over latents. RoPE turns
    the latent key, with frequencies over its r3 channels. Caches r3 + s3 numbers a token.

    Multi-head, grouped-query and (without its norms and rotary channels) latent attention are special ranks:
    `manyheads.attention.tucker` makes the weights.

    Options: ranks [r1, r2, r3] (default [H, 2d, 2d], d = D/H). value_ranks [s1, s2, s3] (default ranks). shared: the
    value is the key's latent before rotation, which alone is cached (r3 numbers) and rotated when read. scale (default
    d^-1/2, of the heads that the factors stand for).

    Choices the paper leaves open: no norms on latents; U starts as the identity, or with orthonormal columns where
    r1 < H, and the cores so that W_h has the variance of multi-head attention's. Factors are applied one after the
    other, which costs r1 (r2 + H) r3 a token where the paper's C ×₁ U costs H r2 r3.

    Source: Tucker Attention 2026, arXiv 2603.30033.
    """

    name: ClassVar[str] = "tucker"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2603.30033"
    examples: ClassVar = (
        {"ranks": (3, 7, 8)},
        {"ranks": (4, 9, 6), "value_ranks": (2, 5, 7)},
        {"ranks": (2, 5, 8), "shared": True},
    )

    ranks: tuple[int, ...] | None = None
    value_ranks: tuple[int, ...] | None = None
    shared: bool = False
    scale: float | None = None

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} if self.shared else ())

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    def sizes(self, heads: Heads) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(r1, r2, r3) and (s1, s2, s3) with the defaults filled in and checked."""
        if self.ranks is None and heads.dim % heads.q:
            raise OptionError(f"tucker: dim={heads.dim} is no multiple of heads={heads.q}; give ranks")
        wide = 2 * (heads.dim // heads.q)
        score = self.ranks or (heads.q, wide, wide)
        output = self.value_ranks or score
        for name, ranks in (("ranks", score), ("value_ranks", output)):
            if len(ranks) != 3 or min(ranks) < 1 or ranks[0] > heads.q:
                raise OptionError(
                    f"tucker: {name}={[*ranks]}; three positive numbers, the first at most the {heads.q} heads"
                )
        if self.shared and score[2] != output[2]:
            raise OptionError(f"tucker: a shared latent has one width, not {score[2]} as key and {output[2]} as value")
        (r1, r2, r3), (s1, s2, s3) = score, output
        return (r1, r2, r3), (s1, s2, s3)

    def layout(self, heads: Heads, site: Site) -> Heads:
        (_, _, key), (_, _, value) = self.sizes(heads)
        scale = (heads.dim / heads.q) ** -0.5 if self.scale is None else self.scale
        return Heads(heads.dim, heads.q, 1, key, value, heads.q, value, scale, slice(0, key))

    def build(self, before: Heads, after: Heads, site: Site) -> TuckerProject:
        return TuckerProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        (r1, r2, r3), (s1, s2, _) = self.sizes(before)
        own, values = site.kv_source is None, 0 if self.shared else after.v_width
        weights = after.dim * (r2 + s2) + r1 * r2 * r3 + s1 * s2 * after.out_width
        weights += (site.context_dim or after.dim) * (r3 + values) if own else 0
        flops = 2 * (weights + after.q * r1 * r3 + after.out * s1 * after.out_width)
        cached = Fraction(r3 + values if own else 0)
        pair = 2 * after.q * (r3 + after.v_width)
        return Cost(weights + after.q * r1 + after.out * s1, cached, 0, flops, pair, windows(after.keep, cached))


class TuckerProject(Project):
    def __init__(self, options: Tucker, heads: Heads, site: Site) -> None:
        super().__init__()
        self.shared, self.turns = options.shared, heads.rotary
        self.rotate = "read" if options.shared else "write"
        (r1, r2, r3), (s1, s2, _) = options.sizes(heads)
        source = site.context_dim or heads.dim

        def core(*ranks: int) -> nn.Parameter:
            return nn.Parameter((heads.dim / math.prod(ranks)) ** 0.5 * torch.randn(*ranks))

        def mix(count: int, rank: int) -> nn.Parameter:
            if rank == count:
                return nn.Parameter(torch.eye(count))
            columns = nn.init.orthogonal_(torch.empty(count, rank, dtype=torch.float32))  # QR has no half precision
            return nn.Parameter(columns.to(torch.get_default_dtype()))

        self.q_proj = nn.Linear(heads.dim, r2, bias=False)
        self.q_core, self.q_heads = core(r1, r2, r3), mix(heads.q, r1)
        if site.kv_source is None:
            self.k_proj = nn.Linear(source, r3, bias=False)
            self.entries = {"latent": Entry(1, r3)} if self.shared else {"k": Entry(1, r3, "k")}
            if not self.shared:
                self.v_proj = nn.Linear(source, heads.v_width, bias=False)
                self.entries["v"] = Entry(1, heads.v_width, "v")
        self.o_core, self.o_heads = core(s1, s2, heads.out_width), mix(heads.out, s1)
        self.o_proj = nn.Linear(s2, heads.dim, bias=False)

    def queries(self, flow: Flow) -> Tensor:
        maps = torch.einsum("btj,ajk->batk", self.q_proj(flow.x), self.q_core)
        return torch.einsum("ha,batk->bhtk", self.q_heads, maps)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        k = self.k_proj(flow.source)[:, None]
        return {"latent": k} if self.shared else {"k": k, "v": self.v_proj(flow.source)[:, None]}

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        k, v = ("latent", "latent") if self.shared else ("k", "v")
        return q, flow.rows[k], flow.rows[v], flow.rows.axis

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        maps = torch.einsum("ha,bhtk->batk", self.o_heads, o)
        return self.o_proj(torch.einsum("ajk,batk->btj", self.o_core, maps))
