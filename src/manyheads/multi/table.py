"""A table of text, numbers and gaps, as features and as labels of many heads."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.multi.head import Head, read_head
from manyheads.multi.heads import Classification, Density, Hypotheses, Ordinal, Regression
from manyheads.multi.model import naming
from manyheads.multi.readers import Encoded, Picture, Words, row_of

GAPS = {"", "na", "n/a", "nan", "null", "none", "?"}
"""Cells that say nothing, in any case."""

MOST = 50
"""Texts of a column that are told apart, the most frequent ones; and, up to so many, numbers that may be classes."""


def read_table(path: str | Path) -> dict[str, list[str | None]]:
    """Columns by name, of a file with commas, semicolons or tabs and a line of names; None where a cell is a gap."""
    raw = Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: this is not UTF-8; save the table as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.split("\n", 1)[0].count))
    try:
        rows = [row for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if len(rows) < 2:
        raise ValueError(f"{path}: a table needs a line of names and at least one row")
    names = [name.strip() for name in rows[0]]
    for name in names:
        if not name or names.count(name) > 1:
            raise ValueError(f"{path}: two columns are named {name!r}" if name else f"{path}: a column has no name")
    for number, row in enumerate(rows[1:]):
        if len(row) != len(names):
            raise ValueError(f"{path}: {row_of(number)} has {len(row)} of {len(names)} cells")
    cells = [
        [None if cell.strip().lower() in GAPS else cell.strip() for cell in column]
        for column in zip(*rows[1:], strict=True)
    ]
    return dict(zip(names, cells, strict=True))


def parse_targets(text: str | Mapping[str, str | None]) -> dict[str, str | None]:
    """`age:regression,kind` as {"age": "regression", "kind": None}, None where the column is to say."""
    if isinstance(text, Mapping):
        return dict(text)
    found: dict[str, str | None] = {}
    for each in re.split(r",(?![^()]*\))", text):  # commas outside of options
        name, sign, line = each.rpartition(":")
        name, line = (name, line) if sign else (each, "")
        name = name.strip()
        if not name:
            raise ValueError(f"a target without a name in {text!r}")
        if name in found:
            raise ValueError(f"head {name!r}: two heads have this name")
        found[name] = line.strip() or None
    return found


def _number(cell: str | None) -> float:
    if cell is None:
        return math.nan
    value = float(cell)
    if not math.isfinite(value):
        raise ValueError
    return value


def _numbers(cells: Sequence[str | None]) -> Tensor:
    """float64 `[rows]`, NaN for a gap."""
    found = []
    for row, cell in enumerate(cells):
        try:
            found.append(_number(cell))
        except ValueError:
            raise ValueError(f"{row_of(row)}: {cell!r} is no finite number") from None
    return torch.tensor(found, dtype=torch.float64)


def _numeric(cells: Iterable[str | None]) -> bool:
    """Whether all that is there are numbers, and there is any."""
    try:
        return not all([math.isnan(_number(cell)) for cell in cells])  # a list: no cell is left unread
    except ValueError:
        return False


def stray(cells: Sequence[str | None]) -> str | None:
    """Where the first text stands in a column that else holds numbers for the most part."""
    known = [(row, cell) for row, cell in enumerate(cells) if cell is not None]
    texts = [(row, cell) for row, cell in known if not _numeric([cell])]
    if not texts or 2 * len(texts) >= len(known):
        return None
    return f"{len(texts)} of {len(known)} cells are no numbers, the first in {row_of(texts[0][0])}, {texts[0][1]!r}"


def _by_value(texts: Iterable[str]) -> list[str]:
    every = sorted(set(texts))
    return sorted(every, key=float) if _numeric(every) else every


@dataclass(frozen=True)
class Column:
    """How a column becomes features: a number, centred and scaled, with a gap marked; or one of several texts."""

    name: str
    texts: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, name: str, cells: Sequence[str | None]) -> Column:
        known = [cell for cell in cells if cell is not None]
        if _numeric(cells):
            values = torch.tensor([float(cell) for cell in known], dtype=torch.float64)
            scale = float(values.std(correction=0))
            return cls(name, mean=float(values.mean()), scale=scale if scale > 0 else 1.0)
        counts = sorted({text: known.count(text) for text in set(known)}.items(), key=lambda pair: (-pair[1], pair[0]))
        return cls(name, texts=tuple(text for text, _ in counts[:MOST]))

    @property
    def width(self) -> int:
        return len(self.texts) or 2

    def features(self, cells: Sequence[str | None]) -> Tensor:
        """`[rows, width]`; a gap, and a text that was not seen before, is zeros (and a 1 that says so, for numbers)."""
        if self.texts:
            place = {text: index for index, text in enumerate(self.texts)}
            rows = torch.zeros(len(cells), len(self.texts))
            for row, cell in enumerate(cells):
                if cell in place:
                    rows[row, place[cell]] = 1  # type: ignore[index]
            return rows
        try:
            values = (_numbers(cells) - self.mean) / self.scale
        except ValueError as error:
            raise ValueError(f"column {self.name!r} holds numbers; {error}") from None
        gap = values.isnan()
        return torch.stack([values.masked_fill(gap, 0), gap.double()], 1).float()


@dataclass(frozen=True)
class Target:
    """A head and, where it tells classes, the text of each."""

    head: Head
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, line: str | None, cells: Sequence[str | None], train: Sequence[str | None]) -> Target:
        """A line may leave out what the column says: the number of classes or levels, shift and scale."""
        with naming(name):
            known = [cell for cell in cells if cell is not None]
            if not any(cell is not None for cell in train):
                raise ValueError(
                    "its label is missing everywhere" if not known else "no row that is trained on has its label"
                )
            texts = _by_value(known)
            whole = _numeric(known) and all(float(text).is_integer() for text in texts)
            if line is None:
                line = "regression" if _numeric(known) and not (whole and len(texts) <= 10) else "classification"
            kind = line.split("(")[0].strip()
            count = {"classification": "classes", "ordinal": "levels"}.get(kind)
            if count and f"{count}=" not in line:
                if len(texts) < 2:
                    raise ValueError(f"every label is {texts[0]!r}")
                line = f"{kind}({count}={len(texts)}{', ' + line.split('(', 1)[1] if '(' in line else ')'}"
            head = read_head(line)
            if isinstance(head, Classification | Ordinal) and head.reads == "rows":
                size = head.classes if isinstance(head, Classification) else head.levels
                if len(texts) > size:
                    raise ValueError(f"label {texts[-1]!r} is one of {len(texts)}, but {line} has room for {size}")
                return cls(head, tuple(texts))
            if isinstance(head, Regression | Density | Hypotheses) and head.size == 1:
                _numbers(cells)  # an error says which row of the whole table
                values = _numbers(train)
                values = values[~values.isnan()]
                spread = float(values.std(correction=0))
                return cls(replace(head, shift=float(values.mean()), scale=spread if spread > 0 else 1.0))
            raise ValueError(f"a column of a table is no label of {line}")

    def labels(self, cells: Sequence[str | None]) -> Tensor:
        if not self.classes:
            return _numbers(cells)
        place = {text: float(index) for index, text in enumerate(self.classes)}
        unknown = next((row for row, cell in enumerate(cells) if cell is not None and cell not in place), None)
        if unknown is not None:
            every = ", ".join(map(repr, self.classes))
            raise ValueError(f"{row_of(unknown)}: label {cells[unknown]!r} is none of {every}")
        return torch.tensor([math.nan if cell is None else place[cell] for cell in cells], dtype=torch.float64)


Reader = Column | Words | Encoded | Picture
READERS: dict[str, type[Any]] = {"words": Words, "encoded": Encoded, "picture": Picture}


def features_of(columns: Sequence[Reader], table: dict[str, list[str | None]]) -> Tensor:
    for column in columns:
        if column.name not in table:
            raise ValueError(f"the table has no column {column.name!r}, which the model reads")
    return torch.cat([column.features(table[column.name]) for column in columns], 1)


def columns_to_json(columns: Sequence[Reader]) -> list[dict[str, Any]]:
    kinds = {kind: {"kind": name} for name, kind in READERS.items()}
    return [kinds.get(type(column), {}) | asdict(column) for column in columns]


def columns_from_json(fields: list[dict[str, Any]]) -> list[Reader]:
    def column(kind: str | None = None, texts: Sequence[str] = (), **options: Any) -> Reader:
        return READERS[kind](**options) if kind else Column(texts=tuple(texts), **options)

    return [column(**each) for each in fields]
