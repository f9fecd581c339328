"""Multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.attention.latent import LatentProject, latent_cost, latent_layout, latent_widths, views_of
from manyheads.core.check import check_whole
from manyheads.core.cost import Cost
from manyheads.core.packing import Packing
from manyheads.core.part import Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MLA(Part):
    """All heads' keys and values are linear in one cached latent; one rotary key serves all heads.

    [c ; k_r] = W_a x, c ← RMSNorm(c) `[B, T, rank]`, k_r `[B, T, rope_dim]` rotated and cached with c. Per head h:
    k_h = [W_UK^h c ; k_r], v_h = W_UV^h c, q_h = [q_n ; q_r] with q_r rotated (through a latent of its own when
    q_rank > 0); o_h = softmax(q_h k_hᵀ s) v_h, s = (nope_dim + rope_dim)^-1/2. Content channels never rotate, which is
    what lets W_UK move onto the queries (the absorbed view, exact, cheaper while few queries read many latents).
    Caches rank + rope_dim numbers a token, whatever the number of heads.

    Options:
        rank: default 4 head widths. rope_dim: even, default half a head width; which frequencies its pairs use is
            `rope(pairs=…)`. nope_dim, v_dim: default the head width D/H. q_rank: 0 for full-rank queries.
        norm: of the latents; converted models have none. latent_scale: `sqrt` multiplies normed latents by √(D/rank)
            (LongCat-Flash does, DeepSeek's code does not). bias: of the projections from x (converted Qwen2).
            out_bias: of W_O. scale: s by hand.
        bits: how many each number of a cached latent has (2, 4, 8 or 16; 0: floats), with one 16-bit scale for `block`
            channels (default: all). rope_bits: likewise of the rotary key (default 8). All passes read latents as they
            come back from it, whose gradient is taken for the identity; weights do not depend on it, so that a model
            can be trained or started without.
        view: `auto` picks by the number of queries; `expanded` forms every head's keys, which parts that need them
            (qk-norm) ask for.

    Source: DeepSeek-V2 2024, arXiv 2405.04434.
    """

    name: ClassVar[str] = "mla"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2405.04434"
    examples: ClassVar = (
        {"rank": 9, "rope_dim": 4},
        {"view": "expanded"},
        {"view": "absorbed", "q_rank": 7, "v_dim": 5},
    )

    rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    v_dim: int | None = None
    q_rank: int = 0
    norm: bool = True
    latent_scale: Literal["none", "sqrt"] = "none"
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    bits: int = 0
    rope_bits: int = 8
    block: int | None = None
    view: Literal["auto", "expanded", "absorbed"] = "auto"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.view == "expanded" else ())

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} | ({"formed keys"} if self.view == "absorbed" else set()))

    @property
    def hint(self) -> dict[str, str]:
        return dict.fromkeys(("gives head keys", "gives formed keys"), "mla(view=expanded)")

    def widths(self, heads: Heads) -> tuple[int, int, int, int]:
        """rank, nope, rope and value widths with the defaults filled in."""
        return latent_widths(self.name, heads, self.rank, self.nope_dim, self.rope_dim, self.v_dim)

    def packing(self, heads: Heads) -> Packing | None:
        """How latents are stored; [c ; k_r] is one row."""
        rank, _, rope, _ = self.widths(heads)
        cuts = (rank, self.bits, self.block), (rope, self.rope_bits, None)
        return Packing.of(self.name, *cuts) if self.bits else None

    def layout(self, heads: Heads, site: Site) -> Heads:
        check_whole(0, q_rank=self.q_rank)
        _, nope, rope, v = self.widths(heads)
        self.packing(heads)
        return latent_layout(heads, nope, rope, v, self.scale)

    def build(self, before: Heads, after: Heads, site: Site) -> LatentProject:
        rank, nope, rope, _ = self.widths(before)
        views = views_of(self.view)
        return LatentProject(
            after, site, rank=rank, nope=nope, rope=rope, q_rank=self.q_rank, norm="rms" if self.norm else "none",
            sqrt_scale=self.latent_scale == "sqrt", bias=self.bias, out_bias=self.out_bias, views=views,
            packing=self.packing(before),
        )  # fmt: skip

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return latent_cost(
            self.widths(before), after, site, self.q_rank, int(self.norm), self.bias, self.out_bias,
            self.packing(before),
        )  # fmt: skip
