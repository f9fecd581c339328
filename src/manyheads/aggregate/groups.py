"""Groups of a long list, such as a graph's neighbourhoods, pooled by any aggregator; PyG's `Aggregation` of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Aggregator


def dense(x: Tensor, index: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows x `[E, D]` by the group `[E]` that each belongs to: `[B, N, D]`, in their order, and a mask `[B, N]`.

    count: B, also of groups without a row (default: up to the largest index). N is the largest group's size.
    """
    if x.dim() != 2 or index.shape != x.shape[:1] or index.is_floating_point():
        raise ValueError(f"x is [rows, width] and index whole numbers [rows], not {list(x.shape)}, {list(index.shape)}")
    least = int(index.max()) + 1 if len(index) else 0
    if count is None:
        count = least
    if least > count or (len(index) and int(index.min()) < 0):
        raise ValueError(f"an index is from 0 to {count - 1} where there are {count} groups")
    order = index.argsort(stable=True)
    sizes = index.bincount(minlength=count)
    place = torch.arange(len(index), device=x.device) - (sizes.cumsum(0) - sizes)[index[order]]
    longest = int(sizes.max()) if count else 0
    rows, mask = x.new_zeros(count, longest, x.shape[1]), index.new_zeros(count, longest, dtype=torch.bool)
    at = (index[order], place)
    return rows.index_put(at, x[order]), mask.index_put(at, mask.new_ones(()))


def pool_groups(
    aggregator: Aggregator, x: Tensor, index: Tensor, count: int | None = None, **more: Tensor
) -> Tensor:  # fmt: skip
    """One result for each group, `[B, D']`, of x `[E, D]` and its groups `[E]`; more: `query` `[B, 1, D]`, `cond`."""
    out = aggregator(*dense(x, index, count), **more).out
    if out.shape[1] != 1:
        raise ValueError(f"{aggregator.options.name}: it gives {out.shape[1]} results for a group, and one is wanted")
    return out[:, 0]


def as_pyg(aggregator: Aggregator) -> nn.Module:
    """The aggregator as a `torch_geometric.nn.aggr.Aggregation`, for `aggr=` of a graph's message passing.

    Raises:
        ImportError: torch_geometric is not installed.
    """
    try:
        from torch_geometric.nn.aggr import Aggregation  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError("graphs need torch_geometric: pip install 'manyheads[graphs]'") from error

    class OfSets(Aggregation):
        def __init__(self) -> None:
            super().__init__()
            self.aggregator = aggregator

        def forward(
            self, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, dim_size: int | None = None,
            dim: int = -2, max_num_elements: int | None = None, **more: Any,
        ) -> Tensor:  # fmt: skip
            if x.dim() != 2 or dim not in (-2, 0):
                raise ValueError(f"messages are [edges, width], not {list(x.shape)} along {dim}")
            if index is None and ptr is not None:
                index = torch.arange(len(ptr) - 1, device=x.device).repeat_interleave(ptr.diff())
                dim_size = len(ptr) - 1 if dim_size is None else dim_size
            if index is None:
                index, dim_size = x.new_zeros(len(x), dtype=torch.long), 1
            return pool_groups(aggregator, x, index, dim_size)

    return OfSets()
