"""The machinery of latents in blocks, each of which serves some heads by itself, so that a cache can be sharded."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from manyheads.attention.latent import LatentProject, RMSNorm, absorb_below, latent_cost, latent_widths, per_head
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Site


class BlockLatentProject(LatentProject):
    """A latent cut into `blocks` of equal width, each with a norm and an up-projection of its own.

    `branches` blocks serve each head: branch a of head h reads block (a·H + h) // (branches·H / blocks) in a softmax of
    its own, all branches with the head's one query, and their outputs add up, over √branches. The rotary key is common
    to all. Absorbed, a branch is grouped attention over its blocks: key [c_b ; k_r], value c_b.
    """

    joins_by_lse = False

    def __init__(
        self, heads: Heads, site: Site, *, blocks: int, branches: int, rank: int, nope: int, rope: int, q_rank: int,
        norm: bool, sqrt_scale: bool, views: tuple[str, ...], eps: float = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(
            heads, site, rank=rank, nope=nope, rope=rope, q_rank=q_rank, eps=eps, norm="rms" if norm else "none",
            sqrt_scale=sqrt_scale, views=views,
        )  # fmt: skip
        self.blocks, self.branches, width = blocks, branches, rank // blocks
        self.absorb_below = absorb_below(width, nope, self.v)
        self.key_heads = {"expanded": branches * heads.q, "absorbed": blocks}
        if site.kv_source is None and norm:
            self.kv_a_norm = RMSNorm(rank, eps, (heads.dim / width) ** 0.5 if sqrt_scale else 1.0, blocks)
        self.kv_b_proj = nn.Linear(width, branches * heads.q * (nope + self.v), bias=False)

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK `[branches·H, nope, rank/blocks]` and W_UV `[branches·H, v, rank/blocks]`."""
        up = self.kv_b_proj.weight.unflatten(0, (self.branches * self.heads, -1))
        return up[:, : self.nope], up[:, self.nope :]

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        """k and v of all branches side by side; absorbed, q too."""
        assert flow.rows is not None
        c, k_rope = flow.rows["latent"].split([self.rank, self.rope], -1)
        c = c[:, 0].unflatten(-1, (self.blocks, -1)).transpose(1, 2)  # [B, blocks, S, rank/blocks]
        if flow.view == "absorbed":
            q = q.repeat(1, self.branches, 1, 1)
            q = torch.cat([per_head(q[..., : self.nope], self._up()[0]), q[..., self.nope :]], -1)
            return q, torch.cat([c, k_rope.expand(-1, self.blocks, -1, -1)], -1), c, flow.rows.axis
        up = self.kv_b_proj.weight.unflatten(0, (self.blocks, -1, self.nope + self.v))
        k, v = torch.einsum("bgsr,ghnr->bghsn", c, up).flatten(1, 2).split([self.nope, self.v], -1)
        return q, torch.cat([k, k_rope.expand(-1, k.shape[1], -1, -1)], -1), v, flow.rows.axis

    def split(self, call: Call, flow: Flow) -> list[Call]:
        if self.branches == 1:
            return [call]
        q = call.q.chunk(self.branches, 1) if flow.view == "absorbed" else [call.q] * self.branches
        k, v = call.k.chunk(self.branches, 1), call.v.chunk(self.branches, 1)
        return [replace(call, q=q, k=k, v=v) for q, k, v in zip(q, k, v, strict=True)]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        return outs[0] if self.branches == 1 else Out(torch.cat([out.o for out in outs], 1))

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        o = super().undo(o, flow)
        return o if self.branches == 1 else o.unflatten(1, (self.branches, -1)).sum(1) * self.branches**-0.5


def block_widths(
    name: str, heads: Heads, blocks: int, branches: int, rank: int | None, nope: int | None, rope: int | None,
    v: int | None, q_rank: int | None,
) -> tuple[int, int, int, int, int]:  # fmt: skip
    """rank, nope, rope, value and query rank (default 8 head widths), checked against the numbers of blocks."""
    if q_rank is None and heads.dim % heads.q:
        raise OptionError(f"{name}: dim={heads.dim} is no multiple of heads={heads.q}; give q_rank")
    q_rank = 8 * (heads.dim // heads.q) if q_rank is None else q_rank
    rank, nope, rope, v = latent_widths(name, heads, rank, nope, rope, v)
    if q_rank < 0:
        raise OptionError(f"{name}: q_rank={q_rank}; 0 for queries straight from x, or a positive rank")
    if blocks < 1 or rank % blocks:
        fits = [n for n in range(1, rank + 1) if rank % n == 0]
        raise OptionError(f"{name}: a latent of rank={rank} does not cut into {blocks} blocks; it does into {fits}")
    if branches < 1 or blocks % branches or heads.q % (blocks // branches):
        fits = [n for n in range(1, blocks + 1) if blocks % n == 0 and heads.q % (blocks // n) == 0]
        raise OptionError(
            f"{name}: {blocks} blocks, {branches} for each of {heads.q} heads; blocks / branches must divide the heads"
            + (f": {fits} branches fit" if fits else "")
        )
    return rank, nope, rope, v, q_rank


def block_cost(
    widths: tuple[int, int, int, int, int], after: Heads, site: Site, blocks: int, branches: int, norm: bool
) -> Cost:
    """Cost of a projection with a latent in blocks."""
    rank, nope, rope, v, q_rank = widths
    whole = latent_cost((rank, nope, rope, v), after, site, q_rank, int(norm), False, False)
    saved = int(rank * after.q * (nope + v) * (1 - Fraction(branches, blocks)))
    return whole._replace(
        parameters=whole.parameters - saved,
        token_flops=whole.token_flops - 2 * saved,
        pair_flops=2 * branches * after.q * (2 * rank // blocks + rope),
    )
