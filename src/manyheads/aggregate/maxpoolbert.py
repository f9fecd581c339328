"""MaxPoolBERT: a maximum over layers, then one more attention layer with the class token as its query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Aggregator, Options, Pooled, attend, register_aggregator
from manyheads.aggregate.block import split
from manyheads.core.check import check_whole


@register_aggregator("maxpoolbert")
@dataclass(frozen=True)
class MaxPoolBERT(Options):
    """c = MHA(q = Y[1], k = v = Y), Y `[B, N, D]` of one layer, or over the last k: Y[t, j] = max_i y^(i)[t, j].

    Token 1 is the first that is no padding; a `query` `[B, M, D]` asks in its place. Out `[B, M, D]`, weights
    `[B, heads, M, N]`. No residual, no norm around it, no pooler behind it (ASSUMED). The three read-outs:
    `maxpoolbert(layers=1)` is attention over the last layer, `maxpoolbert(heads=0)` the class token's maximum over
    layers alone, and `maxpoolbert` both, of every token. Layers are given to the module's `read`.

    Args:
        heads: of the attention layer (ASSUMED 4); 0: there is none. layers: k (ASSUMED 3).

    Source: MaxPoolBERT (arXiv 2505.15696).
    """

    ordered = True
    takes = frozenset({"query"})
    heads: int = 4
    layers: int = 3

    def __post_init__(self) -> None:
        check_whole(0, heads=self.heads)
        check_whole(layers=self.layers)

    def build(self, width: int) -> MaxPoolBERTPool:
        fits = self.heads == 0 or width % self.heads == 0
        self.ask(fits, f"heads={self.heads} do not divide a width of {width}")
        return MaxPoolBERTPool(self, width)

    @classmethod
    def examples(cls) -> tuple[MaxPoolBERT, ...]:
        return (cls(heads=0), cls(heads=2, layers=1))


class MaxPoolBERTPool(Aggregator):
    options: MaxPoolBERT

    def __init__(self, options: MaxPoolBERT, width: int) -> None:
        super().__init__(options, width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) if options.heads else None for _ in range(4)
        )

    def read(
        self, states: Sequence[Tensor], mask: Tensor | None = None, *, size: Tensor | None = None,
        query: Tensor | None = None,
    ) -> Pooled:  # fmt: skip
        """Pool the outputs `[B, N, D]` of an encoder's layers, the last one last; the last `layers` of them count.

        A maximum's gradient goes to one layer for each token and channel, the first of equal ones.
        """
        if len(states) < self.options.layers:
            raise ValueError(f"maxpoolbert: layers={self.options.layers}, and {len(states)} are given")
        stacked = torch.stack(list(states[-self.options.layers :]))
        return self(stacked.gather(0, stacked.argmax(0)[None])[0], mask, size=size, query=query)

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        first = mask.int().argmax(1)
        asked = x[torch.arange(len(x), device=x.device), first][:, None] if query is None else query
        if self.q_proj is None or self.k_proj is None or self.v_proj is None or self.o_proj is None:
            return Pooled(asked)
        heads = self.options.heads
        q, k, v = split(self.q_proj(asked), heads), split(self.k_proj(x), heads), split(self.v_proj(x), heads)
        found, weights = attend(q, k, v, mask, size)
        return Pooled(self.o_proj(found.transpose(1, 2).flatten(2)), weights)
