"""Two moments of keys, and the softmax mass that they predict.

Source: Donhauser et al. 2025 (QAdA), arXiv 2502.09647.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor


def gaussian_lse(n: Tensor | float, mean: Tensor, variance: Tensor) -> Tensor:
    """The log-sum-exp of n scores if they are Gaussian, log n + mean + variance / 2; -inf where n = 0."""
    return torch.as_tensor(n, dtype=mean.dtype, device=mean.device).log() + mean + variance / 2


def predicted_lse(scores: Tensor, far: Tensor) -> Tensor:
    """What the moments of the `far` scores among `[..., S]` predict for their log-sum-exp, `[...]`."""
    n, kept = far.sum(-1), scores.masked_fill(~far, 0.0)
    mean = kept.sum(-1) / n.clamp_min(1)
    spread = (kept - mean[..., None]).masked_fill(~far, 0.0).square().sum(-1) / n.clamp_min(1)
    return gaussian_lse(n, mean, spread)


def enough(near: Tensor, far: Tensor, least: float) -> Tensor:
    """Whether the share of e^near in e^near + e^far is `least` or more, bool; 0: always, 1: never."""
    if not 0 < least < 1:
        return torch.full_like(near, least == 0, dtype=torch.bool)
    gap = near - far
    return gap.masked_fill(far == -inf, inf) >= log(least / (1 - least))


@dataclass
class KeyMoments:
    """Count n `[...]`, mean `[..., G, E]` and covariance `[..., G, E, E]` (or its diagonal, `[..., G, E]`) of keys that
    left a window, updated as they leave."""

    n: int | Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, keys: Tensor, counted: Tensor | None = None, diagonal: bool = False) -> KeyMoments:
        """Of keys `[..., G, S, E]`, where counted `[..., S]` (None: of all); zeros of none."""
        n = keys.shape[-2] if counted is None else counted.sum(-1)
        share = torch.ones_like(keys[..., :1]) if counted is None else counted[..., None, :, None].to(keys.dtype)
        each = _beside(n, keys).clamp_min(1)
        mean = (share * keys).sum(-2) / each
        apart = share * (keys - mean[..., None, :])
        spread = apart.square().sum(-2) / each if diagonal else apart.mT @ apart / each[..., None]
        return cls(n, mean, spread)

    def add(self, more: Tensor | KeyMoments) -> KeyMoments:
        """With more keys `[..., G, S, E]`, or their moments: what `of` gives of all of them."""
        new = more if isinstance(more, KeyMoments) else KeyMoments.of(more, diagonal=self.diagonal)
        step, share = new.mean - self.mean, _beside(new.n, self.mean)
        share = share / (share + _beside(self.n, self.mean)).clamp_min(1)  # of the new keys
        mean = self.mean + share * step
        between = step.square() if self.diagonal else step[..., None] * step[..., None, :]
        share = share if self.diagonal else share[..., None]
        return KeyMoments(
            self.n + new.n, mean, self.covariance.lerp(new.covariance, share) + share * (1 - share) * between
        )

    @property
    def diagonal(self) -> bool:
        return self.covariance.ndim == self.mean.ndim

    def lse(self, q: Tensor, scale: float) -> Tensor:
        """log n + scale · μᵀq + scale² qᵀΣq / 2 of queries `[..., H, E]`, H/G of them a key head: `[..., H]`.

        Above or below the truth by what the scores are not Gaussian; without Σ it is a lower bound (Jensen).
        """
        each = scale * q.unflatten(-2, (self.mean.shape[-2], -1))
        mean = torch.einsum("...he,...e->...h", each, self.mean)
        turned = each * self.covariance[..., None, :] if self.diagonal else each @ self.covariance
        return gaussian_lse(_beside(self.n, mean), mean, (turned * each).sum(-1)).flatten(-2)

    def local(self, near: Tensor, q: Tensor, scale: float, least: float) -> Tensor:
        """Whether near keys with this log-sum-exp `[..., H]` are enough, bool `[..., H]`."""
        return enough(near, self.lse(q, scale), least)


def _beside(n: int | Tensor, like: Tensor) -> Tensor:
    """A count `[...]`, ready to meet `[..., G, E]`, of the dtype of `like`."""
    return torch.as_tensor(n, dtype=like.dtype, device=like.device)[..., None, None]
