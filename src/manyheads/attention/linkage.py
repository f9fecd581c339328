"""Heads that are alike, in clusters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.linkage import agglomerate


def average_linkage(features: Tensor, clusters: int) -> Tensor:
    """Join the two clusters nearest in cosine distance, as the mean over their pairs, until `clusters` are left.

    features `[*, H, width]` to the representative of each row's cluster, int64 `[*, H]`: the cluster's lowest index.
    """
    unit = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
    return agglomerate(-(unit @ unit.mT), clusters)
