"""Agglomerative clustering, for any number of problems at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def average_linkage(features: Tensor, clusters: int) -> Tensor:
    """Join the two clusters nearest in cosine distance, as the mean over their pairs, until `clusters` are left.

    features `[*, H, width]` to the representative of each row's cluster, int64 `[*, H]`: the cluster's lowest index.
    """
    heads = features.shape[-2]
    unit = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
    alike = unit @ unit.transpose(-1, -2)  # summed over the pairs of two clusters
    member = torch.eye(heads, dtype=unit.dtype, device=unit.device).expand_as(alike)  # [*, cluster, head]
    ordered = torch.ones_like(alike, dtype=torch.bool).triu(1)
    for _ in range(heads - clusters):
        size = member.sum(-1)
        pairs = size[..., :, None] * size[..., None, :]
        mean = (alike / pairs.clamp_min(1)).masked_fill(~(ordered & (pairs > 0)), -torch.inf)
        first, second = (F.one_hot(i, heads).to(unit.dtype) for i in torch.unravel_index(
            mean.flatten(-2).argmax(-1), (heads, heads)))  # fmt: skip
        moves = (first - second)[..., :, None] * second[..., None, :]  # row `second` into row `first`
        member = member + moves @ member
        alike = alike + moves @ alike
        alike = alike + alike @ moves.transpose(-1, -2)
    return member.argmax(-2)
