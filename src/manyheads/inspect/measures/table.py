"""Measures over a model: one number a head, averaged over the queries of as many texts as there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyheads.inspect.ablate import Inputs, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look

Measure = Callable[[Look], Tensor]
"""Of one pass of one layer: `[B, H, T]`, or `[B, H, T, K]` for K numbers a head; not a number where undefined."""


@dataclass(frozen=True, eq=False)
class HeadTable(Mapping[int, Tensor]):
    """A measure by layer: `table[layer]` is `[H]` or `[H, K]` in float64; undefined is not a number, never zero."""

    name: str
    rows: Mapping[int, Tensor]

    def __getitem__(self, layer: int) -> Tensor:
        return self.rows[layer]

    def __iter__(self):
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def grid(self) -> Tensor:
        """`[L, H]` (or `[L, H, K]`); layers with fewer heads end in not-a-numbers."""
        most = [max(row.shape[dim] for row in self.rows.values()) for dim in range(next(iter(self.rows.values())).ndim)]
        grid = torch.full((len(self.rows), *most), torch.nan, dtype=torch.float64)
        for place, row in zip(grid, self.rows.values(), strict=True):
            place[tuple(slice(size) for size in row.shape)] = row
        return grid

    def top(self, count: int = 10) -> list[tuple[int, int, float]]:
        """(layer, head, value) of the highest heads."""
        each = [(layer, head, float(x)) for layer, row in self.rows.items() for head, x in enumerate(row) if x == x]
        return sorted(each, key=lambda one: -one[2])[:count]


@dataclass
class Sums:
    """Sums and counts of a measure by layer, in float64, so that batches add up."""

    total: dict[int, Tensor] = field(default_factory=dict)
    count: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, values: Tensor, counts: Tensor) -> None:
        """values `[B, H, T, …]`; counts bool `[B or 1, H or 1, T]`, which queries count."""
        extra = values.ndim - 3
        known = ~values.isnan() & counts.reshape(*counts.shape, *[1] * extra)
        total, count = values.double().nan_to_num(0.0).mul(known).sum((0, 2)), known.double().sum((0, 2))
        self.total[layer] = self.total.get(layer, 0) + total.cpu()
        self.count[layer] = self.count.get(layer, 0) + count.cpu()

    def table(self, name: str) -> HeadTable:
        return HeadTable(name, {layer: self.total[layer] / self.count[layer] for layer in sorted(self.total)})


def measure(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], measures: Measure | Iterable[Measure] | Mapping[str, Measure],
    layers: int | Iterable[int] | None = None, *, fewest: int = 2,
) -> dict[str, HeadTable]:  # fmt: skip
    """Run a model and average measures over its queries: a `HeadTable` by the measure's name.

    >>> measure(model, ids, [entropy, sink_mass])["entropy"].grid  # [L, H]

    Args:
        inputs: token ids, a dictionary of the model's arguments, a function that runs it, or a list of these (batches).
        measures: functions of a `Look`; options are set with `functools.partial`.
        fewest: queries that see fewer keys are left out, and so is padding. (One key has a weight of 1, whatever a head
            does.)
    """
    named = _named(measures)
    batches = batches_of(inputs)
    some = chosen(model, layers)
    sums: dict[str, Sums] = {name: Sums() for name in named}
    tokens: Tensor | None = None

    def see(look: Look) -> None:
        look.tokens = tokens
        if not look.none:
            counts = (look.visible >= fewest) & look.axis.validity[:, None]
        else:
            counts = look.axis.validity[:, None]
        for name, function in named.items():
            if not look.none or not getattr(function, "needs_weights", True):
                sums[name].add(look.layer, function(look), counts)

    with torch.no_grad(), watching(some, see):
        for batch in batches:
            tokens = tokens_of(batch)
            run(model, batch)
    return {name: each.table(name) for name, each in sums.items() if each.total}


def _named(measures: Measure | Iterable[Measure] | Mapping[str, Measure]) -> dict[str, Measure]:
    if isinstance(measures, Mapping):
        return dict(cast(Mapping[str, Measure], measures))
    each: list[Any] = [measures] if callable(measures) else list(measures)
    return {getattr(one, "__name__", None) or one.func.__name__: one for one in each}


def tokens_of(inputs: Any) -> Tensor | None:
    """The token ids among a model's inputs."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    return ids if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point() else None


def known_tokens(look: Look) -> Tensor:
    """Ids of the queries' tokens `[B, T]`, which are the keys' too.

    Raises:
        ValueError: they are not known, or there are keys of other tokens.
    """
    ids = look.tokens
    if ids is None:
        raise ValueError(f"{look.name}: a measure of tokens needs token ids among the model's inputs")
    known, keys = look.axis.time, look.mask.k.time
    if known.shape[1] != ids.shape[1] or keys.min() < known.min() or keys.max() > known.max():
        raise ValueError(f"{look.name} has keys of other tokens than the {ids.shape[1]} given; pass the text whole")
    return ids


__all__ = ["HeadTable", "Measure", "Sums", "known_tokens", "measure", "tokens_of"]
