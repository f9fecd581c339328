"""Data maps: how sure each head grew of each sample in training, by which tasks are told apart and grouped softly.

c[k, i] is the probability that head k gives to the true class of sample i, once an epoch; a map is its mean and
deviation so far. Tasks are clustered by the rows of their maps, u[k, c] = 1 / Σ_j (d(k, c) / d(k, j))^(2 / (m - 1)), d
the distance to centres of k-means; then a fresh model for each cluster trains on all tasks, with weights u[k, c].

Choice: a deviation after one epoch is 0 (in the authors' code it is not a number).

Source: STG-MTL (arXiv 2307.03374).
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyheads.core.check import OptionError, check_whole


class DataMap:
    """Means and deviations of what tasks say of samples, which may come in any order within an epoch."""

    def __init__(self, tasks: int, samples: int) -> None:
        check_whole(tasks=tasks, samples=samples)
        self.count, self.mean, self.square = (torch.zeros(tasks, samples, dtype=torch.float64) for _ in "nms")
        self.snapshots: list[Tensor] = []

    def update(self, samples: Tensor, sure: Tensor) -> None:
        """sure: `[tasks, n]`, probabilities of the true classes of these samples `[n]`; NaN where there is no label."""
        if sure.shape != (len(self.mean), len(samples)):
            raise ValueError(f"sure is {list(sure.shape)}, not [{len(self.mean)} tasks, {len(samples)} samples]")
        if len(samples.unique()) != len(samples):
            raise ValueError("a sample is twice in the batch")
        sure, known = sure.detach().double().cpu(), ~sure.isnan().cpu()
        at = samples.cpu()
        self.count[:, at] += known
        off = torch.where(known, sure - self.mean[:, at], 0)
        self.mean[:, at] += off / self.count[:, at].clamp_min(1)
        self.square[:, at] += torch.where(known, off * (sure - self.mean[:, at]), 0)

    def now(self) -> Tensor:
        """`[tasks, samples, 2]`: mean and deviation."""
        return torch.stack([self.mean, (self.square / (self.count - 1).clamp_min(1)).sqrt()], -1)

    def snapshot(self) -> None:
        """Keep the present map among those that `rows` compares."""
        self.snapshots.append(self.now())

    def rows(self) -> Tensor:
        """A row of each task's maps, `[tasks, snapshots · samples · 2]`."""
        return torch.stack(self.snapshots or [self.now()], 1).flatten(1)


def memberships(rows: Tensor, clusters: int, *, fuzziness: float = 1.07, seed: int = 0) -> Tensor:
    """u `[tasks, clusters]`, rows that sum to 1; the nearer fuzziness to 1, the harder."""
    check_whole(clusters=clusters)
    if clusters > len(rows) or not fuzziness > 1:
        raise OptionError(f"clusters={clusters} of {len(rows)} tasks, fuzziness={fuzziness}: 1 to {len(rows)}, above 1")
    distance = torch.cdist(rows, _centres(rows, clusters, torch.Generator().manual_seed(seed)))
    # By logarithms, as the power is large; a task on a centre is the centre's alone.
    return (-2 / (fuzziness - 1) * distance.clamp_min(1e-30).log()).softmax(-1)


def _centres(rows: Tensor, clusters: int, generator: torch.Generator, tries: int = 10) -> Tensor:
    """k-means from starts that are far apart, the best of several."""
    best, found = torch.inf, rows[:clusters]
    for _ in range(tries):
        centres = rows[torch.randint(len(rows), (1,), generator=generator)]
        while len(centres) < clusters:
            near = torch.cdist(rows, centres).amin(-1).square()
            near = near if bool(near.any()) else torch.ones_like(near)
            centres = torch.cat([centres, rows[torch.multinomial(near, 1, generator=generator)]])
        for _ in range(100):
            which = torch.cdist(rows, centres).argmin(-1)
            moved = torch.stack(
                [rows[which == c].mean(0) if bool((which == c).any()) else centres[c] for c in range(clusters)]
            )
            if torch.equal(moved, centres):
                break
            centres = moved
        cost = float(torch.cdist(rows, centres).amin(-1).square().sum())
        if cost < best:
            best, found = cost, centres
    return found
