"""Measures of where heads look. A function takes a `Look` and returns `[B, H, T]` (`[B, H, T, K]` where it says so).

A is a head's weights, ℓ_t the log-sum-exp of query t's scores over the n_t keys it sees. Masses of key sets and moments
take fused passes wherever weights are a plain softmax; other layers are read in tiles of rows. Source of the
definitions: Clark et al. 2019 (arXiv 1906.04341) and Vig 2019 (arXiv 1906.05714), unless a function names another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from manyheads.core.mask import Axis, Rule, cols_of, rows_of
from manyheads.inspect.look import Look


class Behind:
    """The rule of keys that stand from `first` to `last` tokens before the query."""

    def __init__(self, first: float, last: float | None = None) -> None:
        self.first, self.last = first, first if last is None else last

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        behind = rows_of(q.time) - cols_of(k.time)
        return (behind >= self.first) & (behind <= self.last)


class First:
    """The rule of the first `count` tokens of each sequence, padding left out."""

    def __init__(self, axis: Axis, count: int) -> None:
        valid = axis.validity
        self.times = torch.where(valid & (valid.long().cumsum(-1) <= count), axis.time, -1)
        self.highest = self.times.amax(-1)

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        return cols_of(k.time <= self.highest[:, None])


def entropy(look: Look, normalised: bool = False) -> Tensor:
    """-Σ_s A_ts ln A_ts, in nats: 0 for a query that looks at one key, ln n_t for one that looks at all alike.

    = ℓ_t - (scale · q_t · Σ_s A_ts k_s): one fused pass with keys as values. normalised: over ln n_t, in [0, 1].
    """
    call = look.call
    if look.fused and call.bias is None and call.level is None and call.softcap is None:
        keys = look.again(replace(call, v=call.k)).o
        found = look.lse - call.scale * (call.q * keys).sum(-1)
        found = found.clamp_min(0)
    else:
        rows = [torch.special.entr(shares(tile.weights)).sum(-1) for tile in look.weights()]
        found = torch.cat(rows, 2)
    return found / look.visible.clamp_min(2).log() if normalised else found


def shares(weights: Tensor) -> Tensor:
    """Of maps that are signed or do not sum to 1, |A| / Σ|A|."""
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)


def confidence(look: Look) -> Tensor:
    """max_s A_ts in (0, 1]: how sure of one key a query is. Source: Voita et al. 2019, arXiv 1905.09418."""
    return torch.cat([tile.weights.amax(-1) for tile in look.weights()], 2)


def distance(look: Look) -> Tensor:
    """Σ_s A_ts (t - s), in tokens: how far back a query looks in the mean (negative: ahead, in an encoder)."""
    return _distances(look)[0]


def distance_spread(look: Look) -> Tensor:
    """√(Σ_s A_ts (t - s)² - (Σ_s A_ts (t - s))²), in tokens."""
    first, second = _distances(look)
    return (second - first * first).clamp_min(0).sqrt()


def _distances(look: Look) -> tuple[Tensor, Tensor]:
    """Σ_s A_ts (t - s) and Σ_s A_ts (t - s)², from moments of times about the middle."""
    k, q = look.mask.k.time.double(), look.axis.time.double()
    middle, size = k.mean(-1, keepdim=True), max(1, k.shape[-1])
    places = (k - middle) / size
    values = torch.stack([torch.ones_like(k), places, places**2], -1)[:, None]
    mass, one, two = look.moment(values).unbind(-1)  # in float64: squares of far times cancel
    at = (q - middle)[:, None]
    return at * mass - one * size, at * at * mass - 2 * at * one * size + two * size * size


def distance_profile(look: Look, edges: Sequence[int] = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)) -> Tensor:
    """`[B, H, T, K]`: the mass at distances edges[i] ≤ t - s < edges[i + 1], the last bucket without an end.

    Zero, and not undefined, where no key stands at such a distance, so that buckets add up to 1 in a causal layer.
    """
    ends = [*edges[1:], float("inf")]
    each = [look.mass(Behind(first, last - 1)).nan_to_num(0.0) for first, last in zip(edges, ends, strict=True)]
    return torch.stack(each, -1)


def local_mass(look: Look, window: int = 32) -> Tensor:
    """Σ A_ts over t - window < s ≤ t, in [0, 1]."""
    return look.mass(Behind(0, window - 1))


def self_mass(look: Look) -> Tensor:
    """A_tt, in [0, 1]."""
    return look.mass(Behind(0))


def previous_token(look: Look) -> Tensor:
    """A_t,t-1, in [0, 1]; undefined for the first token."""
    return look.mass(Behind(1))


def sink_mass(look: Look, first: int = 1) -> Tensor:
    """Σ A_ts over a sequence's first tokens, in [0, 1]; padding is no first token.

    Source: Xiao et al. 2023, arXiv 2309.17453; Gu et al. 2024, arXiv 2410.10781.
    """
    return look.mass(First(look.mask.k, first))


def position_bias(look: Look) -> Tensor:
    """R² of a head's weights on their mean at each offset t - s, in [0, 1]: 1 for a head that distance alone decides.

    Over the pairs that are visible, of each sequence: (Σ_Δ n_Δ Ā_Δ² - n Ā²) / (Σ A² - n Ā²). Undefined where all
    weights are equal. The same for all queries of a sequence.
    """
    q, k = look.axis, look.mask.k
    batch, heads, length = look.read.shape[:3]
    reach = q.length + k.length
    sums = torch.zeros(batch, heads, 2 * reach, dtype=torch.float64, device=look.read.device)
    counts, squares = sums.clone(), sums[..., 0].clone()
    for tile in look.weights():
        seen = tile.visible.expand_as(tile.weights) & q.validity[:, None, tile.rows, None]
        offset = (rows_of(q.time[:, tile.rows]) - cols_of(k.time) + reach).expand_as(tile.weights)
        weights = tile.weights.double() * seen
        sums.scatter_add_(2, offset.flatten(2), weights.flatten(2))
        counts.scatter_add_(2, offset.flatten(2), seen.double().flatten(2))
        squares += weights.square().sum((2, 3))
    whole, n = sums.sum(-1), counts.sum(-1)
    even = whole.square() / n.clamp_min(1)
    explained = (sums.square() / counts.clamp_min(1)).sum(-1) - even
    total = squares - even
    found = torch.where(total > 1e-12 * squares, explained / total, torch.nan)
    return found[..., None].expand(batch, heads, length)


def output_size(look: Look) -> Tensor:
    """‖W_O[h] o_t‖: how much a head adds to the stream. Source: Kobayashi et al. 2020, arXiv 2004.10102."""
    return torch.stack([c.norm(dim=-1) for _, c in look.contributions()], 1)


output_size.needs_weights = False  # type: ignore[attr-defined]


def masses(rules: Sequence[Rule]) -> Callable[[Look], Tensor]:
    """A measure `[B, H, T, K]` of the mass on each of K key sets of your own."""

    def mass(look: Look) -> Tensor:
        return torch.stack([look.mass(rule) for rule in rules], -1)

    return mass
