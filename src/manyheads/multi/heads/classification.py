"""One of several classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn, stack

from manyheads.multi.head import Head, register_head, share


@register_head("classification")
@dataclass(frozen=True)
class Classification(Head):
    """Logits `[B, classes]`; loss: cross-entropy; labels `[B]`, 0 to classes - 1. smoothing: of the labels."""

    classes: int
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.classes > 1, f"classes={self.classes}; at least 2")
        self.ask(0 <= self.smoothing < 1, f"smoothing={self.smoothing} is not in [0, 1)")

    def build(self, width: int) -> nn.Module:
        return self.layers(width, self.classes)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.within(target, known, self.classes)

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        return F.cross_entropy(output[known], target[known], reduction="none", label_smoothing=self.smoothing)

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(-1)

    def likely(self, output: Tensor) -> Tensor:
        return output.softmax(-1).amax(-1)

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        return stack([(self.predict(output) == target)[known].sum(), known.sum()]).double()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"accuracy": share(sums)}
