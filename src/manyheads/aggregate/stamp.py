"""STAMP: pooling by several queries a head, and the adapter in front of it that mixes over time and channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import (
    Aggregator,
    Options,
    Pooled,
    attend,
    build,
    register_aggregator,
    size_bias,
)
from manyheads.aggregate.block import Gating, split
from manyheads.core.check import check_share, check_whole, is_number


@register_aggregator("stamp")
@dataclass(frozen=True)
class STAMP(Options):
    """Multi-head attention pooling: A heads with K learned queries each; values are the keys.

    P_a = x W_a `[N, d]`, d = D/A, no bias; w_ak = softmax_n(P_a q_ak / sqrt d); o_ak = Σ_n w_akn P_a,n; o_a of the K by
    `combine`; z = W_o [o_1; …; o_A] + b + λ mean_n x. Out `[B, 1, D]`, weights `[B, A·K, 1, N]`, head by head.

    Args:
        heads, queries: A, K. residual: λ (the published text has (1 - λ) mean, its program λ mean: this one).
        combine: how K results become one. `mean`: what the published default, softmax over k of Σ_n w_akn, comes to,
            since that sum is 1 for every query. `strength`: softmax_k of logsumexp_n of the scores, which tells queries
            apart as was meant (ASSUMED). `max`: the query of greatest strength. `learned`: softmax_k of an MLP (hidden
            D, GELU, ASSUMED) of the mean token. `concat`: all of them, into W_o.

    Source: STAMP (arXiv 2511.10848).
    """

    heads: int = 4
    queries: int = 8
    combine: Literal["mean", "strength", "max", "learned", "concat"] = "mean"
    residual: float = 0.1

    def __post_init__(self) -> None:
        check_whole(heads=self.heads, queries=self.queries)
        self.ask(is_number(self.residual), f"residual={self.residual} is no finite number")

    def build(self, width: int) -> STAMPPool:
        self.ask(width % self.heads == 0, f"heads={self.heads} do not divide a width of {width}")
        return STAMPPool(self, width)

    @classmethod
    def examples(cls) -> tuple[STAMP, ...]:
        return tuple(cls(2, 3, combine) for combine in ("strength", "max", "learned", "concat"))  # type: ignore[arg-type]


class STAMPPool(Aggregator):
    options: STAMP

    def __init__(self, options: STAMP, width: int) -> None:
        super().__init__(options, width)
        heads, queries = options.heads, options.queries
        self.key = nn.Linear(width, width, bias=False)
        first = 0.02 * torch.randn(heads, 1, width // heads)
        apart = torch.randn(heads, queries, width // heads) * (torch.arange(queries) > 0)[:, None]
        self.query = nn.Parameter(first + 0.1 * apart)
        self.out = nn.Linear(width * (queries if options.combine == "concat" else 1), width)
        self.choice = None
        if options.combine == "learned":
            self.choice = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, heads * queries))

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        keys = split(self.key(x), self.options.heads)
        found, weights = attend(self.query.expand(len(x), -1, -1, -1), keys, keys, mask, size)  # [B, A, K, d]
        bias = size_bias(mask, size, x.dtype)
        mean = (bias.softmax(-1)[:, None] @ x)[:, 0]
        combined = self._combined(found, keys, bias, mean)
        out = self.out(combined.flatten(1)) + self.options.residual * mean
        return Pooled(out[:, None], weights.flatten(1, 2)[:, :, None])

    def _combined(self, found: Tensor, keys: Tensor, bias: Tensor, mean: Tensor) -> Tensor:
        how = self.options.combine
        if how == "mean":
            return found.mean(2)
        if how == "concat":
            return found
        if self.choice is not None:
            return (self.choice(mean).unflatten(-1, found.shape[1:3]).softmax(-1)[:, :, None] @ found)[:, :, 0]
        scores = self.query @ keys.mT / self.query.shape[-1] ** 0.5 + bias[:, None, None]
        strength = scores.logsumexp(-1)[:, :, None]
        if how == "max":
            best = strength == strength.amax(-1, keepdim=True)
            strength = torch.zeros_like(strength).masked_fill(~best, -torch.inf)
        return (strength.softmax(-1) @ found)[:, :, 0]


class CrissCross(nn.Module):
    """x + W_o [gate_T(u); gate_S(u)], u = GELU(W LN(x)): a gated MLP that mixes along time and along channels.

    x `[B, T, S, D]`. Its first state is one function of each position alone.
    """

    def __init__(self, width: int, times: int, channels: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU())
        self.gates = nn.ModuleList([Gating(hidden, times, 1), Gating(hidden, channels, 2)])
        self.leave = nn.Sequential(nn.Linear(hidden, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        u = self.enter(x)
        return x + self.leave(torch.cat([gate(u) for gate in self.gates], -1))


class STAMPAdapter(nn.Module):
    """Frozen embeddings of a grid of patches, `[B, T, S, width]`, to `Pooled` `[B, 1, dim]`.

    Instance norm over the tokens of a row, dropout, linear to `dim`, plus learned embeddings of the token, its time and
    its channel; `layers` of `CrissCross`; an aggregator. A classifier is one linear layer more.

    Args:
        times, channels: T and S. hidden: of the gated MLP. dropout: in front of the linear layer.
            inner: within the blocks (ASSUMED none). pool: the line of any aggregator.

    Source: STAMP (arXiv 2511.10848).
    """

    def __init__(
        self, width: int, times: int, channels: int, *, dim: int = 128, layers: int = 8, hidden: int = 256,
        dropout: float = 0.3, inner: float = 0.0, pool: str | Options = "stamp",
    ) -> None:  # fmt: skip
        super().__init__()
        check_whole(width=width, times=times, channels=channels, dim=dim, hidden=hidden)
        check_whole(0, layers=layers)
        check_share(dropout=dropout, inner=inner)
        if hidden % 2:
            raise ValueError(f"hidden={hidden} is halved by the gates; an even number")
        self.times, self.channels = times, channels
        self.enter = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, dim))
        self.token = nn.Parameter(0.02 * torch.randn(times, channels, dim))
        self.time, self.channel = (
            nn.Parameter(0.02 * torch.randn(*shape, dim)) for shape in ((times, 1), (1, channels))
        )
        self.blocks = nn.Sequential(*(CrissCross(dim, times, channels, hidden, inner) for _ in range(layers)))
        self.pool = build(pool, dim)

    def forward(self, x: Tensor) -> Pooled:
        if x.dim() != 4 or x.shape[1:3] != (self.times, self.channels):
            raise ValueError(f"STAMP: x is [rows, {self.times}, {self.channels}, width], not {list(x.shape)}")
        std, mean = torch.std_mean(x, (1, 2), correction=0, keepdim=True)
        x = self.enter((x - mean) / (std**2 + 1e-5).sqrt()) + self.token + self.time + self.channel
        return self.pool(self.blocks(x).flatten(1, 2))
