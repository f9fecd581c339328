"""Heads that look at the region of an image that the model is about to describe, and where they look as it writes.

Source: arXiv 2606.14703 (gaze heads).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from manyheads.core.mask import cols_of
from manyheads.inspect.ablate import Heads, Inputs, batches_of, chosen_heads, run
from manyheads.inspect.capture import watching
from manyheads.inspect.edit import Tokens, check_maps, check_tokens, places
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import HeadTable


def panels(rows: int, columns: int, count: int, first: int = 0) -> list[list[int]]:
    """The tokens of `count` panels side by side, of an image of rows x columns tokens from token `first` on.

    Each token is in one panel, each panel has a column at least.
    """
    if not 1 <= count <= columns or rows < 1 or first < 0:
        raise ValueError(
            f"{count} panels of an image of {rows} x {columns} tokens from {first}; a column each at least"
        )
    bounds = [round(at * columns / count) for at in range(count + 1)]
    return [
        [first + row * columns + column for row in range(rows) for column in range(start, stop)]
        for start, stop in pairwise(bounds)
    ]


def box(rows: int, columns: int, corners: tuple[float, float, float, float], first: int = 0) -> list[int]:
    """The tokens whose middle is in a box (top, left, bottom, right), in shares of the image's height and width."""
    top, left, bottom, right = corners
    found = [
        first + row * columns + column
        for row in range(rows)
        for column in range(columns)
        if top <= (row + 0.5) / rows < bottom and left <= (column + 0.5) / columns < right
    ]
    if not found:
        raise ValueError(
            f"no token of {rows} x {columns} has its middle in the box {corners} (top, left, bottom, right)"
        )
    return found


def check_regions(regions: Sequence[Tokens]) -> list[Tokens]:
    """Two or more sets of tokens."""
    if len(regions) < 2:
        raise ValueError(f"{len(regions)} regions; two or more, to look at one rather than another")
    for at, region in enumerate(regions):
        check_tokens(region, f"region {at}")
    return list(regions)


@dataclass(frozen=True, eq=False)
class Gaze:
    """matrix: G[k, r] of each head, `[H, R, R]`: how much the last token gives to region r when asked about region k,
    not scaled to what it gives the image at all. scores: g = Σ_k G[k, k] / R, in [0, 1], high for heads that look where
    they are asked to and at little else."""

    matrix: HeadTable
    scores: HeadTable

    def heads(self, count: int = 100) -> dict[int, list[int]]:
        """The highest heads by layer, as `look_at` and `ablate` take them."""
        found: dict[int, list[int]] = {}
        for layer, head, _ in self.scores.top(count):
            found.setdefault(layer, []).append(head)
        return {layer: sorted(found[layer]) for layer in sorted(found)}


def gaze(
    model: nn.Module, prompts: Sequence[Inputs | Sequence[Inputs]], regions: Sequence[Tokens],
    layers: int | Iterable[int] | None = None,
) -> Gaze:  # fmt: skip
    """Which heads look at the region that a prompt asks about.

    Args:
        prompts: those (one batch or several) that ask about region 0, those about region 1, …
        regions: R sets of tokens, the same in all prompts (bool `[B, N]` where sequences differ).
    """
    sets = check_regions(regions)
    if len(prompts) != len(sets):
        raise ValueError(f"{len(prompts)} groups of prompts for {len(sets)} regions; one about each")
    some = [layer for layer in chosen(model, layers) if not layer.none]
    total = {layer.number: torch.zeros(layer.queries, len(sets), len(sets), dtype=torch.float64) for layer in some}
    asked, count = 0, [0] * len(sets)

    def see(look: Look) -> None:
        total[look.layer][:, asked] += last_masses(look, sets).double().sum(0).cpu()
        if look.layer == some[0].number:
            count[asked] += len(look.read)

    with torch.no_grad(), watching(some, see):
        for asked, batches in enumerate(prompts):  # noqa: B007  what `see` reads
            for batch in batches_of(batches):
                run(model, batch)
    over = torch.tensor(count, dtype=torch.float64)[:, None]
    matrix = {number: each / over for number, each in total.items()}
    scores = {number: each.diagonal(dim1=1, dim2=2).mean(-1) for number, each in matrix.items()}
    return Gaze(HeadTable("gaze matrix", matrix), HeadTable("gaze", scores))


def last_masses(look: Look, regions: Sequence[Tokens], *, sized: bool = False) -> Tensor:
    """What the last token of each sequence gives to each region, `[B, H, R]`; sized: times the length of the values."""
    valid = look.axis.validity.expand(len(look.read), look.axis.length)
    last = torch.where(valid, torch.arange(valid.shape[1], device=valid.device), -1).amax(-1).clamp_min(0)
    rows = sorted(set(last.tolist()))
    weights = torch.cat([tile.weights for tile in look.weights(rows=rows)], 2)
    at = torch.tensor([rows.index(row) for row in last.tolist()], device=weights.device)
    weights = weights[torch.arange(len(weights), device=weights.device), :, at]  # [B, H, S]
    if sized:
        size = look.call.whole.v.norm(dim=-1)
        weights = weights * size.repeat_interleave(weights.shape[1] // size.shape[1], 1)
    return torch.stack([(weights * cols_of(places(r, look.mask.k))[:, 0]).sum(-1) for r in regions], -1)


@dataclass
class Trajectory:
    """Where heads look, pass by pass (the prompt, then each token). heads: (layer, head)."""

    heads: list[tuple[int, int]]
    seen: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def masses(self) -> Tensor:
        """`[passes, B, heads, R]`."""
        return torch.cat([torch.stack(each) for each in self.seen.values()], 2)

    def looks_at(self) -> Tensor:
        """The region that has most, over all heads, `[passes, B]`."""
        return self.masses.sum(2).argmax(-1)


@contextmanager
def trajectory(
    model: nn.Module, heads: Heads, regions: Sequence[Tokens], *, sized: bool = False
) -> Iterator[Trajectory]:  # fmt: skip
    """Follow what heads give to regions at the last token of every pass. sized: weights times the length of values.

    >>> with trajectory(model, found.heads(20), regions) as path:
    ...     model.generate(ids)
    >>> path.looks_at()
    """
    sets, some = check_regions(regions), chosen_heads(model, heads)
    some.sort(key=lambda one: one[0].number)
    check_maps([layer for layer, _ in some])
    picked = {layer.number: of for layer, of in some}
    path = Trajectory([(layer.number, head) for layer, of in some for head in of])
    path.seen = {layer.number: [] for layer, _ in some}

    def see(look: Look) -> None:
        path.seen[look.layer].append(last_masses(look, sets, sized=sized)[:, picked[look.layer]].detach().cpu())

    with watching([layer for layer, _ in some], see):
        yield path


__all__ = ["Gaze", "Trajectory", "box", "check_regions", "gaze", "last_masses", "panels", "trajectory"]
