"""CAFace: tokens are assigned to learned centres, means of each are fused; sets of any size come in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Options, Pooled, Streamed, counted, register_aggregator
from manyheads.aggregate.block import Block, Gating
from manyheads.core.check import check_whole


@register_aggregator("caface")
@dataclass(frozen=True)
class CAFace(Options):
    """A = softmax over centres m of W_q LN(g_m) · W_k LN(X_n) / sqrt S; F_m, Z_m = means of v_n, LN(X_n) under A;
    out = Σ_m conf_m ∘ F_m, conf = softmax_m of a gated mixer over the rows [g_m; Z_m].

    Tokens f `[B, N, D]`, v = f/(|f| + 1e-5). The style s `[B, N, dim]` of a token is the sinusoid of its norm and,
    where `style` is set, what comes with it as `cond` `[B, N, style]`. X = self-attention blocks over [s; g]; what
    comes out at centres is left, so that they mean the same in every set. Centres g `[M, S]`, orthogonal at first,
    S = dim. Out `[B, 1, D]`, weights `[B, 1, 1, N]` where a confidence is a number. With `blocks=0` a set may be cut
    into blocks at will (`exact`); otherwise a block is what looks at itself, and only the order of blocks is free.

    Args:
        centres: M. dim: S. style: width of what `cond` brings (at most dim; the published 64 of 128 are statistics of
            two feature maps). blocks, heads: of the self-attention. channels: a confidence for each channel of D.
        clip: means are over max(Σ_n A, 1), as published, which makes them smaller where a block is small.

    Source: Kim et al., Cluster and Aggregate (NeurIPS 2022). ASSUMED of the mixer: one gated layer along centres.
    """

    takes = frozenset({"cond"})
    centres: int = 4
    dim: int = 128
    style: int = 0
    blocks: int = 2
    heads: int = 8
    channels: bool = False
    clip: bool = False

    def __post_init__(self) -> None:
        check_whole(centres=self.centres, dim=self.dim, heads=self.heads)
        check_whole(0, blocks=self.blocks, style=self.style)
        sines = self.dim - self.style
        self.ask(sines >= 0 and sines % 2 == 0, f"style={self.style} leaves {sines} of dim={self.dim}; an even number")
        self.ask(self.dim % self.heads == 0, f"heads={self.heads} do not divide dim={self.dim}")

    def build(self, width: int) -> CAFacePool:
        return CAFacePool(self, width)

    @classmethod
    def examples(cls) -> tuple[CAFace, ...]:
        return (
            cls(centres=3, dim=8, blocks=0, heads=1, channels=True),
            cls(centres=2, dim=4, blocks=1, heads=2, clip=True),
        )


class Clusters(NamedTuple):
    """Of each centre: how much was assigned to it `[B, M]`, mean of features `[B, M, D]` and of styles `[B, M, S]`."""

    mass: Tensor
    features: Tensor
    styles: Tensor


class CAFacePool(Streamed):
    options: CAFace

    def __init__(self, options: CAFace, width: int) -> None:
        super().__init__(options, width)
        dim = options.dim
        self.centres = nn.Parameter(nn.init.orthogonal_(torch.empty(options.centres, dim)))
        self.blocks = nn.ModuleList([Block(dim, options.heads) for _ in range(options.blocks)])
        self.q_norm, self.k_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.enter = nn.Sequential(nn.LayerNorm(2 * dim), nn.Linear(2 * dim, 4 * dim), nn.GELU())
        self.gate = Gating(4 * dim, options.centres, 1)
        self.leave = nn.Linear(2 * dim, 2 * dim)
        self.confidence = nn.Sequential(nn.LayerNorm(2 * dim), nn.Linear(2 * dim, width if options.channels else 1))

    @property
    def exact(self) -> bool:
        return not self.options.blocks and not self.options.clip

    def init(self, rows: int, like: Tensor | None = None) -> Clusters:
        like, centres, dim = self.centres if like is None else like, self.options.centres, self.options.dim
        return Clusters(*(like.new_zeros(rows, centres, *each) for each in ((), (self.width,), (dim,))))

    def update(
        self, state: Clusters, x: Tensor, mask: Tensor | None = None, *, size: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Clusters:  # fmt: skip
        x, mask, size = self.cleaned(x, mask, size)
        return self.merge(state, self.observe(x, mask, size, cond)) if x.shape[1] else state

    def observe(
        self, x: Tensor, mask: Tensor, size: Tensor | None = None, cond: Tensor | None = None
    ) -> Clusters:  # fmt: skip
        return self._assigned(x, mask, size, cond)[1]

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        share, state = self._assigned(x, mask, size, cond)
        confidence = self.confidences(state)
        out = (confidence * state.features).sum(1, keepdim=True)
        weights = None if self.options.channels else (confidence * share / self._over(state.mass)).sum(1)[:, None, None]
        return Pooled(out, weights)

    def assigned(self, x: Tensor, mask: Tensor | None = None, *, cond: Tensor | None = None) -> Tensor:
        """A `[B, M, N]`: how much of each token goes to each centre; 0 on padding."""
        x, mask, size = self.cleaned(x, mask, None)
        return self._assigned(x, mask, size, cond)[0]

    def _assigned(
        self, x: Tensor, mask: Tensor, size: Tensor | None, cond: Tensor | None
    ) -> tuple[Tensor, Clusters]:  # fmt: skip
        norm = x.norm(dim=-1, keepdim=True)
        looks = self._styles(norm, mask, cond)
        for block in self.blocks:
            ours = (len(x), self.options.centres)
            both = torch.cat([looks, self.centres.expand(len(x), -1, -1)], 1)
            seen = torch.cat([mask, mask.new_ones(ours)], 1)
            sizes = None if size is None else torch.cat([size, size.new_ones(ours)], 1)
            looks = block(both, seen, sizes)[:, : x.shape[1]]
        keys = self.k_norm(looks)
        scores = self.q_proj(self.q_norm(self.centres)) @ self.k_proj(keys).mT / math.sqrt(self.options.dim)
        share = scores.softmax(1) * counted(mask, size, x.dtype)[:, None]
        mass = share.sum(-1)
        over = self._over(mass)
        return share, Clusters(mass, share @ (x / (norm + 1e-5)) / over, share @ keys / over)

    def _over(self, mass: Tensor) -> Tensor:
        """What sums are divided by; the divisor passes no gradient."""
        return mass.detach().clamp(min=1.0 if self.options.clip else 1e-6)[..., None]

    def _styles(self, norm: Tensor, mask: Tensor, cond: Tensor | None) -> Tensor:
        style, half = self.options.style, (self.options.dim - self.options.style) // 2
        given = None if cond is None else list(cond.shape)
        if given != ([*mask.shape, style] if style else None):
            wanted = f"[{len(mask)}, {mask.shape[1]}, {style}]" if style else "nothing"
            raise ValueError(f"caface: style={style} takes {wanted} as cond, not {given}")
        rates = 10000.0 ** (-torch.arange(half, device=norm.device, dtype=norm.dtype) / max(half, 1))
        parts = [(norm * rates).sin(), (norm * rates).cos()]
        return torch.cat(parts if cond is None else [torch.where(mask[..., None], cond, 0.0), *parts], -1)

    def merge(self, a: Clusters, b: Clusters) -> Clusters:
        mass = a.mass + b.mass
        shares = [(each.mass / mass.clamp(min=1e-6))[..., None] for each in (a, b)]
        return Clusters(
            mass,
            shares[0] * a.features + shares[1] * b.features,
            shares[0] * a.styles + shares[1] * b.styles,
        )

    def confidences(self, state: Clusters) -> Tensor:
        """`[B, M, 1 or D]`, 1 in sum over centres."""
        rows = torch.cat([self.centres.expand(len(state.mass), -1, -1), state.styles], -1)
        return self.confidence(rows + self.leave(self.gate(self.enter(rows)))).softmax(1)

    def finalize(self, state: Clusters) -> Pooled:
        out = (self.confidences(state) * state.features).sum(1, keepdim=True)
        return Pooled(torch.where(state.mass.sum(-1)[:, None, None] > 0, out, 0.0))
