"""Contrast of whole similarity volumes, by head, as of sounds and images that belong together.

A volume `[B, V, K, h, w, F, T]` has the product of every feature of sound b (at frequency and time) with every feature
of image v (at a place), head by head. Some aggregation makes of it scores S `[B, V]`; then

    S' = a S - mean(a S),   a = exp(log a) in [0.01, 100], learned, 1 at first
    L = ½ CE(S', rows) + ½ CE(S', columns), row b belonging to column b,   + Σ weight · regulariser

The regularisers read the volumes of pairs that belong together, s `[B, K, h, w, F, T]`, one function each.

Left out: the loss on masked image regions and the separation of named sources, which are of the authors' data. Over
several processes gather features before the volume is made.

Source: Hamilton et al. 2024 (DenseAV), arXiv 2406.05629.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import OptionError

Aggregate = Callable[[Tensor, Tensor | None], Tensor]
"""From a volume and `valid` `[B, T]` to scores `[B, V]`."""


class Calibration(nn.Module):
    """S' `[B, V]` of scores S: scaled by a learned number, less their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def scale(self) -> Tensor:
        return self.log_scale.exp().clamp(0.01, 100.0)

    def forward(self, scores: Tensor) -> Tensor:
        scaled = self.scale() * scores
        return scaled - scaled.mean()

    def balance(self, least: float = 1.0) -> Tensor:
        """max(0, log least - log a)²: a scale that shrinks has given up telling pairs apart."""
        return (math.log(least) - self.log_scale).clamp_min(0).square()


def paired_contrast(scores: Tensor) -> Tensor:
    """The mean cross-entropy of rows and of columns of scores `[B, B]` with the diagonal."""
    if scores.dim() != 2 or scores.shape[0] != scores.shape[1] or not len(scores):
        raise ValueError(f"scores are [B, B], row b belonging to column b, not {list(scores.shape)}")
    own = torch.arange(len(scores), device=scores.device)
    return 0.5 * (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own))


def below_zero(volume: Tensor, pairs: int = 250, generator: torch.Generator | None = None) -> Tensor:
    """The mean of min(s, 0)² over random cells of a volume."""
    flat = volume.flatten()
    at = torch.randint(
        len(flat), (pairs,), generator=generator, device="cpu" if generator is None else generator.device
    )
    return flat[at.to(flat.device)].clamp_max(0).square().mean()


def in_silence(paired: Tensor, valid: Tensor) -> Tensor:
    """The mean of |s| where there is no sound (valid `[B, T]` is False); 0 where there is always one."""
    return _mean(paired.abs(), ~_cells(paired, valid))


def jumps(paired: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean of (s_{t+1} - s_t)², between steps that are both valid."""
    both = None if valid is None else valid[:, 1:] & valid[:, :-1]
    steps = paired.diff(dim=-1).square()
    return _mean(steps, torch.ones_like(steps, dtype=torch.bool) if both is None else _cells(steps, both))


def overlap(paired: Tensor) -> Tensor:
    """The mean of |s_i| |s_j| over cells and pairs of heads i < j: 0 just where no cell has two heads at work."""
    i, j = torch.triu_indices(paired.shape[1], paired.shape[1], 1, device=paired.device)
    together = paired[:, i].abs() * paired[:, j].abs()
    return together.mean() if together.numel() else paired.new_zeros(())


def in_foreign(paired: Tensor, foreign: Tensor) -> Tensor:
    """The mean of s² where the sound was spliced in from elsewhere, foreign bool `[B, T]`."""
    return _mean(paired.square(), _cells(paired, foreign))


@dataclass(frozen=True)
class Dense:
    """The whole loss; options are the weights of the regularisers.

    >>> loss = Dense()(volume, aggregate, calibration, valid=valid)
    """

    below_zero: float = 0.01
    in_silence: float = 0.01
    jumps: float = 0.01
    overlap: float = 0.05
    balance: float = 0.1
    in_foreign: float = 0.01

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0 <= getattr(self, each.name) < math.inf:
                raise OptionError(f"dense: {each.name}={getattr(self, each.name)} is no number from 0 on")

    def __call__(
        self, volume: Tensor, aggregate: Aggregate, calibration: Calibration, *, valid: Tensor | None = None,
        foreign: Tensor | None = None, generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """volume `[B, B, K, h, w, F, T]`, valid and foreign bool `[B, T]`."""
        if volume.dim() != 7 or volume.shape[0] != volume.shape[1] or 0 in volume.shape:
            raise ValueError(f"a volume is [B, B, heads, height, width, frequencies, times], not {list(volume.shape)}")
        for name, mask in (("valid", valid), ("foreign", foreign)):
            if mask is not None and mask.shape != (len(volume), volume.shape[-1]):
                raise ValueError(
                    f"{name} is {list(mask.shape)}, but the volume needs {[len(volume), volume.shape[-1]]}"
                )
        loss = paired_contrast(calibration(aggregate(volume, valid)))
        own = torch.arange(len(volume), device=volume.device)
        paired = volume[own, own]
        loss = loss + self.below_zero * below_zero(volume, generator=generator) + self.jumps * jumps(paired, valid)
        loss = loss + self.overlap * overlap(paired) + self.balance * calibration.balance()
        if valid is not None:
            loss = loss + self.in_silence * in_silence(paired, valid)
        return loss if foreign is None else loss + self.in_foreign * in_foreign(paired, foreign)


def _cells(paired: Tensor, steps: Tensor) -> Tensor:
    """Steps `[B, T]` as cells of `[B, K, h, w, F, T]`."""
    return steps.bool().view(len(steps), *[1] * (paired.dim() - 2), -1).expand_as(paired)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return values.masked_fill(~where, 0).sum() / where.sum().clamp_min(1)
