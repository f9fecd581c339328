"""What is lost where a query reads its k highest keys alone: exactly, and bounds from few numbers.

P = softmax(s) over n keys, s_(1) ≥ … ≥ s_(n); P̂ is P on the k highest, made to add up to 1; τ is the mass left out.
TV(P, P̂) = τ = 1 - exp(-KL(P̂ ‖ P)), and o - ô = τ (μ_tail - μ_head), μ the P-weighted means of the values of both.
Hidden keys are -inf. Source: arXiv 2512.07647; the identities are derived anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, sqrt

import torch
from torch import Tensor

from manyheads.inspect.ablate import apart
from manyheads.inspect.look import CaptureError, Look, Tile

# --- of scores


def tail(scores: Tensor, k: int) -> Tensor:
    """τ `[…]` of scores `[…, n]`: 0 where k keys or fewer are visible."""
    _at_least_one(k)
    if k >= scores.shape[-1]:
        return torch.zeros_like(scores[..., 0])
    kept = scores.topk(k, -1).values.logsumexp(-1)
    return -torch.expm1((kept - scores.logsumexp(-1)).clamp_max(0))


def _at_least_one(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k}; a query keeps at least one key")


def gap_bound(scores: Tensor, k: int) -> Tensor:
    """τ ≤ (n - k) e^-Δ / (k + (n - k) e^-Δ), Δ = s_(k) - s_(k+1): equal where head and tail are constant."""
    return _bounded(scores, k, lambda head: head[..., -1:].expand_as(head))


def head_bound(scores: Tensor, k: int) -> Tensor:
    """τ ≤ (n - k) e^s_(k+1) / (Σ_head e^s + (n - k) e^s_(k+1)): the head exactly, the tail by its highest."""
    return _bounded(scores, k, lambda head: head)


def _bounded(scores: Tensor, k: int, of: Callable[[Tensor], Tensor]) -> Tensor:
    _at_least_one(k)
    n = (scores > -torch.inf).sum(-1)
    if k >= scores.shape[-1]:
        return torch.zeros_like(scores[..., 0])
    ordered = scores.topk(k + 1, -1).values
    rest = (n - k).clamp_min(0).to(scores).log() + ordered[..., k]
    rest = rest.masked_fill(n <= k, -torch.inf)
    return (rest - of(ordered[..., :k]).logsumexp(-1)).sigmoid()


def block_bound(head: Tensor, upper: Tensor, sizes: Tensor) -> Tensor:
    """τ ≤ Σ_b n_b e^U_b / (head + Σ_b n_b e^U_b): a tail in blocks of n_b keys whose scores are at most U_b.

    head `[…]`: the log-sum-exp of what is kept; upper `[…, b]`, sizes `[b]`.
    """
    return ((upper + sizes.to(upper).log()).logsumexp(-1) - head).sigmoid()


def value_bounds(weights: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """‖o - ô‖, and two bounds on it: τ · max‖v_head - v_tail‖, and √(τ/(1-τ)) · √tr Var_P(v), `[…]` each.

    weights `[…, n]` adding up to 1, values `[n, V]` or `[…, n, V]`.
    """
    _at_least_one(k)
    kept = torch.zeros_like(weights, dtype=torch.bool).scatter(
        -1, weights.topk(min(k, weights.shape[-1]), -1).indices, True
    )
    values = values.expand(*weights.shape, -1)
    o = (weights[..., None] * values).sum(-2)
    head = weights * kept
    tau = (weights * ~kept).sum(-1)
    short = (head[..., None] * values).sum(-2) / head.sum(-1, keepdim=True)
    far = torch.cdist(values, values).masked_fill(~(kept[..., :, None] & ~kept[..., None, :]), 0.0).amax((-1, -2))
    spread = (weights * (values - o[..., None, :]).square().sum(-1)).sum(-1)
    return (o - short).norm(dim=-1), tau * far, (tau / (1 - tau)).sqrt() * spread.sqrt()


def gaussian_tail(share: float, sigma: float) -> float:
    """τ where the top share of many keys is kept and scores are N(μ, σ²): Φ(Φ⁻¹(1 - share) - σ)."""
    _inside(share=share)
    return _phi(_quantile(1 - share) - sigma)


def gaussian_keys(epsilon: float, sigma: float) -> float:
    """The share of keys that leaves out a mass of ε, where scores are N(μ, σ²): 1 - Φ(σ + Φ⁻¹(ε))."""
    _inside(epsilon=epsilon)
    return 1 - _phi(sigma + _quantile(epsilon))


def _inside(**share: float) -> None:
    for name, value in share.items():
        if not 0 < value < 1:
            raise ValueError(f"{name}={value}; a share between 0 and 1")


def _phi(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


def _quantile(p: float) -> float:
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))


@dataclass(frozen=True, eq=False)
class Certified:
    """keys: the numbers of those that were scored. bound: on the mass τ of the others. scored: how many blocks of how
    many."""

    keys: Tensor
    bound: float
    scored: tuple[int, int]


def certified(q: Tensor, k: Tensor, scale: float, epsilon: float, block: int = 64) -> Certified:
    """The keys `[S, E]` that one query `[E]` has to read for a total variation of at most ε; the others stay unread.

    Blocks of keys have a centre c and a radius r; their scores are at most scale · (q·c + ‖q‖ r). Blocks are scored in
    the order of that bound, until the bound on all others (`block_bound`) is ε or less.
    """
    if epsilon < 0 or block < 1 or scale <= 0:
        raise ValueError(f"epsilon={epsilon}, block={block}, scale={scale}; ε ≥ 0, one key or more, a scale above 0")
    cuts = [slice(at, min(at + block, len(k))) for at in range(0, len(k), block)]
    centres = torch.stack([k[cut].mean(0) for cut in cuts])
    radii = torch.stack([(k[cut] - centre).norm(dim=-1).amax() for cut, centre in zip(cuts, centres, strict=True)])
    upper = scale * (centres @ q + q.norm() * radii)
    sizes = torch.tensor([cut.stop - cut.start for cut in cuts])
    order, head = upper.argsort(descending=True), q.new_full((), -torch.inf)
    for done, at in enumerate(order.tolist(), 1):
        head = torch.logaddexp(head, (scale * (k[cuts[at]] @ q)).logsumexp(0))
        left = order[done:]
        bound = float(block_bound(head, upper[left], sizes[left])) if len(left) else 0.0
        if bound <= epsilon:
            break
    kept = torch.cat([torch.arange(cuts[at].start, cuts[at].stop) for at in sorted(order[:done].tolist())])
    return Certified(kept, bound, (done, len(cuts)))


# --- of a look


def tail_mass(look: Look, k: int = 16) -> Tensor:
    """τ_k = 1 - the mass of a query's k highest keys, in [0, 1]."""
    _at_least_one(k)
    return torch.cat([(1 - _top(tile, k).sum(-1)).clamp_min(0) for tile in look.weights()], 2)


def _top(tile: Tile, k: int) -> Tensor:
    return tile.weights.topk(min(k, tile.weights.shape[-1]), -1).values


def keys_needed(look: Look, epsilon: float = 0.1) -> Tensor:
    """k_ε: how many keys leave out a mass of ε at most, `[B, H, T]`, 1 to n_t."""
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon={epsilon}; a mass of 0 or more, below 1")
    rows = []
    for tile in look.weights():
        summed = tile.weights.sort(-1, descending=True).values.cumsum(-1)
        rows.append(((summed < 1 - epsilon - 1e-6).sum(-1) + 1).minimum(tile.visible.sum(-1)).to(summed.dtype))
    return torch.cat(rows, 2)


def score_spread(look: Look) -> Tensor:
    """σ of a query's scores over the keys that it sees; with `gaussian_keys` it predicts k_ε."""
    return torch.cat([_moments(tile.scores, tile.visible)[1].sqrt() for tile in look.tiles()], 2)


def _moments(scores: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over the last dimension, of what is meant."""
    n = some.sum(-1).clamp_min(1)
    mean = scores.masked_fill(~some, 0.0).sum(-1) / n
    return mean, (scores - mean[..., None]).masked_fill(~some, 0.0).square().sum(-1) / n


def truncation_error(look: Look, k: int = 16) -> Tensor:
    """‖o - ô‖ / ‖o‖ `[B, H, T]` of heads that read their k highest keys alone."""
    _at_least_one(k)
    call = apart(look.call)
    if look.read.shape[:3] != call.q.shape[:3] or not look.fused:
        raise CaptureError(f"{look.name}: its weights are no softmax of scores alone, so none can be left out")
    rows = []
    for tile in look.weights():
        kept = torch.zeros_like(tile.weights).scatter(
            -1, tile.weights.topk(min(k, tile.weights.shape[-1]), -1).indices, 1.0
        )
        head = tile.weights * kept
        short = head @ call.v / head.sum(-1, keepdim=True).clamp_min(1e-30)
        o = tile.weights @ call.v
        rows.append((o - short).norm(dim=-1) / o.norm(dim=-1))
    return torch.cat(rows, 2)


def tails(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """The curve τ(k) `[…, K]` at several k."""
    return torch.stack([tail(scores, k) for k in counts], -1)
