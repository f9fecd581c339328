"""The machinery of latent projections: one cached latent a token, read expanded or absorbed."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.packing import Packing
from manyheads.core.part import Heads, OptionError, Project, Site


class RMSNorm(nn.Module):
    """g ∘ x / rms(x) in float32, returned in x's dtype; `scale` multiplies on top.

    blocks: as many equal cuts of the channels, each with an rms of its own.
    """

    def __init__(self, width: int, eps: float, scale: float = 1.0, blocks: int = 1) -> None:
        super().__init__()
        self.eps, self.scale, self.blocks = eps, scale, blocks
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (self.blocks, -1))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * (self.weight * self.scale)).to(x.dtype)


class LatentProject(Project):
    """kv_a: x to [latent c (rank) ; rotary key (rope)]; kv_b: c to each head's [content key (nope) ; value].

    Expanded, keys and values of every head are formed from the cached latents. Absorbed, W_UK moves onto the queries
    and W_UV behind the weighted sum, so that all heads read the latents themselves: one key head of width rank + rope
    whose first `rank` channels are also the value.
    """

    entries: dict[str, Entry]
    unhooked = ("kv_b_proj",)

    def __init__(
        self, heads: Heads, site: Site, *, rank: int, nope: int, rope: int, q_rank: int = 0, eps: float = 1e-6,
        norm: Literal["none", "rms", "layer"] = "rms", sqrt_scale: bool = False, bias: bool = False,
        out_bias: bool = False, views: tuple[str, ...] = ("expanded", "absorbed"), packing: Packing | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.rank, self.nope, self.rope, self.v = heads.q, rank, nope, rope, heads.v_width
        self.views = views
        self.absorb_below = absorb_below(rank, nope, self.v)
        self._turns = heads.rotary
        source = site.context_dim or heads.dim
        q_width = heads.q * (nope + rope)

        def make_norm(width: int) -> nn.Module:
            if norm == "layer":
                return nn.LayerNorm(width)
            return RMSNorm(width, eps, (heads.dim / width) ** 0.5 if sqrt_scale else 1.0)

        if q_rank:
            self.q_a_proj = nn.Linear(heads.dim, q_rank, bias=bias)
            self.q_a_norm = make_norm(q_rank) if norm != "none" else nn.Identity()
            self.q_b_proj = nn.Linear(q_rank, q_width, bias=False)
        else:
            self.q_proj = nn.Linear(heads.dim, q_width, bias=bias)
        self.q_rank = q_rank
        if site.kv_source is None:
            self.kv_a_proj = nn.Linear(source, rank + rope, bias=bias)
            self.kv_a_norm = make_norm(rank) if norm != "none" else None
            self.entries = {"latent": Entry(1, rank + rope, packing=packing)}
        self.kv_b_proj = nn.Linear(rank, heads.q * (nope + self.v), bias=False)
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=out_bias)

    def queries(self, flow: Flow) -> Tensor:
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(flow.x))) if self.q_rank else self.q_proj(flow.x)
        return q.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def latent(self, flow: Flow) -> tuple[Tensor, Tensor]:
        """The normed latent `[B, T, rank]` and the rotary key `[B, T, rope]` before rotation."""
        c, k = self.kv_a_proj(flow.source).split([self.rank, self.rope], -1)
        return (c if self.kv_a_norm is None else self.kv_a_norm(c)), k

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {"latent": torch.cat(self.latent(flow), -1)[:, None]}

    def latents(self, rows: Tensor) -> Tensor:
        """Cached rows as [c ; rotary key], `[B, 1, S, rank + rope]`."""
        return rows

    def rotary(self, name: str) -> slice | None:
        if self._turns is None:
            return None
        width = self._turns.stop - self._turns.start
        first = self.rank if name == "latent" else self.nope
        return slice(first, first + width)

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK `[H, nope, rank]` and W_UV `[H, v, rank]`."""
        up = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        return up[:, : self.nope], up[:, self.nope :]

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        rows, axis = self.latents(flow.rows["latent"]), flow.rows.axis
        if flow.view == "absorbed":
            q = torch.cat([per_head(q[..., : self.nope], self._up()[0]), q[..., self.nope :]], -1)
            return q, rows, rows[..., : self.rank], axis
        c, k_rope = rows[:, 0].split([self.rank, self.rope], -1)
        k, v = self.kv_b_proj(c).unflatten(-1, (self.heads, -1)).transpose(1, 2).split([self.nope, self.v], -1)
        return q, torch.cat([k, k_rope[:, None].expand(-1, self.heads, -1, -1)], -1), v, axis

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        return per_head(o, self._up()[1].transpose(-1, -2)) if flow.view == "absorbed" else o


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x `[B, H, T, a]` times weight `[H, a, b]`; a broadcast product would copy the weight for every sequence."""
    batch, _, t, _ = x.shape
    return (x.transpose(0, 1).flatten(1, 2) @ weight).unflatten(1, (batch, t)).transpose(0, 1)


def views_of(view: Literal["auto", "expanded", "absorbed"]) -> tuple[str, ...]:
    """The views that the option `view` of a latent projection allows."""
    return ("expanded", "absorbed") if view == "auto" else (view,)


def absorb_below(rank: int, nope: int, v: int) -> int:
    """Queries a pass up to which reading latents costs less than forming keys and values from them."""
    return rank * (nope + v) // max(1, 2 * rank - nope - v) if 2 * rank > nope + v else 2**31


def latent_widths(
    name: str, heads: Heads, rank: int | None, nope: int | None, rope: int | None, v: int | None
) -> tuple[int, int, int, int]:
    """rank, nope, rope and value widths with defaults (4, 1, 1/2 and 1 head widths) filled in and checked."""
    if None in (rank, nope, rope, v) and heads.dim % heads.q:
        raise OptionError(
            f"{name}: dim={heads.dim} is no multiple of heads={heads.q}; give rank, nope_dim, rope_dim and v_dim"
        )
    head = heads.dim // heads.q
    rank = 4 * head if rank is None else rank
    nope = head if nope is None else nope
    rope = head // 4 * 2 if rope is None else rope
    v = head if v is None else v
    if rank < 1 or v < 1 or nope < 0 or rope < 0 or nope + rope < 1:
        raise OptionError(
            f"{name}: rank={rank}, nope_dim={nope}, rope_dim={rope}, v_dim={v}; rank and v_dim must be positive, and a "
            "key needs nope_dim or rope_dim"
        )
    if rope % 2:
        raise OptionError(f"{name}: rope_dim={rope} does not pair up; use {rope - 1} or {rope + 1}")
    return rank, nope, rope, v


def latent_layout(heads: Heads, nope: int, rope: int, v: int, scale: float | None = None) -> Heads:
    """Heads that read a latent: keys of nope channels that stand still and rope that turn, values of v."""
    width = nope + rope
    factor = width**-0.5 if scale is None else scale
    turns = slice(nope, width) if rope else None
    return Heads(heads.dim, heads.q, heads.q, width, v, heads.q, v, factor, turns, slice(0, nope))


def latent_cost(
    widths: tuple[int, int, int, int], after: Heads, site: Site, q_rank: int, gains: int, bias: bool, out_bias: bool,
    packing: Packing | None = None,
) -> Cost:  # fmt: skip
    """Cost of a latent projection; `gains` is the number of trained vectors in each of its norms."""
    rank, nope, rope, v = widths
    own, dim, source = site.kv_source is None, after.dim, site.context_dim or after.dim
    q = after.q * (nope + rope)
    weights = dim * q_rank + q_rank * q if q_rank else dim * q
    weights += (source * (rank + rope) if own else 0) + rank * after.q * (nope + v) + after.out * after.out_width * dim
    extra = gains * ((rank if own else 0) + q_rank) + dim * out_bias
    extra += bias * ((q_rank or q) + (rank + rope if own else 0))
    pair = 2 * after.q * (2 * rank + rope)
    cached = Fraction(rank + rope if own else 0)
    packed = ((after.keep, cached, packing.bytes),) if packing is not None and own else ()
    return Cost(weights + extra, cached, 0, 2 * weights, pair, windows(after.keep, cached), packed=packed)
