"""What `compare` found, as values and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One compared spec.

    Attributes:
        spec: as given; resolved: with what it implies. hidden: width of the feed-forward, or of one of its experts.
        parameters: counted. flops: of training, a token. cache: bytes a token, from the parts' costs; cache_measured:
            the same from the tensors that a cache holds.
        off: how far the figure that is to be equal is from the base's, a share of it; None where nothing is.
        curves: held-out loss, nats a token, for each seed at each step of the grid (NaN once it diverged).
        step_ms: time of a training step. tokens_per_second: decoded, one sequence.
        seconds: of training, all seeds.
    """

    spec: str
    resolved: str
    dim: int
    parameters: int
    flops: float
    cache: float
    cache_measured: float
    off: float | None
    curves: tuple[tuple[float, ...], ...]
    step_ms: float
    tokens_per_second: float
    seconds: float
    hidden: int | None = None

    @property
    def losses(self) -> tuple[float, ...]:
        """The last loss of each seed."""
        return tuple(curve[-1] for curve in self.curves)

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return mean(self.losses)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None of one."""
        return _deviation(self.losses)


@dataclass(frozen=True)
class Comparison:
    """Entries in the order given; the first is the base.

    Attributes:
        options: everything that the result depends on. grid: the steps of the curves.
        seconds: of training, all runs. out: the folder. report: the page, None without plotly.
    """

    entries: tuple[Entry, ...]
    grid: tuple[int, ...]
    options: dict[str, Any]
    text: str
    date: str
    machine: str
    seconds: float
    notes: tuple[str, ...]
    out: str
    report: str | None

    @property
    def base(self) -> Entry:
        return self.entries[0]

    def difference(self, entry: Entry) -> tuple[float, float | None]:
        """Mean over seeds of the loss minus the base's of the same seed, and its standard error (None of one seed)."""
        pairs = [loss - base for loss, base in zip(entry.losses, self.base.losses, strict=True)]
        deviation = _deviation(pairs)
        return mean(pairs), None if deviation is None else deviation / math.sqrt(len(pairs))

    def to_json(self) -> dict[str, Any]:
        """Everything, and of each entry what follows from its curves."""
        found = asdict(self)
        for entry, made in zip(self.entries, found["entries"], strict=True):
            difference, error = (None, None) if entry is self.base else self.difference(entry)
            made |= {"losses": entry.losses, "loss": entry.loss, "spread": entry.spread}
            made |= {"difference": difference, "difference_error": error}
        return _finite(found)

    @classmethod
    def read(cls, file: Path) -> Comparison:
        """From what `to_json` gave.

        Raises:
            ValueError: the file is something else.
        """
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            entries = []
            for made in found["entries"]:
                fields: dict[str, Any] = {name: made[name] for name in Entry.__dataclass_fields__ if name != "hidden"}
                curves = tuple(tuple(math.nan if x is None else x for x in curve) for curve in made["curves"])
                entries.append(Entry(**{**fields, "curves": curves, "hidden": made.get("hidden")}))
            known: dict[str, Any] = {name: found[name] for name in cls.__dataclass_fields__}
            known |= {"entries": tuple(entries), "grid": tuple(found["grid"]), "notes": tuple(found["notes"])}
            return cls(**known)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{file} was not written by manyheads compare") from error


def _deviation(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: null instead."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
