"""The order of the items of a list."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, arange, nn, stack

from manyheads.multi.head import Head, register_head, share

LOSSES = ("listwise", "pairwise")


@register_head("ranking")
@dataclass(frozen=True)
class Ranking(Head):
    """Scores `[B, N]` of features `[B, N, width]`, a row being a list; labels `[B, N]`: relevance, higher is better.

    A place is a list with two known labels that differ. listwise: cross-entropy of softmax(labels) and softmax(scores)
    over known items (ListNet, Cao 2007). pairwise: the mean over pairs with y_i > y_j of -log σ(s_i - s_j) (RankNet,
    Burges 2005). Metric: NDCG over known items, gain 2^y - 1 (y from the list's least).
    """

    reads = "lists"
    dtype = "number"
    loss: str = "listwise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.loss in LOSSES, f"loss={self.loss!r} is none of {', '.join(LOSSES)}")

    def build(self, width: int) -> nn.Module:
        return self.layers(width, 1)

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        return net(features).squeeze(-1)

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return tuple(features.shape[:2])

    def known(self, target: Tensor) -> Tensor:
        missing = target.isnan()
        highest = target.masked_fill(missing, -float("inf")).amax(-1)
        return highest > target.masked_fill(missing, float("inf")).amin(-1)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.finite(target, ~target.isnan())

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        score, true = output[known], target[known].to(output.dtype)
        missing = true.isnan()
        if self.loss == "listwise":
            wanted = true.masked_fill(missing, -float("inf")).softmax(-1)
            said = score.masked_fill(missing, -float("inf")).log_softmax(-1).masked_fill(missing, 0)
            return -(wanted * said).sum(-1)
        pairs = true[:, :, None] > true[:, None, :]  # False where either is NaN
        apart = F.softplus(score[:, None, :] - score[:, :, None]).masked_fill(~pairs, 0)
        return apart.sum((1, 2)) / pairs.sum((1, 2))

    def predict(self, output: Tensor) -> Tensor:
        return output

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        score, true = output[known].double(), target[known].double()
        missing = true.isnan()
        least = true.masked_fill(missing, float("inf")).amin(-1, keepdim=True)
        gain = ((true - least).exp2() - 1).masked_fill(missing, 0)
        discount = 1 / (arange(score.shape[1], device=score.device).double() + 2).log2()
        order = score.masked_fill(missing, -float("inf")).argsort(stable=True, dim=-1, descending=True)
        got = (gain.gather(-1, order) * discount).sum(-1)
        best = (gain.sort(-1, descending=True).values * discount).sum(-1)
        return stack([(got / best).sum(), known.sum().double()])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"ndcg": share(sums)}
