"""Several yes-or-no labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn, stack

from manyheads.multi.head import Head, register_head


@register_head("multi-label")
@dataclass(frozen=True)
class MultiLabel(Head):
    """Logits `[B, labels]`; loss: binary cross-entropy; labels `[B, labels]` of 0 and 1, each of which may be missing.

    A place is a cell. positive: the weight of a 1's loss, where 1 is rare.
    """

    labels: int
    positive: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.labels > 0, f"labels={self.labels}; at least 1")
        self.ask(self.positive > 0, f"positive={self.positive} is not above 0")

    def build(self, width: int) -> nn.Module:
        return self.layers(width, self.labels)

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return (features.shape[0], self.labels)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.within(target, known, 2)

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        rare = output.new_tensor(self.positive)
        labels = target[known].to(output.dtype)
        return F.binary_cross_entropy_with_logits(output[known], labels, reduction="none", pos_weight=rare)

    def predict(self, output: Tensor) -> Tensor:
        return (output > 0).long()

    def likely(self, output: Tensor) -> Tensor:
        return output.abs().sigmoid()

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        said, true = self.predict(output)[known].bool(), target[known].bool()
        return stack([(said & true).sum(), (said & ~true).sum(), (~said & true).sum(), (said == true).sum()]).double()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        hit, false, lost, same = sums.tolist()
        every = same + false + lost
        return {
            "f1": 2 * hit / (2 * hit + false + lost) if hit + false + lost else math.nan,
            "accuracy": same / every if every else math.nan,
        }
