"""Whether heads are as sure as they are right: probabilities against accuracy, intervals against how much they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.multi.head import Head

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def reliability(likely: Tensor, right: Tensor, bins: int = 10) -> dict[str, Any]:
    """Predictions sorted into even bins of how likely they are said to be, and the expected calibration error.

    ECE = Σ_b n_b / n |accuracy_b - confidence_b|. Empty bins are left out.

    Args:
        likely: `[n]`, the probability of what is predicted. right: bool `[n]`.

    Source: Guo et al., On Calibration of Modern Neural Networks (arXiv 1706.04599).
    """
    if likely.shape != right.shape or likely.dim() != 1:
        raise ValueError(f"probabilities {list(likely.shape)} and hits {list(right.shape)} are no two rows of a length")
    if not len(likely) or bins < 1:
        raise ValueError(f"{len(likely)} predictions in {bins} bins")
    if bool(((likely < 0) | (likely > 1 + 1e-6) | likely.isnan()).any()):
        raise ValueError("a probability is not from 0 to 1")
    place = (likely * bins).long().clamp(max=bins - 1)

    def added(values: Tensor) -> Tensor:
        return torch.zeros(bins, dtype=torch.float64, device=likely.device).index_add(0, place, values.double())

    counts, sure, hits = added(torch.ones_like(likely)), added(likely), added(right)
    some = counts > 0
    return {
        "ece": float((hits - sure).abs().sum() / len(likely)), "count": counts[some].int().tolist(),
        "confidence": (sure / counts)[some].tolist(), "accuracy": (hits / counts)[some].tolist(),
    }  # fmt: skip


def coverage(below: Tensor, levels: Sequence[float] = LEVELS) -> dict[str, Any]:
    """What part of labels is in the middle interval that a head says holds a part `levels` of them.

    With u = P(y ≤ label), the label is in the interval of level p where |2 u - 1| ≤ p. `error` is the mean over levels
    of |covered - level|.

    Args:
        below: `[n]`, u of each label.

    Source: Kuleshov, Fenner and Ermon (arXiv 1807.00263), there with one-sided intervals.
    """
    if not below.numel():
        raise ValueError("no labels, so no coverage")
    if not levels or not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels are between 0 and 1, not {list(levels)}")
    middle = (2 * below.double() - 1).abs().flatten()
    covered = [float((middle <= level).double().mean()) for level in levels]
    error = sum(abs(a - b) for a, b in zip(covered, levels, strict=True)) / len(levels)
    return {"error": error, "count": [below.numel()], "level": list(levels), "covered": covered}


@torch.no_grad()
def calibration(head: Head, output: Tensor, target: Tensor) -> dict[str, Any] | None:
    """`reliability` of a head that says how likely its classes are, `coverage` of one that says a distribution.

    Of the places with a label; None where the head says neither, or where there is none.
    """
    labels = cast(Tensor, head.tidy(target, output))
    known = head.known(labels)
    if not bool(known.any()):
        return None
    likely, below = head.likely(output), head.below(output, labels)
    if likely is not None:
        return {"kind": "reliability", **reliability(likely[known], (head.predict(output) == labels)[known])}
    return None if below is None else {"kind": "coverage", **coverage(below[~below.isnan()])}
