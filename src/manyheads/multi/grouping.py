"""Which heads should share a trunk: how alike they are, by gradients or by errors, and groups of like ones.

>>> grouping(affinity(model, loader), 2)           # tensor([0, 0, 1])
>>> grouping(error_affinity(cross_errors(fit, tasks)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.check import OptionError, check_whole
from manyheads.core.linkage import agglomerate
from manyheads.multi.balance import Sum
from manyheads.multi.model import MultiHead

Fit = Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]
"""From rows and labels to what predicts labels of rows."""


class _Apart(Sum):
    """Gives every head features of its own, at which its gradient can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, Tensor] = {}

    def views(self, features: Tensor, names: list[str]) -> dict[str, Tensor]:
        mine = {name: features.detach().requires_grad_() for name in names}
        self.own |= mine
        return mine


def affinity(model: MultiHead, batches: Iterable[Any]) -> Tensor:
    """The cosine of two heads' gradients at the features that both read, the mean over batches, `[heads, heads]`.

    Above 0 two heads pull the trunk the same way. NaN where they never had labels in one batch, or read other features.
    The model stays as it is, its gradients too. batches: pairs (x, targets), or dicts of what the model is called with.
    """
    names, training, balance = list(model.heads), model.training, model.balance
    total, count = (torch.zeros(len(names), len(names), dtype=torch.float64) for _ in "tc")
    seen = 0
    try:
        model.eval()
        for seen, batch in enumerate(batches, 1):  # noqa: B007
            model.balance = watch = _Apart()
            with torch.enable_grad():
                out = model(**batch) if isinstance(batch, Mapping) else model(batch[0], targets=batch[1])
                if out.losses is None:
                    raise ValueError("a batch has no targets")
                known = list(out.losses)
                slopes = (
                    torch.autograd.grad([out.losses[n] for n in known], [watch.own[n] for n in known]) if known else ()
                )
            flat = {name: slope.flatten().double() for name, slope in zip(known, slopes, strict=True)}
            for i, one in enumerate(names):
                for j, other in enumerate(names):
                    if one in flat and other in flat and model.tap(one) == model.tap(other):
                        total[i, j] += F.cosine_similarity(flat[one], flat[other], dim=0).cpu()
                        count[i, j] += 1
    finally:
        model.balance = balance
        model.train(training)
    if not seen:
        raise ValueError("how alike heads are is not known of no batches; of a generator, none are left after one pass")
    return total / count


def squared_error(said: Tensor, true: Tensor) -> Tensor:
    """The mean squared error."""
    return (said - true).square().mean()


def cross_errors(
    fit: Fit, tasks: Sequence[tuple[Tensor, Tensor]], error: Callable[[Tensor, Tensor], Tensor] = squared_error, *,
    held_out: bool = True,
) -> Tensor:  # fmt: skip
    """`[T, T]`, row i: the errors on the data of task i of the models that `fit` makes of each task.

    tasks: rows `[n, D]` and labels `[n]` of each. held_out: models learn from every second row and are judged by the
    others; else on what they learned from, where a strong model's own error is near 0 and hides all likeness.
    """
    learn = slice(0, None, 2 if held_out else 1)
    judge = slice(1, None, 2) if held_out else slice(None)
    if any(len(x) != len(y) or len(x) < 2 for x, y in tasks):
        raise ValueError(f"tasks have rows and labels of {[(len(x), len(y)) for x, y in tasks]}; as many, at least 2")
    models = [fit(x[learn], y[learn]) for x, y in tasks]
    return torch.stack([torch.stack([error(model(x[judge]), y[judge]).double() for model in models]) for x, y in tasks])


def error_affinity(errors: Tensor) -> Tensor:
    """The cosines of rows of 1 / (errors + 1e-8), `[T, T]`: 1 for tasks on which the same models do well.

    Source: RMB-CLE (GAA-UAM/RMB-CLE, 2026).
    """
    _square(errors)
    rows = F.normalize(1 / (errors.double() + 1e-8), dim=-1)
    return rows @ rows.T


def grouping(affinity: Tensor, groups: int | None = None) -> Tensor:
    """The group of each task `[T]`, numbered as they come: average linkage of the distances 1 - affinity.

    groups: how many; None: of 2 to min(T, 20) that with the best mean silhouette; two tasks stay apart.
    """
    _square(affinity)
    if bool(affinity.isnan().any()):
        i, j = affinity.isnan().nonzero()[0].tolist()
        raise ValueError(f"how alike tasks {i} and {j} are is not known: they never had labels in one batch")
    tasks = len(affinity)
    distance = 1 - affinity.double()
    distance = ((distance + distance.T) / 2).fill_diagonal_(0)
    if groups is not None:
        check_whole(groups=groups)
        if groups > tasks:
            raise OptionError(f"groups={groups} of {tasks} tasks; 1 to {tasks}")
    counts = [tasks if groups is None else groups]
    if groups is None and tasks > 2:
        counts = [*range(2, min(tasks, 20) + 1)]
    found = agglomerate(distance.expand(len(counts), -1, -1), torch.tensor(counts, device=distance.device))
    best = max(found, key=lambda labels: silhouette(distance, labels)) if len(counts) > 1 else found[0]
    return best.unique(return_inverse=True)[1]


def silhouette(distance: Tensor, labels: Tensor) -> float:
    """The mean over tasks of (b - a) / max(a, b), a to one's own group, b to the nearest other; 0 for one alone."""
    same = labels[:, None] == labels
    if bool(same.all()):
        return 0.0
    scores = []
    for task in range(len(labels)):
        own = same[task].clone()
        own[task] = False
        if not bool(own.any()):
            scores.append(0.0)
            continue
        a = distance[task, own].mean()
        b = torch.stack(
            [distance[task, labels == each].mean() for each in labels.unique() if each != labels[task]]
        ).min()
        scores.append(float((b - a) / torch.maximum(a, b).clamp_min(1e-12)))
    return sum(scores) / len(scores)


def _square(matrix: Tensor) -> None:
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"of T tasks a [T, T] matrix is needed, not {list(matrix.shape)}")
