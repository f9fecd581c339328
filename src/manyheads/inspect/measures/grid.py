"""Measures of models whose tokens stand on a grid (patches of an image, frames of a video): how far heads look on it,
what removing a head does to a classifier by several counts, and which patterns the maps of all heads fall into.

Source: Li et al. 2023 (How Does Attention Work in Vision Transformers?), arXiv 2303.13731. Its definitions were read in
summary only; the distance (largest step along any side), the set of counts and the linear embedding are ASSUMED.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.mask import Axis, cols_of, rows_of
from manyheads.inspect.ablate import How, Inputs, ablate, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import HeadTable, Measure


@dataclass(frozen=True)
class Grid:
    """Where tokens stand: `first` special tokens, then one for each place of a grid, row by row, then special ones.

    shape: (rows, columns) of an image, (n,) of a text, (frames, rows, columns) of a video.
    """

    shape: tuple[int, ...]
    first: int = 1

    def __post_init__(self) -> None:
        if not self.shape or any(side < 1 for side in self.shape) or self.first < 0:
            raise ValueError(f"Grid({self.shape}, first={self.first}); sides are 1 or more, first is 0 or more")

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def hops(self) -> int:
        """How many distances there are, 0 included."""
        return max(self.shape)

    def on(self, axis: Axis) -> Tensor:
        """Which tokens are on the grid, bool `[B or 1, T]`."""
        return (axis.time >= self.first) & (axis.time < self.first + self.size)

    def at(self, axis: Axis) -> Tensor:
        """Coordinates `[B or 1, T, sides]`; of special tokens they mean nothing."""
        at, found = (axis.time - self.first).clamp(0, self.size - 1), []
        for side in reversed(self.shape):
            found.append(at % side)
            at = at // side
        return torch.stack(found[::-1], -1)

    def hop(self, q: Axis, k: Axis) -> Tensor:
        """The largest step along any side from a query to a key, `[B or 1, 1, T, S]`; -1 where either is special."""
        steps = (self.at(q)[:, None, :, None] - self.at(k)[:, None, None]).abs().amax(-1)
        return steps.masked_fill(~(rows_of(self.on(q)) & cols_of(self.on(k))), -1)

    def ring_sizes(self) -> Tensor:
        """How many places are k hops from each, `[size, hops]`; a row adds up to `size`."""
        axis = Axis(self.size, self.first)
        return F.one_hot(self.hop(axis, axis)[0, 0], self.hops).sum(1)

    @classmethod
    def of(cls, model: nn.Module) -> Grid:
        """Of a transformers vision model, by its config.

        Raises:
            ValueError: the config does not say.
        """
        config: Any = getattr(model, "config", None)
        config = getattr(config, "vision_config", None) or config
        image, patch = (_pair(getattr(config, name, None)) for name in ("image_size", "patch_size"))
        if image is None or patch is None:
            raise ValueError(
                f"a {type(model).__name__} does not say its image and patch sizes; give Grid((rows, columns))"
            )
        base: Any = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
        table = getattr(getattr(base, "embeddings", None), "position_embeddings", None)
        shape = (image[0] // patch[0], image[1] // patch[1])
        first = 1 if not isinstance(table, Tensor) else max(0, table.shape[1] - prod(shape))
        return cls(shape, first)


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) and len(size) == 2 else None


class _Ring:
    """The rule of keys on the grid that are from `nearest` to `farthest` hops from a query on it."""

    def __init__(self, grid: Grid, nearest: int, farthest: int | None = None) -> None:
        self.grid, self.nearest, self.farthest = grid, nearest, nearest if farthest is None else farthest

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        hop = self.grid.hop(q, k)
        return (hop >= self.nearest) & (hop <= self.farthest)


def _of_patches(look: Look, grid: Grid, values: Tensor, patches: bool = True) -> Tensor:
    """What belongs to queries on the grid (or to special ones) alone."""
    keys = look.mask.k
    if keys.length < grid.first + grid.size:
        raise ValueError(
            f"{look.name} has {keys.length} keys, fewer than the {grid.first} + {grid.size} tokens of {grid}"
        )
    on = grid.on(look.axis)[:, None]
    on = (on if patches else ~on).reshape(*on.shape, *[1] * (values.ndim - 3))
    return values.masked_fill(~on, torch.nan)


def hop_profile(grid: Grid, *, per_place: bool = False) -> Measure:
    """A measure `[B, H, T, K]`: P(k) = Σ A_ij over the places j that are k hops from patch i, k = 0 … K - 1.

    With the mass on special tokens, P adds up to 1. per_place: over how many places of the grid are so far from i.
    Averaged over the patches alone.
    """

    def profile(look: Look) -> Tensor:
        found = torch.stack([look.mass(_Ring(grid, k)).nan_to_num(0.0) for k in range(grid.hops)], -1)
        if per_place:
            sizes = grid.ring_sizes().to(found)
            at = (look.axis.time - grid.first).clamp(0, grid.size - 1)
            found = (found / sizes[at][:, None].clamp_min(1)).masked_fill(sizes[at][:, None] == 0, torch.nan)
        return _of_patches(look, grid, found)

    return profile


def mean_hop(grid: Grid) -> Measure:
    """A measure: Σ_k k P(k), how many hops away a patch looks in the mean; special tokens count nothing."""
    whole = hop_profile(grid)

    def hops(look: Look) -> Tensor:
        found = whole(look)
        return (found * torch.arange(grid.hops).to(found)).sum(-1)

    return hops


def near_mass(grid: Grid, radius: int = 1) -> Measure:
    """A measure: the mass of a patch on places at most `radius` hops away."""
    return lambda look: _of_patches(look, grid, look.mass(_Ring(grid, 0, radius)).nan_to_num(0.0))


def special_mass(grid: Grid, *, patches: bool = True) -> Measure:
    """A measure: the mass on special tokens (CLS, registers) of queries that are patches, or of special ones.

    The mass of special tokens on patches is 1 - `special_mass(grid, patches=False)`.
    """

    def mass(look: Look) -> Tensor:
        found = look.mass(lambda q, k: cols_of(~grid.on(k)))
        return _of_patches(look, grid, found.nan_to_num(0.0), patches)

    return mass


def removals(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], labels: Tensor | Sequence[Tensor],
    layers: int | Iterable[int] | None = None, *, how: How = "zero", reference: Inputs | None = None,
    by_class: bool = False,
) -> dict[str, HeadTable]:  # fmt: skip
    """What a classifier feels when a head is taken out, by several counts, the mean over inputs; one pass a head.

    `probability` p[y] - p_h[y]; `loss` CE_h - CE; `divergence` JSD(p, p_h) in [0, ln 2]; `accuracy` what it drops;
    `state` 1 - cos of the first token's final state (where the model has a base model that returns states). y is the
    true class. p the probabilities, p_h those without the head. Above 0: the head helps (all but `divergence` and
    `state`, which only say that it matters).

    Args:
        labels: the true classes `[B]`, of each batch. by_class: tables `[H, classes]`; classes without inputs are
            undefined.
    """
    batches = batches_of(inputs)
    given = [labels] if isinstance(labels, Tensor) else list(labels)
    if len(given) != len(batches) or any(y.ndim != 1 for y in given):
        raise ValueError(f"labels are one tensor [B] for each batch: {len(given)} for {len(batches)} batches")
    truth = torch.cat(given).cpu()
    logits, states = _classified(model, batches)
    if len(logits) != len(truth):
        raise ValueError(f"{len(truth)} labels for {len(logits)} inputs")
    p, loss = logits.softmax(-1), F.cross_entropy(logits, truth, reduction="none")
    rows: dict[str, dict[int, Tensor]] = {}
    for layer in chosen(model, layers):
        found: dict[str, list[Tensor]] = {}
        for head in range(layer.heads):
            with ablate(model, {layer.number: [head]}, how, reference=reference):
                without, changed = _classified(model, batches)
            p_h = without.softmax(-1)
            mixed = torch.special.entr((p + p_h) / 2).sum(-1)
            each = {
                "probability": (p - p_h).gather(1, truth[:, None])[:, 0],
                "loss": F.cross_entropy(without, truth, reduction="none") - loss,
                "divergence": (mixed - (torch.special.entr(p) + torch.special.entr(p_h)).sum(-1) / 2).clamp_min(0),
                "accuracy": (logits.argmax(-1) == truth).double() - (without.argmax(-1) == truth).double(),
            }  # fmt: skip
            if states is not None and changed is not None:
                each["state"] = 1 - F.cosine_similarity(states, changed, dim=-1)
            for name, values in each.items():
                found.setdefault(name, []).append(_mean(values, truth, p.shape[-1] if by_class else None))
        for name, values in found.items():
            rows.setdefault(name, {})[layer.number] = torch.stack(values)
    return {name: HeadTable(name, each) for name, each in rows.items()}


def _mean(values: Tensor, truth: Tensor, classes: int | None) -> Tensor:
    if classes is None:
        return values.mean()
    return torch.stack([values[truth == c].mean() for c in range(classes)])


def _classified(model: nn.Module, batches: Sequence[Inputs]) -> tuple[Tensor, Tensor | None]:
    """Logits `[N, classes]` and the first tokens' final states `[N, D]`, if they can be seen."""
    base: Any = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    logits, states = [], []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        x = getattr(out, "last_hidden_state", None)
        if isinstance(x, Tensor) and x.ndim == 3:
            states.append(x[:, 0].double().cpu())

    hook = base.register_forward_hook(keep) if isinstance(base, nn.Module) and base is not model else None
    try:
        with torch.no_grad():
            for batch in batches:
                out = run(model, batch)
                found = getattr(out, "logits", out)
                if not isinstance(found, Tensor) or found.ndim != 2:
                    raise ValueError(f"a {type(model).__name__} returns no logits [B, classes]")
                logits.append(found.double().cpu())
    finally:
        if hook is not None:
            hook.remove()
    return torch.cat(logits), torch.cat(states) if len(states) == len(batches) else None


def ranks(table: HeadTable) -> HeadTable:
    """Heads by rank over all layers, 1 the highest; heads of equal value share their mean rank."""
    values = torch.cat([row.flatten() for row in table.values()])
    found = 1 + (values[None] > values[:, None]).double().sum(-1)
    found = found + ((values[None] == values[:, None]).double().sum(-1) - 1) / 2
    found = found.masked_fill(values.isnan(), torch.nan)
    split = found.split([row.numel() for row in table.values()])
    return HeadTable(
        f"rank by {table.name}", {n: x.view_as(row) for (n, row), x in zip(table.items(), split, strict=True)}
    )


def agreement(tables: Mapping[str, HeadTable]) -> Tensor:
    """Spearman's correlation of each two tables, `[M, M]`: how alike they rank the heads. Undefined without spread."""
    each = torch.stack([torch.cat([row.flatten() for row in ranks(table).values()]) for table in tables.values()])
    each = each[:, ~each.isnan().any(0)]
    each = each - each.mean(1, keepdim=True)
    size = each.norm(dim=1)
    size = torch.where(size > 0, size, torch.nan)
    return each @ each.T / size[:, None] / size


@dataclass(frozen=True, eq=False)
class Patterns:
    """Maps of all heads as points of a plane (or of a few dimensions), in groups.

    heads: (layer, head, which input) of each map. mean `[F]`, directions `[m, F]` (orthonormal), places `[N, m]`: map n
    is about mean + places[n] @ directions. groups `[N]`: numbered from the largest on. shape: of a map.
    """

    heads: list[tuple[int, int, int]]
    mean: Tensor
    directions: Tensor
    places: Tensor
    groups: Tensor
    shape: tuple[int, ...]

    def maps(self) -> Tensor:
        """The maps as the directions give them back, `[N, *shape]`."""
        return (self.mean + self.places @ self.directions).unflatten(-1, self.shape)

    def typical(self) -> Tensor:
        """The mean map of each group, `[groups, *shape]`."""
        whole = self.maps()
        return torch.stack([whole[self.groups == group].mean(0) for group in range(int(self.groups.max()) + 1)])


def patterns(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], grid: Grid, layers: int | Iterable[int] | None = None, *,
    centred: bool = True, directions: int = 2, groups: int = 8, seed: int = 0,
) -> Patterns:  # fmt: skip
    """Every map of every head and image as a point, and groups of alike ones: looks left, at a ring, at a row, at all.

    centred: what patches give to the places around them, the mean over patches, `[2g - 1]` a side: a map is then its
    pattern whatever it is about. Else the map of patches to patches as it is, `[n, n]`. Directions are principal ones,
    groups k-means in their space.
    """
    some = [layer for layer in chosen(model, layers) if not layer.none]
    vectors: list[Tensor] = []
    heads: list[tuple[int, int, int]] = []
    seen = done = 0
    shape = tuple(2 * side - 1 for side in grid.shape) if centred else (grid.size, grid.size)

    def see(look: Look) -> None:
        nonlocal seen
        _of_patches(look, grid, look.read[..., 0])
        rows = [int(row) for row in grid.on(look.axis)[0].nonzero()]
        whole = torch.cat([tile.weights for tile in look.weights(rows=rows)], 2)[..., grid.on(look.mask.k)[0]]
        found = (_around(whole, grid) if centred else whole).double().flatten(2).cpu()
        seen = len(found)
        for (image, head), vector in zip(((i, h) for i in range(seen) for h in range(found.shape[1])),
                                         found.flatten(0, 1), strict=True):  # fmt: skip
            heads.append((look.layer, head, done + image))
            vectors.append(vector)

    with torch.no_grad(), watching(some, see):
        for batch in batches_of(inputs):
            run(model, batch)
            done += seen
    x = torch.stack(vectors)
    if not 1 <= directions <= min(x.shape) or not 1 <= groups <= len(x):
        raise ValueError(
            f"{len(x)} maps of {x.shape[1]} numbers have 1 to {min(x.shape)} directions and 1 to {len(x)} groups, "
            f"not {directions} and {groups}"
        )
    mean = x.mean(0)
    v = torch.linalg.svd(x - mean, full_matrices=False).Vh[:directions]
    at = (x - mean) @ v.T
    return Patterns(heads, mean, v, at, kmeans(at, groups, seed), shape)


def _around(maps: Tensor, grid: Grid) -> Tensor:
    """`[B, H, n, n]` to the mean over patches of what they give to each step away from them, `[B, H, (2g - 1)…]`."""
    at = grid.at(Axis(grid.size, grid.first, device=maps.device))[0]
    steps = at[None] - at[:, None] + torch.tensor(grid.shape, device=maps.device) - 1  # [n, n, sides], from 0
    place = steps[..., 0]
    for side, n in enumerate(grid.shape[1:], 1):
        place = place * (2 * n - 1) + steps[..., side]
    wide = prod(2 * n - 1 for n in grid.shape)
    found = maps.new_zeros(*maps.shape[:2], wide)
    return found.index_add(2, place.flatten(), maps.flatten(2)) / grid.size


def kmeans(x: Tensor, groups: int, seed: int = 0, rounds: int = 100) -> Tensor:
    """Which group each row of x `[N, m]` is in, `[N]`, from the largest group on; starts far apart (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    centres = x[torch.randint(len(x), (1,), generator=generator)]
    while len(centres) < groups:
        far = torch.cdist(x, centres).amin(1).square()
        if not far.any():
            break
        centres = torch.cat([centres, x[torch.multinomial(far, 1, generator=generator)]])
    group = torch.cdist(x, centres).argmin(1)
    for _ in range(rounds):
        whole = torch.stack([x[group == c].mean(0) if (group == c).any() else centres[c] for c in range(len(centres))])
        new = torch.cdist(x, whole).argmin(1)
        if torch.equal(new, group) and torch.equal(whole, centres):
            break
        group, centres = new, whole
    order = torch.bincount(group, minlength=len(centres)).argsort(descending=True, stable=True)
    return order.argsort()[group]


__all__ = [
    "Grid", "Patterns", "agreement", "hop_profile", "kmeans", "mean_hop", "near_mass", "patterns", "ranks", "removals",
    "special_mass",
]  # fmt: skip
