"""Token-level multi-head linear attention: blocks of tokens keep sums of their own, and learned weights mix them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.token_blocks import TokenBlocks, grid_blocks, nearness
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.kernel import Plan
from manyheads.core.part import NONE, Heads, OptionError, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream, averaged, counted, future

LEAST = 1e-5
"""The smallest weight of a block."""


@register
@dataclass(frozen=True)
class MHLA(Recurrence):
    """o_t = Σ_s m_{b(t) b(s)} (q_t·k_s) v_s / √d, b(t) the block of C tokens that t is in, M blocks at most.

    S_b = Σ_{t in b} k_t v_tᵀ `[K, V]` for each key head; a query of block i reads Σ_b m_ib S_b, and in a causal layer
    Σ_{b<i} m_ib S_b and the tokens of its own block up to itself. m `[M, M]`, shared by all heads, is learned within
    [1e-5, 1] (outside of it a weight counts as the nearest of these and can come back), lower triangular where causal.
    The sums of all blocks are kept, G·K·V numbers for C tokens, since every block weighs them anew. Positions from
    M·C on raise ValueError. (Heads of tokens; the letters are also used for multi-head latent attention.)

    Options: block C, blocks M. normaliser: divides by Σ_s m_{b(t) b(s)} (q_t·k_s), for positive `features`. In a
    bidirectional layer both may be lists, for tokens of a grid that are in it line by line: block=[8, 8], blocks=[4, 4]
    are 32 · 32 tokens. M² should not exceed the number of tokens.

    The preset `mhla_layer` adds what the paper's language layer has around it. At the start m_ij = 1/(i+1), j ≤ i; in a
    bidirectional layer m_ij ∝ 1 - |i - j| / max_k |i - k| by the distance of the blocks' middles, rows summing to one.

    Choices: the published vision code normalises with keys of another query, and starts with columns that sum to one;
    here both are as the paper has them. The published recurrence cannot go on from a state; this one does.

    Source: MHLA 2026, arXiv 2601.07832.
    """

    name: ClassVar[str] = "mhla"
    paper: ClassVar[str] = "arXiv 2601.07832"
    examples: ClassVar = (
        {"block": 4, "blocks": 8},
        {"block": 3, "blocks": 6, "normaliser": True},
        {"block": (2, 3), "blocks": (2, 1)},
    )

    block: int | tuple[int, ...] = 64
    blocks: int | tuple[int, ...] = 32
    normaliser: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return (super().needs - {"causal"}) | (frozenset({"positive"}) if self.normaliser else NONE)

    @property
    def breaks(self) -> frozenset[str]:
        return super().breaks | (frozenset({"query lengths"}) if self.normaliser else NONE)

    @property
    def hint(self) -> dict[str, str]:
        return {"positive": "features as the last transform and no rotation, or mhla(normaliser=false)"}

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens a block and blocks, along each side of the grid."""
        each = (self.block, self.blocks)
        block, blocks = (size if isinstance(size, tuple) else (size,) for size in each)
        return block, blocks

    def layout(self, heads: Heads, site: Site) -> Heads:
        block, blocks = self.sizes
        if not block or len(block) != len(blocks) or min(*block, *blocks) < 1:
            raise OptionError(f"mhla: block={self.block} and blocks={self.blocks}; as many numbers of each, at least 1")
        if site.causal and len(block) > 1:
            raise OptionError(f"mhla: block={[*block]} is of a grid, and a causal layer reads a line; give one number")
        if (site.max_len or 0) > math.prod(block) * math.prod(blocks):
            raise OptionError(
                f"mhla: {math.prod(blocks)} blocks of {math.prod(block)} tokens are fewer than the {site.max_len} "
                "tokens of the site; more blocks, or larger ones"
            )
        return super().layout(heads, site)

    def build(self, before: Heads, after: Heads, site: Site) -> MHLAScan:
        return MHLAScan(self, self.rows(before), site.causal)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        (block, blocks), sums = (math.prod(each) for each in self.sizes), self.state_cost(self.rows(before))
        mixing = 2 * blocks * sums.state_floats // block
        kept = Fraction(sums.state_floats, block) if site.causal else Fraction(0)
        return Cost(blocks**2, kept, token_flops=sums.token_flops + mixing)

    def rows(self, heads: Heads) -> Heads:
        """The layout with what is summed: values, and a one for the normaliser."""
        return heads._replace(v_width=heads.v_width + self.normaliser)


class MHLAScan(Scan):
    def __init__(self, options: MHLA, heads: Heads, causal: bool) -> None:
        super().__init__()
        self.causal, self.normaliser = causal, options.normaliser
        (self.shape, self.blocks), (self.size, count) = options.sizes, map(math.prod, options.sizes)
        if causal:
            self.states = {"scan": State((heads.kv, 0, heads.qk_width, heads.v_width), every=self.size)}
            mix = torch.ones(count, count).tril() / torch.arange(1, count + 1)[:, None]
        else:
            mix = nearness(self.blocks, self.shape)
        self.mix = nn.Parameter(mix)

    def weights(self) -> Tensor:
        """m within its bounds; what is beyond them has the gradient of what it counts as."""
        mix = self.mix.clamp(LEAST, 1).detach() + (self.mix - self.mix.detach())
        return mix.tril() if self.causal else mix

    def check(self, flow: Flow) -> None:
        axis = flow.new
        if not self.causal and axis.start:
            raise ValueError("mhla: a bidirectional layer reads its tokens in one pass, not after those of a cache")
        if axis.start is not None and axis.given_position is None:
            last = axis.start + axis.length - 1
        else:
            last = int(torch.where(axis.validity, axis.position, 0).max())
        if last >= self.size * len(self.mix):
            raise ValueError(f"mhla: position {last} is beyond {len(self.mix)} blocks of {self.size} tokens")

    def plan(self, queries: int, like: Tensor) -> Plan:
        return replace(super().plan(queries, like), why=f"sums of blocks of {self.size} tokens in place of keys")

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        wide, axis, t = torch.promote_types(v.dtype, torch.float32), flow.new, q.shape[2]
        rows = counted(v.to(wide)) if self.normaliser else v.to(wide)
        stream = Stream.of(flow)
        grid = None if len(self.shape) == 1 else grid_blocks(self.blocks, self.shape, axis.device)
        at = TokenBlocks.along(axis, stream, self.size, grid)
        q, k, rows = (at.lay(each) for each in (q.to(wide), stream.tokens(k.to(wide)), stream.tokens(rows)))
        q, m, sums = q.unflatten(1, (k.shape[1], -1)), self.weights().to(wide), k.transpose(-1, -2) @ rows
        pairs = m[at.block[:, :, None], at.block[:, None]] * (at.document[:, :, None] == at.document[:, None])
        o, mixed = 0.0, _mixed(pairs.tril(-1) if self.causal else pairs, sums)
        if self.causal:
            scores = (q @ k.transpose(-1, -2)[:, :, None]).masked_fill(future(at.room, q.device), 0.0)
            o = scores * m[at.block, at.block][:, None, None, :, None, None] @ rows[:, :, None]
            past = sums[:, :, :0] if stream.state is None else stream.state.expand(len(sums), -1, -1, -1, -1)
            flow.new_state["scan"] = at.carry_on(past, sums)
            mixed = mixed + _mixed(m[at.block, : past.shape[2]] * (at.document == 0)[..., None], past)
        o = at.gather((o + q @ mixed[:, :, None]).flatten(1, 2), t)
        return (averaged(o) if self.normaliser else o).to(v.dtype)


def _mixed(weights: Tensor, sums: Tensor) -> Tensor:
    """Σ_j w_ij S_j, `[B, G, i, K, V]`, of weights `[B or 1, i, j]` and sums `[B, G, j, K, V]`, which are not copied."""
    return (weights[:, None] @ sums.flatten(3)).unflatten(3, sums.shape[3:])
