"""Where in a sequence something begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, finfo, nn, ones, stack

from manyheads.multi.head import MISSING, Head, register_head, share


@register_head("span")
@dataclass(frozen=True)
class Span(Head):
    """Logits `[B, T, 2]` of the first and the last token; labels `[B, 2]`, both or neither known.

    Loss: the mean of two cross-entropies over tokens, padding left out. The prediction is the best pair with
    first <= last, of at most `longest` tokens (0: any).
    """

    reads = "tokens"
    longest: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.longest >= 0, f"longest={self.longest} is negative")

    def build(self, width: int) -> nn.Module:
        return self.layers(width, 2)

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        out = net(features)
        return out if mask is None else out.masked_fill(~mask[..., None].bool(), finfo(out.dtype).min)

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return (features.shape[0], 2)

    def known(self, target: Tensor) -> Tensor:
        return (target != MISSING).any(-1)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        both = target[known]
        self.within(both, both == both, features.shape[1])
        if bool((both[:, 0] > both[:, 1]).any()):
            start, end = both[both[:, 0] > both[:, 1]][0].tolist()
            raise ValueError(f"a span from {start} to {end} ends before it begins")

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        return F.cross_entropy(output[known], target[known], reduction="none").mean(-1)

    def predict(self, output: Tensor) -> Tensor:
        start, end = output.float().log_softmax(1).unbind(-1)
        legal = ones(start.shape[1], start.shape[1], dtype=start.dtype, device=start.device).triu().bool()
        if self.longest:
            legal = legal & ~legal.triu(self.longest)
        best = (start[:, :, None] + end[:, None, :]).masked_fill(~legal, -float("inf")).flatten(1).argmax(-1)
        return stack([best // start.shape[1], best % start.shape[1]], -1)

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        return stack([(self.predict(output) == target).all(-1)[known].sum(), known.sum()]).double()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"exact": share(sums)}
