"""Attention-based multiple-instance pooling: a small network scores the tokens of a bag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Options, Pooled, Streamed, counted, register_aggregator
from manyheads.aggregate.running import Exponentials, merge_exponentials, scale
from manyheads.core.check import check_whole


@register_aggregator("abmil")
@dataclass(frozen=True)
class ABMIL(Options):
    """Scores e_n = wᵀ tanh(V h_n), or gated e_n = wᵀ (tanh(V h_n) ∘ σ(U h_n)); a = softmax_n(e); z = Σ_n a_n h_n.

    h `[B, N, D]`, V and U `[hidden, D]` with bias, one w for each of the heads. Out `[B, 1, heads·D]`, or with
    `concat=false` a result for each head, `[B, heads, D]`, as for one bag vector a class. Weights `[B, heads, 1, N]`,
    or `[B, 1, heads, N]`. A bias of w would cancel in the softmax, so there is none. Blocks give exactly what one pass
    gives.

    Args:
        heads: branches over the same V and U. gated: the second form. hidden: width of the scores' network.
        activation: `relu` is the pooling of spectra in T3Time.

    Source: Ilse, Tomczak, Welling (arXiv 1802.04712).
    """

    heads: int = 1
    gated: bool = False
    hidden: int = 128
    activation: Literal["tanh", "relu"] = "tanh"
    concat: bool = True

    def __post_init__(self) -> None:
        check_whole(heads=self.heads, hidden=self.hidden)

    def build(self, width: int) -> ABMILPool:
        return ABMILPool(self, width)

    @classmethod
    def examples(cls) -> tuple[ABMIL, ...]:
        return (cls(heads=3, gated=True, hidden=5), cls(heads=2, activation="relu", concat=False))


class ABMILPool(Streamed):
    options: ABMIL

    def __init__(self, options: ABMIL, width: int) -> None:
        super().__init__(options, width)
        self.v = nn.Linear(width, options.hidden)
        self.u = nn.Linear(width, options.hidden) if options.gated else None
        self.w = nn.Linear(options.hidden, options.heads, bias=False)

    def scores(self, x: Tensor) -> Tensor:
        """`[B, heads, N]`."""
        hidden = self.v(x).tanh() if self.options.activation == "tanh" else self.v(x).relu()
        if self.u is not None:
            hidden = hidden * self.u(x).sigmoid()
        return self.w(hidden).mT

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        weights, state = self._observe(x, mask, size)
        weights = weights / state.sums[0][..., None]
        return self.finalize(state)._replace(weights=weights[:, :, None] if self.options.concat else weights[:, None])

    def _observe(self, x: Tensor, mask: Tensor, size: Tensor | None) -> tuple[Tensor, Exponentials]:
        scores = self.scores(x)
        top = scores.masked_fill(~mask[:, None], -torch.inf).amax(-1).detach()
        shares = (scores - scale(top)[..., None]).masked_fill(~mask[:, None], -torch.inf).exp()
        shares = shares * counted(mask, size, x.dtype)[:, None]
        return shares, Exponentials(top, (shares.sum(-1), shares @ x))

    def observe(self, x: Tensor, mask: Tensor, size: Tensor | None = None) -> Exponentials:
        return self._observe(x, mask, size)[1]

    def merge(self, a: Exponentials, b: Exponentials) -> Exponentials:
        return merge_exponentials(a, b)

    def finalize(self, state: Exponentials) -> Pooled:
        total, weighted = state.sums
        out = weighted / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
        return Pooled(out.flatten(1)[:, None] if self.options.concat else out)
