"""Multi-head low-rank attention: latent blocks with a softmax each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from manyheads.attention.latent import latent_layout, views_of
from manyheads.attention.latent_blocks import BlockLatentProject, block_cost, block_widths
from manyheads.core.cost import Cost
from manyheads.core.part import Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MLRA(Part):
    """MLA with a softmax for each block of the latent: o_h = Σ_b softmax(q_h k_h^b s) v_h^b / √branches.

    [c ; k_r] = W_a x; c in `blocks` cuts of width r_b = rank/blocks, c_b ← √(D/r_b) · RMSNorm_b(c_b) `[B, T, r_b]`, k_r
    `[B, T, rope_dim]` rotated, common to heads and blocks and not scaled. Block b gives head h its key
    k_h^b = [W_UK^bh c_b ; k_r] and value v_h^b = W_UV^bh c_b; q_h = [q_n ; q_r] from the latent
    √(D/q_rank) · RMSNorm(W_qa x) is the same for all of its branches; s = (nope_dim + rope_dim)^-1/2. The sum stands
    outside the softmax, which makes it another function than MLA. Caches rank + rope_dim numbers a token in all, of
    which a device that holds one block needs rank/blocks + rope_dim.

    Options:
        branches: blocks that serve a head, 4 (MLRA-4: every block serves every head) or 2 (MLRA-2: with four blocks,
            blocks 0 and 2 serve the first half of the heads, 1 and 3 the second). blocks: 4 in both of the authors'
            forms; other numbers are the same formula.
        rank, rope_dim, nope_dim, v_dim, norm, view: as in `mla`. q_rank: default 8 head widths, 0 for queries straight
            from x. latent_scale: `none` leaves √(D/·) out, which evens the sizes of content and rotary keys.
        zero_out: W_O is zero at the start, which the authors find better than a random one.

    Source: MLRA 2026, arXiv 2603.02188.
    """

    name: ClassVar[str] = "mlra"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2603.02188"
    examples: ClassVar = (
        {"rank": 12, "rope_dim": 4, "q_rank": 7},
        {"branches": 2, "view": "expanded", "q_rank": 0, "v_dim": 5},
        {"branches": 2, "view": "absorbed", "norm": False},
    )

    branches: int = 4
    blocks: int = 4
    rank: int | None = None
    rope_dim: int | None = None
    nope_dim: int | None = None
    v_dim: int | None = None
    q_rank: int | None = None
    norm: bool = True
    latent_scale: Literal["none", "sqrt"] = "sqrt"
    zero_out: bool = True
    view: Literal["auto", "expanded", "absorbed"] = "auto"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"} if self.view == "expanded" else ())

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} | ({"one map"} if self.branches > 1 else set()))

    @property
    def hint(self) -> dict[str, str]:
        return {"gives head keys": "mlra(view=expanded)", "gives one map": "gla in place of mlra"}

    def widths(self, heads: Heads) -> tuple[int, int, int, int, int]:
        """rank, nope, rope, value and query rank with the defaults filled in."""
        given = (self.rank, self.nope_dim, self.rope_dim, self.v_dim, self.q_rank)
        return block_widths(self.name, heads, self.blocks, self.branches, *given)

    def layout(self, heads: Heads, site: Site) -> Heads:
        _, nope, rope, v, _ = self.widths(heads)
        one = latent_layout(heads, nope, rope, v)
        return one._replace(kv=self.branches * heads.q, grouped=self.branches == 1)

    def build(self, before: Heads, after: Heads, site: Site) -> BlockLatentProject:
        rank, nope, rope, _, q_rank = self.widths(before)
        project = BlockLatentProject(
            after, site, blocks=self.blocks, branches=self.branches, rank=rank, nope=nope, rope=rope, q_rank=q_rank,
            norm=self.norm, sqrt_scale=self.latent_scale == "sqrt",
            views=views_of(self.view),
        )  # fmt: skip
        if self.zero_out:
            nn.init.zeros_(project.o_proj.weight)
        return project

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return block_cost(self.widths(before), after, site, self.blocks, self.branches, self.norm)
