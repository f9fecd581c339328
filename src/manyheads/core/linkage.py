"""Agglomerative clustering from given distances, for any number of problems at once."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Linkage = Literal["average", "single", "complete"]


def agglomerate(
    distance: Tensor, clusters: int | Tensor, linkage: Linkage = "average", valid: Tensor | None = None,
    within: float = math.inf,
) -> Tensor:  # fmt: skip
    """Join the two clusters nearest to each other until `clusters` are left, or none are within this distance.

    How far clusters are apart: the mean over their pairs (`average`), the least (`single`) or the greatest
    (`complete`). Ties go to the lowest indices.

    Args:
        distance: symmetric `[*, N, N]`. clusters: how many are left, one number or one for each problem `[*]`.
        valid: bool `[*, N]`, False on what is left out (default: nothing).

    Returns:
        int64 `[*, N]`, the lowest index of each one's cluster; -1 for what is left out.
    """
    if linkage not in get_args(Linkage):
        raise ValueError(f"linkage={linkage!r} is none of {', '.join(get_args(Linkage))}")
    n = distance.shape[-1]
    index = torch.arange(n, device=distance.device)
    there = distance.new_ones(distance.shape[:-1], dtype=torch.bool) if valid is None else valid
    apart = distance.masked_fill(~(there[..., :, None] & there[..., None, :]), torch.inf)
    upper = torch.ones(n, n, dtype=torch.bool, device=distance.device).triu(1)
    cluster = torch.where(there, index, -1)
    size = there.to(distance.dtype)
    steps = (there.sum(-1) - clusters).clamp_min(0)  # of each problem
    most = (
        n - clusters if valid is None and isinstance(clusters, int) else int(max(steps.flatten().tolist(), default=0))
    )
    for step in range(most):
        pairs = apart.masked_fill(~upper, torch.inf).flatten(-2)
        best = pairs.argmin(-1, keepdim=True)
        first, second = best // n, best % n
        row, other = (apart.gather(-2, i[..., None].expand(*i.shape, n))[..., 0, :] for i in (first, second))
        if linkage == "average":
            a, b = size.gather(-1, first), size.gather(-1, second)
            joined = (a * row + b * other) / (a + b)
        else:
            joined = torch.minimum(row, other) if linkage == "single" else torch.maximum(row, other)
        going = (steps > step)[..., None] & (pairs.gather(-1, best) <= within)
        is_first, is_second = (index == first) & going, (index == second) & going
        apart = torch.where(is_first[..., :, None], joined[..., None, :], apart)
        apart = torch.where(is_first[..., None, :], joined[..., :, None], apart)
        apart = apart.masked_fill(is_second[..., :, None] | is_second[..., None, :], torch.inf)
        moved = size.gather(-1, second)
        size = torch.where(is_first, size + moved, size).masked_fill(is_second, 0)
        cluster = torch.where(going & (cluster == second), first, cluster)
    return cluster
