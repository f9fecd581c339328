"""Learnable commutative monoids: a learned operator of two elements, reduced over a balanced tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Aggregator, Options, Pooled, register_aggregator


@register_aggregator("lcm")
@dataclass(frozen=True)
class LCM(Options):
    """y = x_1 ⊕ x_2 ⊕ …, x_n = relu(W h_n + b), a ⊕ b = ½ (GRU(a, b) + GRU(b, a)), in ⌈log2 N⌉ levels of a tree.

    h `[B, N, D]`, out `[B, 1, D]`; the cell's first argument is its input, the second its state. A level joins the
    pairs (1, 2), (3, 4), … in one call; an odd last element goes up as it is. ⊕ is commutative by construction and
    associative only as far as it has learned to be: order inside a pair never counts, which elements are pairs does.
    Padding is taken out before pairs are made, so neither it nor batch mates count (a public program joins padding as
    zeros, and x ⊕ 0 is not x). An empty set gives the neutral element, 0.

    Args:
        operator: `sum` and `max` in place of the cell, for comparison.
        shuffle: in training, elements come in random order, so that the tree sees other bracketings.

    Source: Ong and Veličković (arXiv 2212.08541).
    """

    ordered = True
    repeats = False
    operator: Literal["gru", "sum", "max"] = "gru"
    shuffle: bool = False

    def build(self, width: int) -> LCMPool:
        return LCMPool(self, width)

    @classmethod
    def examples(cls) -> tuple[LCM, ...]:
        return (cls("sum"), cls("max", shuffle=True))


class LCMPool(Aggregator):
    options: LCM

    def __init__(self, options: LCM, width: int) -> None:
        super().__init__(options, width)
        self.enter = nn.Linear(width, width)
        self.cell = nn.GRUCell(width, width) if options.operator == "gru" else None

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """a ⊕ b, of any `[…, D]`."""
        if self.cell is None:
            return a + b if self.options.operator == "sum" else torch.maximum(a, b)
        both = self.cell(torch.stack([a, b]).flatten(0, -2), torch.stack([b, a]).flatten(0, -2))
        return both.unflatten(0, (2, -1)).mean(0).reshape(a.shape)

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        rank = torch.zeros(mask.shape, device=x.device)
        if self.options.shuffle and self.training:
            rank = torch.rand_like(rank)
        order = (rank + 2.0 * ~mask).argsort(dim=1, stable=True)
        x, mask = self.enter(x).relu().gather(1, order[..., None].expand_as(x)), mask.gather(1, order)
        while x.shape[1] > 1:
            last = x[:, -1:], mask[:, -1:]
            pairs = x.shape[1] // 2
            a, b = x[:, : 2 * pairs].unflatten(1, (pairs, 2)).unbind(2)
            two = mask[:, 1 : 2 * pairs : 2]  # the second of a pair is there; if so the first is
            odd = x.shape[1] % 2
            x, mask = torch.where(two[..., None], self.join(a, b), a), mask[:, : 2 * pairs : 2]
            if odd:
                x, mask = torch.cat([x, last[0]], 1), torch.cat([mask, last[1]], 1)
        return Pooled(x)

    def associativity(self, x: Tensor, mask: Tensor | None = None, triples: int = 64) -> Tensor:
        """Mean of ‖(a ⊕ b) ⊕ c - a ⊕ (b ⊕ c)‖² over drawn triples of elements of the batch: a term to add to a loss.

        The source leaves open how triples are drawn and the term weighed: here uniformly, with repetition (ASSUMED).
        """
        x, mask, _ = self.cleaned(x, mask, None)
        elements = self.enter(x[mask]).relu()
        if not len(elements):
            raise ValueError("lcm: a batch without any token has no triples")
        a, b, c = elements[torch.randint(len(elements), (3, triples), device=x.device)]
        return (self.join(self.join(a, b), c) - self.join(a, self.join(b, c))).square().sum(-1).mean()
