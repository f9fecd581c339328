"""Several predictions of the same thing fused into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def fuse(
    log_probabilities: Sequence[Tensor], how: Literal["mean", "product", "max"] = "mean", weights: Tensor | None = None
) -> Tensor:
    """Log-probabilities `[…, C]` of K heads' or models' log-probabilities (or logits) `[…, C]`.

    mean: ln Σ_k w_k p_k. product: Σ_k w_k ln p_k, made a distribution again (with equal weights the geometric mean).
    max: ln max_k w_k p_k, made a distribution again. Equal weights are 1/K; a class that has no probability in any
    head of weight above 0 has none in the product. All in logarithms: nothing underflows.

    Args:
        weights: `[K]`, or `[…, K]` for weights that differ by place, such as those of a network that looks at the
            input; from 0 on, and divided by their sum.

    Raises:
        ValueError: nothing to fuse, shapes that differ, weights that are negative, all 0, or not K.

    Source: multi-head probability fusion (dynamic weights of several classifiers), and the mean, product and maximum
    rules of Kittler et al. 1998.
    """
    if how not in ("mean", "product", "max"):
        raise ValueError(f"how={how!r} is none of mean, product, max")
    shapes = {tuple(each.shape) for each in log_probabilities}
    if len(shapes) != 1:
        raise ValueError(f"predictions have one shape, not {' and '.join(map(str, shapes)) or 'none at all'}")
    logs = torch.stack([each.log_softmax(-1) for each in log_probabilities], -2)  # [..., K, C]
    if weights is None:
        weights = logs.new_full((logs.shape[-2],), 1 / logs.shape[-2])
    if weights.shape[-1:] != logs.shape[-2:-1] or weights.dim() not in (1, logs.dim() - 1):
        raise ValueError(f"weights are [{logs.shape[-2]}] or one for each place and head, not {list(weights.shape)}")
    total = weights.sum(-1, keepdim=True)
    if not bool((weights >= 0).all()) or not bool((total > 0).all()):
        raise ValueError("weights are from 0 on, and one at least is above 0")
    share = (weights / total)[..., None]
    if how == "mean":
        return (logs + share.log()).logsumexp(-2)
    if how == "max":
        return (logs + share.log()).amax(-2).log_softmax(-1)
    raised = torch.where(share > 0, share * logs, 0.0)  # a head of weight 0 says nothing, be it of probability 0
    return raised.sum(-2).log_softmax(-1)
