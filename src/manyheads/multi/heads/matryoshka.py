"""Classes told from each of several beginnings of the features."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn, stack

from manyheads.multi.head import Head, register_head


class _Slices(nn.Module):
    def __init__(self, each: list[nn.Module], slices: tuple[int, ...]) -> None:
        super().__init__()
        self.each, self.slices = nn.ModuleList(each), slices

    def forward(self, features: Tensor) -> Tensor:
        pairs = zip(self.each, self.slices, strict=True)
        return stack([net(features[..., :width]) for net, width in pairs], -2)


@register_head("matryoshka")
@dataclass(frozen=True)
class Matryoshka(Head):
    """Logits `[B, slices, classes]`: slice d reads features[:d] through a module of its own; labels `[B]`.

    Loss: the mean over slices of cross-entropies, so that a user may later keep the first d features alone. The
    prediction is that of the last slice, the metric of every one.

    sigmoid: yes-or-no labels `[B, classes]` of 0 and 1 in place of one class, any of which may be missing; a place is
    a cell, the loss binary cross-entropy.

    Source: Matryoshka Representation Learning (arXiv 2205.13147), there with a sum over slices.
    """

    classes: int
    slices: tuple[int, ...]
    sigmoid: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "slices", tuple(self.slices))
        self.ask(self.classes > 1 or self.sigmoid, f"classes={self.classes}; at least 2")
        self.ask(self.classes > 0, f"classes={self.classes}; at least 1")
        rising = all(a < b for a, b in zip((0, *self.slices), self.slices, strict=False))
        self.ask(bool(self.slices) and rising, f"slices={list(self.slices)} do not rise from above 0")

    def build(self, width: int) -> nn.Module:
        if self.slices[-1] > width:
            raise ValueError(f"slices={list(self.slices)} of features that are only {width} wide")
        return _Slices([self.layers(each, self.classes) for each in self.slices], self.slices)

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return (features.shape[0], self.classes) if self.sigmoid else (features.shape[0],)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.within(target, known, 2 if self.sigmoid else self.classes)

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        labels = target[known][:, None].expand(-1, len(self.slices))
        if self.sigmoid:
            cells = output.transpose(1, 2)[known]
            return F.binary_cross_entropy_with_logits(cells, labels.to(cells.dtype), reduction="none").mean(-1)
        return F.cross_entropy(output[known].transpose(1, 2), labels, reduction="none").mean(-1)

    def predict(self, output: Tensor) -> Tensor:
        last = output[..., -1, :]
        return (last > 0).long() if self.sigmoid else last.argmax(-1)

    def likely(self, output: Tensor) -> Tensor:
        return output[..., -1, :].softmax(-1).amax(-1)

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        said = (output > 0).transpose(1, 2) if self.sigmoid else output.argmax(-1)
        right = (said == target[..., None])[known].sum(0)
        return stack([*right.unbind(), known.sum()]).double()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        *right, count = sums.tolist()
        each = [value / count if count else math.nan for value in right]
        return {"accuracy": each[-1]} | {
            f"accuracy@{width}": value for width, value in zip(self.slices[:-1], each[:-1], strict=True)
        }
