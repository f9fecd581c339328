"""Grouped latent attention: latents that serve a share of the heads each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from manyheads.attention.latent import latent_layout, views_of
from manyheads.attention.latent_blocks import BlockLatentProject, block_cost, block_widths
from manyheads.core.cost import Cost
from manyheads.core.part import Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class GLA(Part):
    """MLA with `latents` latents, the i-th of which serves the i-th share of the heads alone.

    [c_1 … c_m ; k_r] = W_a x, c_i ← RMSNorm_i(c_i) `[B, T, rank/m]`, k_r `[B, T, rope_dim]` rotated and common to all.
    A head h of share i has k_h = [W_UK^h c_i ; k_r], v_h = W_UV^h c_i; queries, through a latent of their own, and the
    scale (nope_dim + rope_dim)^-1/2 are MLA's. Nothing is summed over latents, so that m devices each hold one of them
    and the rotary key. Absorbed, it is grouped attention with m key heads [c_i ; k_r] and values c_i. Caches
    rank + rope_dim numbers a token in all.

    Options: latents m (1 is MLA). rank: of all latents together, default 4 head widths. rope_dim, nope_dim, v_dim,
    norm, view: as in `mla`. q_rank: default 8 head widths, 0 for queries straight from x. latent_scale: `sqrt`
    multiplies normed latents by √(D/width), as a later comparison (arXiv 2603.02188) does. What is cached is the normed
    latent and the rotated key; the authors' modelling file caches both before. Not gated linear attention, which has
    the same name.

    Source: Zadouri et al. 2025, arXiv 2505.21487.
    """

    name: ClassVar[str] = "gla"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2505.21487"
    examples: ClassVar = (
        {"rank": 10, "rope_dim": 4, "q_rank": 7, "v_dim": 5},
        {"latents": 4, "view": "expanded", "latent_scale": "sqrt"},
        {"view": "absorbed", "q_rank": 0, "norm": False},
    )

    latents: int = 2
    rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    v_dim: int | None = None
    q_rank: int | None = None
    norm: bool = True
    latent_scale: Literal["none", "sqrt"] = "none"
    view: Literal["auto", "expanded", "absorbed"] = "auto"

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} | ({"formed keys"} if self.view == "absorbed" else set()))

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.view == "expanded" else ())

    @property
    def hint(self) -> dict[str, str]:
        return dict.fromkeys(("gives head keys", "gives formed keys"), "gla(view=expanded)")

    def widths(self, heads: Heads) -> tuple[int, int, int, int, int]:
        """rank, nope, rope, value and query rank with the defaults filled in."""
        given = (self.rank, self.nope_dim, self.rope_dim, self.v_dim, self.q_rank)
        return block_widths(self.name, heads, self.latents, 1, *given)

    def layout(self, heads: Heads, site: Site) -> Heads:
        _, nope, rope, v, _ = self.widths(heads)
        return latent_layout(heads, nope, rope, v)

    def build(self, before: Heads, after: Heads, site: Site) -> BlockLatentProject:
        rank, nope, rope, _, q_rank = self.widths(before)
        return BlockLatentProject(
            after, site, blocks=self.latents, branches=1, rank=rank, nope=nope, rope=rope, q_rank=q_rank,
            norm=self.norm, sqrt_scale=self.latent_scale == "sqrt",
            views=views_of(self.view),
        )  # fmt: skip

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return block_cost(self.widths(before), after, site, self.latents, 1, self.norm)
