"""Learned relative positions: a vector and a number for each signed distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.latent import per_head
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias
from manyheads.core.mask import Axis, Mask, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Position, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Relative(Part):
    """score_h(i, j) = ((q_i + u_h)·k_j + q_i·E_{h,j-i} + β_{h,j-i}) · scale; u, E and β start at zero.

    u `[H, d]`; E `[2P, H, d]` and β `[2P, H]` have a row for each j - i from -P to P - 1. u is folded into the queries,
    the rest is a bias on the scores (of q without u). Nothing rotates. In Transformer-XL's form β is w·(W_R R_{i-j}).

    Options: context P, to be sized to the sequences seen (the authors have 4096 everywhere, 8192 rows a head). A causal
    mask never reads the rows of later keys; prefix masks and encoders do. Farther distances share the last row.

    Source: RCMHA 2023, arXiv 2308.03429, after Dai et al. 2019, arXiv 1901.02860.
    """

    name: ClassVar[str] = "relative"
    stage: ClassVar = "position"
    paper: ClassVar[str] = "arXiv 2308.03429"
    slot: ClassVar[str | None] = "position"
    examples: ClassVar = ({"context": 16}, {"context": 4})

    context: int = 4096

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads", "bare scores"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.context < 1:
            raise OptionError(f"relative: context={self.context} tokens; at least 1")
        return heads._replace(rotary=None)

    def build(self, before: Heads, after: Heads, site: Site) -> RelativePosition:
        return RelativePosition(before, self.context)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        width = before.qk_width
        parameters = 2 * self.context * before.q * (width + 1) + before.q * width
        return Cost(parameters, pair_flops=2 * before.q * width)


class RelativePosition(Position):
    def __init__(self, heads: Heads, context: int) -> None:
        super().__init__()
        self.context, self.scale = context, heads.scale
        self.content_bias = nn.Parameter(torch.zeros(heads.q, 1, heads.qk_width))
        self.embedding = nn.Parameter(torch.zeros(2 * context, heads.q, heads.qk_width))
        self.position_bias = nn.Parameter(torch.zeros(2 * context, heads.q))

    def ask(self, q: Tensor, flow: Flow) -> Tensor:
        flow.memo["relative"] = q
        return q + self.content_bias.to(q.dtype)

    def bias(self, mask: Mask, flow: Flow) -> Bias | None:
        queries = flow.memo["relative"]

        def tile(q: slice, k: slice) -> Tensor:
            rows, keys = mask.q[q], mask.k[k]
            first, last = self._reach(rows, keys)
            cut = slice(self.context + first, self.context + last + 1)
            by_distance = per_head(queries[:, :, q], self.embedding[cut].permute(1, 2, 0))
            by_distance = by_distance + self.position_bias[cut].T[:, None]
            offset = cols_of(keys.position) - rows_of(rows.position)
            index = offset.clamp(first, last) - first
            return (by_distance.gather(-1, index.expand(*by_distance.shape[:3], -1)) * self.scale).to(queries.dtype)

        return tile

    def _reach(self, rows: Axis, keys: Axis) -> tuple[int, int]:
        """The smallest and largest offset j - i that can occur, as far as is known without looking at data."""
        first, last = -self.context, self.context - 1
        plain = rows.given_position is None and keys.given_position is None
        if not plain or rows.start is None or keys.start is None:
            return first, last
        near, far = keys.start + keys.length - 1 - rows.start, keys.start - rows.start - rows.length + 1
        return min(max(far, first), last), min(max(near, first), last)
