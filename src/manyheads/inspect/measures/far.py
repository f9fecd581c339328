"""Whether a query needs keys that are far away: decided by what it sees, and by two moments of what it does not.

Near keys 𝓛 are the first few tokens and those of a window; all others are far, 𝓑. ρ = Σ_𝓛 e^z / Σ e^z is the near
share. A head is local for a query where ρ ≥ τ. Source: Donhauser et al. 2025 (QAdA), arXiv 2502.09647. (Whether the
moments are those of far keys or of keys kept from before is not public: far ones, of the text itself.)
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from manyheads.core.mask import Axis
from manyheads.core.moments import KeyMoments, predicted_lse
from manyheads.inspect.look import Look
from manyheads.inspect.measures.maps import Behind, First


class Near:
    """The rule of the first tokens of a sequence and those of a window that ends with the query."""

    def __init__(self, axis: Axis, first: int = 4, window: int = 128) -> None:
        if first < 0 or window < 1:
            raise ValueError(f"first={first}, window={window}; no token or more, one key or more")
        self.first, self.behind = First(axis, first) if first else None, Behind(-inf, window - 1)

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        near = self.behind(q, k)
        return near if self.first is None else near | self.first(q, k)


def near_share(look: Look, first: int = 4, window: int = 128) -> Tensor:
    """ρ `[B, H, T]`; the error of reading near keys alone is exactly 1 - ρ, in total variation."""
    return look.mass(Near(look.mask.k, first, window))


def local(look: Look, least: float = 0.6, first: int = 4, window: int = 128) -> Tensor:
    """1 where ρ ≥ τ, else 0, of queries that see a far key: the mean is a head's share of local decisions, 1 for a head
    that is always local, 0 for one that never is."""
    return _decided(look, least, first, window, near_share(look, first, window))


def _decided(look: Look, least: float, first: int, window: int, share: Tensor) -> Tensor:
    if not 0 <= least <= 1:
        raise ValueError(f"least={least}; a share is 0 to 1")
    near = Near(look.mask.k, first, window)
    far = look.exists(lambda q, k: ~near(q, k))
    return (share >= least).to(share.dtype).masked_fill(~far, torch.nan)


def predicted_share(look: Look, first: int = 4, window: int = 128) -> Tensor:
    """ρ where the far mass is that of Gaussian scores: log n_b + μᵀq/√d + qᵀΣq/2d, μ and Σ of the far keys `[B, H, T]`.

    (μᵀq/√d and qᵀΣq/d are the mean and the variance of the far scores, from which they are computed here; `KeyMoments`
    keeps μ and Σ, so that a decision needs no far key.) 1 where nothing is far.
    """
    near, found = Near(look.mask.k, first, window), []
    for tile in look.tiles():
        within = near(look.axis[tile.rows], look.mask.k)
        far = tile.visible & ~within
        there = predicted_lse(tile.scores, far)
        here = tile.scores.masked_fill(~(tile.visible & within), -torch.inf).logsumexp(-1)
        found.append((here - there).sigmoid())
    return torch.cat(found, 2)


def predicted_local(look: Look, least: float = 0.6, first: int = 4, window: int = 128) -> Tensor:
    """`local` as QAdA decides it."""
    return _decided(look, least, first, window, predicted_share(look, first, window))


def agreement(least: float = 0.6, first: int = 4, window: int = 128) -> Callable[[Look], Tensor]:
    """A measure: 1 where QAdA decides as the oracle does, else 0."""

    def agrees(look: Look) -> Tensor:
        one, two = local(look, least, first, window), predicted_local(look, least, first, window)
        return (one == two).to(one.dtype).masked_fill(one.isnan(), torch.nan)

    return agrees


__all__ = ["KeyMoments", "Near", "agreement", "local", "near_share", "predicted_local", "predicted_share"]
