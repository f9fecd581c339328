"""Balances that follow how fast heads learn: weights from ratios of their losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.core.part import OptionError
from manyheads.multi.balance import Sum
from manyheads.multi.head import Head


class _Rates(Sum):
    """Σ_k weight_k w_k L_k, w_k of the means of losses over epochs; `next_epoch` ends one. A head without any keeps 1.

    The means are no tensors, so a checkpoint leaves them out: `means` is a plain dict, to be kept by who resumes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[str, list[float]] = {}
        self.seen: dict[str, tuple[Tensor | float, float]] = {}

    def combine(self, losses: Mapping[str, Tensor], heads: Mapping[str, Head], shares: Mapping[str, float]) -> Tensor:
        weights = self.weights(list(heads))
        if self.training and torch.is_grad_enabled():
            for name, loss in losses.items():
                total, count = self.seen.get(name, (0.0, 0.0))
                # With `counts` a loss is a share of the step's: as a mean of its own it is loss / share.
                self.seen[name] = (total + loss.detach(), count + shares[name])
        return torch.stack([loss * heads[name].weight * weights[name] for name, loss in losses.items()]).sum()

    def next_epoch(self) -> None:
        """Note the mean losses of the epoch that ends here."""
        for name, (total, count) in self.seen.items():
            if count:
                self.means.setdefault(name, []).append(float(total / count))
        self.seen = {}

    def weights(self, names: list[str]) -> dict[str, float]:
        raise NotImplementedError


class Averaged(_Rates):
    """Dynamic weight averaging: w_k = K softmax_k(r_k / temperature), r_k = L_k(e - 1) / L_k(e - 2).

    1 for all in the first two epochs, and of heads whose losses have been equal in both. least, most: bounds of w.

    Source: Liu, Johns and Davison 2019, arXiv 1803.10704.
    """

    name: ClassVar[str] = "averaged"

    def __init__(self, temperature: float = 2.0, least: float = 0.0, most: float = float("inf")) -> None:
        super().__init__()
        if not temperature > 0 or not 0 <= least <= most:
            raise OptionError(f"averaged: temperature={temperature}, least={least}, most={most}; above 0, and in order")
        self.temperature, self.least, self.most = temperature, least, most

    def weights(self, names: list[str]) -> dict[str, float]:
        rates = {
            name: self.means[name][-1] / self.means[name][-2] for name in names if len(self.means.get(name, ())) > 1
        }
        if len(rates) < len(names) or not all(0 <= rate < float("inf") for rate in rates.values()):
            return dict.fromkeys(names, 1.0)
        soft = len(names) * (torch.tensor([*rates.values()], dtype=torch.float64) / self.temperature).softmax(0)
        return dict(zip(rates, soft.clamp(self.least, self.most).tolist(), strict=True))


class Balanced(_Rates):
    """Loss-balanced task weighting: w_k = (L_k / L_k of the first epoch)^power, between least and most.

    The authors' code takes the first batch of each epoch in place of the first epoch.

    Source: arXiv 2106.10595, after Liu et al. 2019 (LBTW).
    """

    name: ClassVar[str] = "balanced"

    def __init__(self, power: float = 0.5, least: float = 0.5, most: float = 1.5) -> None:
        super().__init__()
        if not power >= 0 or not 0 <= least <= most:
            raise OptionError(f"balanced: power={power}, least={least}, most={most}; from 0 on, and in order")
        self.power, self.least, self.most = power, least, most

    def weights(self, names: list[str]) -> dict[str, float]:
        found = dict.fromkeys(names, 1.0)
        for name in names:
            means = self.means.get(name, [])
            if means and means[0] > 0 and means[-1] >= 0:
                found[name] = min(max((means[-1] / means[0]) ** self.power, self.least), self.most)
        return found
