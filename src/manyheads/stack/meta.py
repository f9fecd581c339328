"""Learned tokens before every sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.core.mask import Axis, Mask


class MetaTokens(nn.Module):
    """`[M, D]` from N(0, 1), before the first token of every sequence, behind its left padding.

    They have positions 0 … M-1 and the text those from M on. A stack puts them before the first pass of a cache, and
    gives no output for them.

    Source: Dong et al. 2024, arXiv 2411.13676.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        check_whole(meta=count)
        self.count = count
        self.tokens = nn.Parameter(torch.randn(count, dim))

    def before(self, x: Tensor, axis: Axis, mask: Tensor | Mask | None) -> tuple[Tensor, Axis, Tensor | None]:
        """x `[B, M + T, D]`, its axis, and how much padding comes first, int `[B or 1, 1]` (None: there is none).

        axis: of the text, which says what is padding; a mask beside it may say no more than that.
        """
        if axis.segment is not None or isinstance(mask, Mask) or (mask is not None and mask.ndim != 2):
            raise ValueError(
                "meta tokens stand before one sequence a row, in causal or full order: no packed documents and no mask "
                "over pairs of tokens; mark padding by a [B, T] mask"
            )
        m, given = self.count, axis.given_position
        text = replace(
            axis, start=None if axis.start is None else axis.start + m, memo={},
            given_position=None if given is None else given + m,
            given_time=None if axis.given_time is None else axis.given_time + m,
        )  # fmt: skip
        rows = torch.cat([self.tokens.to(x.dtype).expand(len(x), -1, -1), x], 1)
        whole = Axis(m, 0, device=x.device).cat(text)
        if axis.valid is None:
            return rows, whole, None
        padding = (axis.valid.cumsum(-1) == 0).sum(-1, keepdim=True)
        row = torch.arange(rows.shape[1], device=x.device)
        order = torch.where(row < padding, row + m, torch.where(row < padding + m, row - padding, row))
        moved = whole.take(order)
        axis = replace(moved, start=whole.start, given_time=whole.given_time, rows=None)
        return rows.take_along_dim(order[..., None], 1), axis, padding

    def without(self, y: Tensor, padding: Tensor | None) -> Tensor:
        """y `[B, M + T, D]` of the text alone, `[B, T, D]`."""
        if padding is None:
            return y[:, self.count :]
        row = torch.arange(y.shape[1] - self.count, device=y.device)
        return y.take_along_dim(torch.where(row < padding, row, row + self.count)[..., None], 1)
