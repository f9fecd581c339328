"""What attention between two spans of a text tells: features of all heads, a linear probe on them, a few heads of it.

Source: Yang et al. 2021 (It's All in the Heads), arXiv 2106.12066; Klein and Nabi 2019 (MAS), arXiv 1905.13497.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.inspect.ablate import Inputs, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look

Span = Sequence[int]
"""Places of tokens in their row of the inputs."""


@dataclass(frozen=True, eq=False)
class PairFeatures:
    """values `[N, F]`: of each text, what each of F heads gives from one span to the other. heads: (layer, head)."""

    values: Tensor
    heads: list[tuple[int, int]]


def pair_features(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], pairs: Sequence[tuple[Span, Span]],
    layers: int | Iterable[int] | None = None, *, pool: Literal["mean", "max"] = "mean",
) -> PairFeatures:  # fmt: skip
    """A_ts of every head, pooled over the queries t of one span and the keys s of another.

    Of a pronoun and a candidate, (pronoun, candidate) is what the pronoun looks at, (candidate, pronoun) the other
    direction, which exists in an encoder.

    Args:
        pairs: (queries, keys) of each text, in the order of batches and rows.
    """
    if pool not in ("mean", "max"):
        raise ValueError(f"pool={pool!r}; mean or max")
    empty = [n for n, pair in enumerate(pairs) if not all(len(span) for span in pair) or min(map(min, pair)) < 0]
    if empty or not pairs:
        raise ValueError(
            f"pair {empty[0] if empty else 0} has no tokens, or counts from the end; two spans of places each"
        )
    some = [layer for layer in chosen(model, layers) if not layer.none]
    found: dict[int, list[Tensor]] = {layer.number: [] for layer in some}

    def see(look: Look) -> None:
        at = sum(map(len, found[look.layer]))
        own = pairs[at : at + len(look.read)]
        if len(own) < len(look.read):
            raise ValueError(f"{len(pairs)} pairs for more texts")
        highest = max(max(map(max, pair)) for pair in own)
        if highest >= min(look.axis.length, look.mask.k.length):
            raise ValueError(f"token {highest} of a text of {look.axis.length} tokens")
        rows = sorted({row for queries, _ in own for row in queries})
        weights = torch.cat([tile.weights for tile in look.weights(rows=rows)], 2).double()
        each = []
        for n, (queries, keys) in enumerate(own):
            block = weights[n][:, [rows.index(row) for row in queries]][..., list(keys)]
            each.append(block.mean((1, 2)) if pool == "mean" else block.amax((1, 2)))
        found[look.layer].append(torch.stack(each).cpu())

    with torch.no_grad(), watching(some, see):
        for batch in batches_of(inputs):
            run(model, batch)
    values = [torch.cat(each) for each in found.values()]
    if len(values[0]) != len(pairs):
        raise ValueError(f"{len(pairs)} pairs for {len(values[0])} texts")
    heads = [(number, head) for number, each in zip(found, values, strict=True) for head in range(each.shape[1])]
    return PairFeatures(torch.cat(values, 1), heads)


def mas(one: Tensor, other: Tensor, *, ties: bool = False) -> Tensor:
    """Without training, how much of the attention candidate `one` has, `[N]` in [0, 1], from features `[N, F]` of both.

    Each head counts for the candidate to which it gives more: Σ of what `one` wins over Σ of what either does; 1/2 for
    candidates that are alike. ties: the share of heads that give `one` no less, as released code has it (so that of
    equal candidates either wins).
    """
    if ties:
        return (one >= other).double().mean(1)
    won, lost = one * (one >= other), other * (other >= one)
    total = (won + lost).sum(1)
    return torch.where(total > 0, won.sum(1) / total.clamp_min(1e-300), 0.5)


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear decision on features: w `[F]` and b."""

    weight: Tensor
    bias: float = 0.0

    def prefers(self, one: Tensor, other: Tensor) -> Tensor:
        """Whether the first candidate is the right one, `[N]`: wᵀ(φ_1 - φ_2) > 0 (b is of one candidate alone)."""
        return (one - other) @ self.weight > 0

    def accuracy(self, right: Tensor, wrong: Tensor) -> float:
        return self.prefers(right, wrong).double().mean().item()


def fit_probe(
    right: Tensor, wrong: Tensor, *, how: Literal["difference", "single"] = "difference", strength: float = 1.0
) -> Probe:
    """Logistic regression on features `[N, F]` of right and wrong candidates: ½‖w‖² + C Σ ln(1 + exp(-y (wᵀφ + b))).

    how: `difference`, of φ_right - φ_wrong and its negative, without b, so that a swapped pair gets the opposite
    decision; `single`, of each candidate on its own. strength: C. By Newton's method, the same each time.
    """
    if right.shape != wrong.shape or right.ndim != 2 or not len(right):
        raise ValueError(f"features [N, F] of both candidates, not {[*right.shape]} and {[*wrong.shape]}")
    if how not in ("difference", "single") or strength <= 0:
        raise ValueError(f"how={how!r}, strength={strength}; difference or single, and a strength above 0")
    right, wrong = right.double(), wrong.double()
    if how == "difference":
        x = torch.cat([right - wrong, wrong - right])
    else:
        x = torch.cat([torch.cat([right, wrong]), torch.ones(2 * len(right), 1, dtype=torch.float64)], 1)
    y = torch.cat([torch.ones(len(right)), -torch.ones(len(wrong))]).double()
    penalty = torch.ones(x.shape[1], dtype=torch.float64)
    penalty[right.shape[1] :] = 1e-9  # b is free

    def objective(w: Tensor) -> Tensor:
        return (penalty * w * w).sum() / 2 + strength * F.softplus(-y * (x @ w)).sum()

    w = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(100):
        p = torch.sigmoid(-y * (x @ w))
        gradient = penalty * w - strength * x.T @ (y * p)
        if gradient.abs().amax() < 1e-9 * max(1.0, strength):
            break
        curve = torch.diag(penalty) + strength * (x.T * (p * (1 - p))) @ x
        step, size = torch.linalg.solve(curve, gradient), 1.0
        while objective(w - size * step) > objective(w) and size > 1e-8:
            size /= 2
        w = w - size * step
    return Probe(w[: right.shape[1]], float(w[right.shape[1]]) if how == "single" else 0.0)


@dataclass(frozen=True, eq=False)
class FewHeads:
    """order: features from the most telling on. accuracy: by how many of them a probe has, on texts that it has not
    seen; of all of them under 0."""

    order: list[int]
    accuracy: dict[int, float]


def few_heads(
    right: Tensor, wrong: Tensor, counts: Sequence[int] = (1, 2, 4, 8, 16, 32), *, folds: int = 5,
    held_out: float = 0.1, seed: int = 0, strength: float = 1.0,
) -> FewHeads:  # fmt: skip
    """How few heads carry the decision: the highest |Σ w| over folds are fitted again alone, scored on other texts."""
    check_whole(folds=folds)
    n = len(right)
    test = max(1, round(held_out * n))
    if not 0 < held_out < 1 or folds < 2 or n - test < folds or not counts or min(counts) < 1:
        raise ValueError(f"{n} texts, {test} of them held out, do not make {folds} folds; counts are 1 or more")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    kept, rest = order[test:], order[:test]
    total = torch.zeros(right.shape[1], dtype=torch.float64)
    for fold in range(folds):
        part = torch.cat([kept[at::folds] for at in range(folds) if at != fold])
        total += fit_probe(right[part], wrong[part], strength=strength).weight
    best = total.abs().argsort(descending=True, stable=True)
    found = {}
    for count in (0, *counts):
        some = best[:count] if count else best
        probe = fit_probe(right[kept][:, some], wrong[kept][:, some], strength=strength)
        found[count] = probe.accuracy(right[rest][:, some], wrong[rest][:, some])
    return FewHeads(best.tolist(), found)


__all__ = ["FewHeads", "PairFeatures", "Probe", "few_heads", "fit_probe", "mas", "pair_features"]
