"""An attention-free transformer's heads: every channel weighs the tokens by itself."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.convolution import lag_state, lagged
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.kernel import Plan
from manyheads.core.mask import Axis, Mask, causal, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Recurrence, Scan, Site
from manyheads.core.registry import register
from manyheads.core.scan import Stream
from manyheads.core.selective import CHUNK, Mean, lowest, running_mean

ROWS = 32
"""Rows up to which the pairs of rows are explicit for each channel, where there is a bias for each pair."""


@register
@dataclass(frozen=True)
class AFT(Recurrence):
    """o_t = σ(q_t) ∘ Σ_{s≤t} e^{k_s + w_ts} ∘ v_s / Σ_{s≤t} e^{k_s + w_ts}, for each channel: no products of q and k.

    simple: w = 0, a running mean (state: 2·G·d numbers). conv: w_ts = w_h(t-s) of each key head within `window` tokens,
    else 0 (state: the same of the tokens beyond it, and the rows within). full: w_ts = a_t·b_s, learned factors
    `[context, rank]`; local: the same within `window` tokens, else 0. These two keep all keys and values, and serve no
    sequence longer than `context`. Maxima are taken off before any exponential.

    Options: form. window. context, rank: of full and local.

    Choices: the sum is over keys as wide as values, so projections that make others are refused. A query has no scale.

    Source: Zhai et al. 2021, arXiv 2105.14103.
    """

    name: ClassVar[str] = "aft"
    paper: ClassVar[str] = "arXiv 2105.14103"
    examples: ClassVar = (
        {}, {"form": "conv", "window": 3}, {"form": "full", "context": 32, "rank": 5},
        {"form": "local", "window": 4, "context": 32, "rank": 5},
    )  # fmt: skip

    form: Literal["simple", "conv", "local", "full"] = "simple"
    window: int = 32
    context: int = 1024
    rank: int = 128

    @property
    def pairs(self) -> bool:
        """Whether there is a bias for each two positions, so that all rows are kept."""
        return self.form in ("local", "full")

    def layout(self, heads: Heads, site: Site) -> Heads:
        if heads.qk_width != heads.v_width:
            raise OptionError(
                f"aft: keys of {heads.qk_width} channels weigh values of {heads.v_width}; they have to be as wide"
            )
        if min(self.window, self.context, self.rank) < 1:
            raise OptionError(f"aft: window={self.window}, context={self.context}, rank={self.rank}; at least 1")
        if self.pairs and site.max_len is not None and site.max_len > self.context:
            raise OptionError(
                f"aft(form={self.form}): context={self.context} is shorter than the {site.max_len} tokens that this "
                "layer is to serve; give more, or form=simple or conv, which have no length"
            )
        return heads._replace(scale=1.0, keep=heads.keep if self.pairs else 0)

    def build(self, before: Heads, after: Heads, site: Site) -> Scan:
        if self.pairs:
            return PairScan(self)
        return ConvScan(self, before) if self.form == "conv" else MeanScan(before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        channels = before.kv * before.v_width
        if self.pairs:
            return Cost(2 * self.context * self.rank, pair_flops=4 * channels + 2 * self.rank)
        if self.form == "simple":
            return Cost(state_floats=2 * channels, token_flops=4 * channels)
        rows = self.window * (2 * channels + 1)
        return Cost(self.window * before.kv, Fraction(0), 2 * channels + rows, 4 * (self.window + 1) * channels)


class MeanScan(Scan):
    work, chunk = "steps", CHUNK

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.states = {"scan": State((2, heads.kv, heads.v_width))}

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        mean, flow.new_state["scan"] = running_mean(k, v, Stream.of(flow))
        return _gated(q, mean)


class ConvScan(Scan):
    work, chunk = "steps", CHUNK

    def __init__(self, options: AFT, heads: Heads) -> None:
        super().__init__()
        self.window = options.window
        self.bias = nn.Parameter(torch.zeros(self.window, 1, heads.kv, 1, 1))
        self.states = {"scan": State((2, heads.kv, heads.v_width))}
        self.states |= lag_state("aft.rows", heads.kv, 2 * heads.v_width, self.window)
        self.states |= lag_state("aft.seen", 1, 1, self.window)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        stream = Stream.of(flow)
        rows = stream.tokens(torch.cat([k, v], -1).to(torch.promote_types(v.dtype, torch.float32)))
        lags = (lagged(t, flow.new, flow, name, self.window) for t, name in (
            (rows, "aft.rows"), (stream.tokens(torch.ones_like(rows[:, :1, :, :1])), "aft.seen")))  # fmt: skip
        rows, seen = (torch.stack(each) for each in lags)
        k, v = rows.chunk(2, -1)
        k = k.where(seen > 0, -torch.inf)
        far, flow.new_state["scan"] = running_mean(k[-1], v[-1], stream)
        return _gated(q, Mean.of(k[:-1] + self.bias, v[:-1], 0).join(far))


class PairScan(Scan):
    def __init__(self, options: AFT) -> None:
        super().__init__()
        self.context, self.window = options.context, options.window if options.form == "local" else None
        self.a, self.b = (nn.Parameter(0.01 * torch.randn(options.context, options.rank)) for _ in range(2))

    def scan(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow) -> Tensor:
        assert flow.rows is not None
        k, v = (x.to(torch.promote_types(v.dtype, torch.float32)) for x in (k, v))
        return _gated(q, _means(self._bias(flow.q, flow.rows.axis).to(k.dtype), k, v))

    def _bias(self, q: Axis, k: Axis) -> Tensor:
        """w `[B or 1, T, S]`, -inf where a token does not count."""
        for axis in (q, k):
            self._check(axis)
        bias = self.a[q.position] @ self.b[k.position].transpose(1, 2)
        if self.window is not None:
            far = rows_of(q.time) - cols_of(k.time) >= self.window
            bias = bias.masked_fill(far[:, 0], 0.0)
        return bias.masked_fill(~Mask(q, k, (causal,)).tile()[:, 0], -torch.inf)

    def _check(self, axis: Axis) -> None:
        if axis.given_position is None and axis.start is not None:
            last = axis.start + axis.length
        elif torch.compiler.is_compiling():
            return
        else:
            last = int(axis.position.max()) + 1
        if last > self.context:
            raise ValueError(f"aft: a token at position {last - 1}; its biases are of context={self.context} positions")

    def plan(self, queries: int, like: Tensor) -> Plan:
        return Plan("scan", "a mean for each channel over all rows, by halves", (("sdpa", "there are no scores"),))


def _means(bias: Tensor, k: Tensor, v: Tensor) -> Mean:
    """Over bias `[B or 1, t, S]`, k and v `[B, G, S, V]`, whose last t keys are the rows' own: by halves."""
    t, old = bias.shape[1], bias.shape[2] - bias.shape[1]
    if old:
        own = _means(bias[..., old:], k[:, :, old:], v[:, :, old:])
        return own.join(_earlier(bias[..., :old], k[:, :, :old], v[:, :, :old]))
    if t <= ROWS:
        return Mean.of(bias[:, None, ..., None] + k[:, :, None], v[:, :, None], 3)
    half = t // 2
    halves = _means(bias[:, :half, :half], k[:, :, :half], v[:, :, :half]), _means(bias[:, half:], k, v)
    return Mean(*(torch.cat(each, 2) for each in zip(*halves, strict=True)))


def _earlier(bias: Tensor, k: Tensor, v: Tensor) -> Mean:
    """Over keys before all of the rows: those that count at all are of one document, and count for all rows of it.

    The weights are products, of a matrix of pairs and one of channels.
    """
    counts = (bias > -torch.inf).any(1)[:, None, :, None]
    k = k.where(counts, -torch.inf)
    row, column = (x.detach().amax(2, keepdim=True).clamp_min(lowest(k.dtype) / 2) for x in (bias, k))
    pairs, channels = (bias - row).exp()[:, None], (k - column).exp()
    return Mean.over(pairs @ (channels * v), pairs @ channels, row[:, None] + column)


def _gated(q: Tensor, mean: Mean) -> Tensor:
    """σ(q) ∘ the means of key heads, each read by H/G query heads."""
    return torch.sigmoid(q) * mean.value.repeat_interleave(q.shape[1] // mean.value.shape[1], 1).to(q.dtype)
