"""Train one trunk with a head for each of several columns of a table; predict with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.convert.resume import write_text
from manyheads.core.check import OptionError, check_share, check_whole, is_number
from manyheads.multi.calibration import calibration
from manyheads.multi.folder import HEADS, load, reading, save, saved
from manyheads.multi.head import from_fields
from manyheads.multi.heads import Regression
from manyheads.multi.loop import fit, measure, parameters, single_width
from manyheads.multi.model import MultiHead, naming
from manyheads.multi.readers import Encoded, Picture, Words, located
from manyheads.multi.table import (
    MOST,
    Column,
    Reader,
    Target,
    columns_from_json,
    columns_to_json,
    features_of,
    parse_targets,
    read_table,
    stray,
)

RESULT = "result.json"


def make_trunk(inputs: int, width: int, layers: int, dropout: float) -> nn.Module:
    blocks: list[nn.Module] = []
    for layer in range(layers):
        blocks += [nn.Linear(width if layer else inputs, width), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*blocks)


@dataclass
class TableModel:
    """A model with what it needs to read a table."""

    model: MultiHead
    columns: list[Reader]
    targets: dict[str, Target]
    trunk: dict[str, Any]

    def save(self, folder: str | Path) -> None:
        classes = {name: list(target.classes) for name, target in self.targets.items()}
        save(self.model, folder, columns=columns_to_json(self.columns), classes=classes, trunk=self.trunk)

    @classmethod
    def load(cls, folder: str | Path) -> TableModel:
        """Raises `ValueError` where a file of the folder is damaged, or not of a table."""
        told = saved(folder)
        if "columns" not in told:
            raise ValueError(f"{folder} holds a model of something else than a table")
        with reading(Path(folder) / HEADS):
            heads = {
                name: from_fields({k: v for k, v in each.items() if k != "width"})
                for name, each in told["heads"].items()
            }
            columns = columns_from_json(told["columns"])
            wide, inputs = sum(column.width for column in columns), told["trunk"]["inputs"]
            if wide != inputs:
                raise ValueError(f"its columns are {wide} features, and its trunk reads {inputs}")
            model = MultiHead(make_trunk(**told["trunk"]), heads, width=told["trunk"]["width"])
            targets = {name: Target(head, tuple(told["classes"][name])) for name, head in heads.items()}
        load(model, folder)
        return cls(model.eval(), columns, targets, told["trunk"])

    def read(self, path: str | Path, folder: str | Path | None = None) -> dict[str, list[str | None]]:
        """A table as this model reads it; pictures lie in `folder`, by default the table's own."""
        pictures = [column.name for column in self.columns if isinstance(column, Picture)]
        return located(read_table(path), pictures, Path(path).parent if folder is None else folder)

    def labels(self, table: dict[str, list[str | None]], rows: slice | Tensor = slice(None)) -> dict[str, Tensor]:
        """The labels that a table has."""
        found = {}
        for name, target in self.targets.items():
            if name in table:
                with naming(name):
                    found[name] = target.labels(table[name])[rows]
        return found

    def predict(self, table: dict[str, list[str | None]]) -> dict[str, list[Any]]:
        """Columns of what each head says; of classes also how likely, of numbers how sure where the head says so."""
        x = features_of(self.columns, table)
        with torch.no_grad():
            outputs = self.model.eval()(x).outputs
        said: dict[str, list[Any]] = {}
        for name, output in outputs.items():
            target, head = self.targets[name], self.targets[name].head
            found = head.predict(output).tolist()
            said[name] = (
                [target.classes[each] if each < len(target.classes) else None for each in found]
                if target.classes
                else found
            )
            likely = head.likely(output)
            if likely is not None:
                said[f"{name} (probability)"] = likely.tolist()
            elif isinstance(head, Regression) and head.uncertainty:
                said[f"{name} (deviation)"] = head.deviation(output).tolist()
        return said


@dataclass(frozen=True)
class Single:
    """What models of one head are, and how right: as wide as lets all of them have the parameters of the one of all.

    heads: metrics on held-out rows and the epoch of the best weights, by head; None where no held-out row has a label.
    """

    width: int
    parameters: int
    heads: dict[str, dict[str, Any] | None]


def train_singles(
    model: TableModel, x: Tensor, y: Mapping[str, Tensor], train: Tensor, rest: Tensor, *, seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Single:  # fmt: skip
    """Train a model for each head of `model` on the rows that have its label, with the same loop and seed.

    options: of `fit`.
    """
    heads = {name: target.head for name, target in model.targets.items()}

    def trunk(width: int) -> nn.Module:
        return make_trunk(**{**model.trunk, "width": width})

    width = single_width(trunk, heads, model.trunk["width"], parameters(model.model))
    total, found = 0, {}
    for name, head in heads.items():
        torch.manual_seed(seed)
        alone = MultiHead(trunk(width), {name: head}, width=width)
        total += parameters(alone)
        labels, rows = {name: y[name]}, train[~y[name][train].isnan()]
        if y[name][rest].isnan().all():
            found[name] = None
            continue
        told = None if progress is None else lambda done, of, name=name: progress(f"train {name} alone", done, of)
        history = fit(alone, x, labels, rows, rest, progress=told, **options)
        metrics = measure(alone, x[rest], {name: y[name][rest]}).metrics[name]
        found[name] = {"metrics": metrics, "best_epoch": history.best_epoch}
    return Single(width, total, found)


def train_table(
    table: str | Path, targets: str | Mapping[str, str | None], out: str | Path, *, drop: Sequence[str] = (),
    text: Sequence[str] = (), encoder: str | None = None, image: Sequence[str] = (), image_size: int = 16,
    folder: str | Path | None = None, width: int = 64, layers: int = 2, dropout: float = 0.1, balance: str = "sum",
    epochs: int = 200, patience: int = 20, batch: int = 64, lr: float = 3e-3, held_out: float = 0.2, seed: int = 0,
    compare: str | None = None, progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train on part of the rows, stop when the loss of the others no longer falls, keep the best weights, write them.

    Every column that is no target and not in `drop` is a feature. Classes are those of the whole column, means and
    scales of the rows trained on. Held-out figures are of rows that chose when to stop, so they flatter a little.

    Args:
        text: columns of free text, read as hashed words, or by the encoder of Hugging Face named `encoder`.
        image: columns of paths of pictures in `folder` (default: the table's), read as image_size² pixels.
        compare: `single` trains a model for each head too, all of them together as large as the one of all heads.
    """
    path, out, wanted = Path(table), Path(out), parse_targets(targets)
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} is not between 0 and 1")
    check_whole(epochs=epochs, patience=patience, batch=batch, width=width, layers=layers, image_size=image_size)
    check_share(dropout=dropout)
    if not (is_number(lr) and lr > 0):
        raise OptionError(f"lr is a number above 0, not {lr!r}")
    if not 0 <= seed < 2**63:
        raise OptionError(f"seed is a whole number from 0 to 2^63 - 1, not {seed!r}")
    if compare not in (None, "single"):
        raise ValueError(f"compare={compare!r}: models of one head, 'single', are what there is to compare with")
    if encoder is not None and not text:
        raise ValueError(f"encoder={encoder!r} reads columns of text, and none is named")
    cells = read_table(path)
    for name in (*wanted, *drop, *text, *image):
        if name not in cells:
            whose = f"head {name!r}: " if name in wanted else ""
            raise ValueError(f"{whose}{path} has no column {name!r}; it has {', '.join(map(repr, cells))}")
    for name in (*text, *image):
        roles = {"targets": wanted, "drop": drop, "text": text, "image": image}
        at = [role for role, names in roles.items() if name in names]
        if len(at) > 1:
            raise ValueError(f"column {name!r} is in {' and in '.join(at)}; it can be in one of them")
    cells = located(cells, image, path.parent if folder is None else folder)
    count = len(next(iter(cells.values())))
    hidden = max(1, round(count * held_out))
    if hidden >= count:
        raise ValueError(f"{path}: {count} rows are too few to hold some out")
    torch.manual_seed(seed)
    order = torch.randperm(count)
    train, rest = order[hidden:].sort().values, order[:hidden].sort().values

    def part(name: str) -> list[str | None]:
        return [cells[name][row] for row in train.tolist()]

    def reader(name: str) -> Reader:
        if name in text:
            return Words(name) if encoder is None else Encoded.of(name, encoder)
        return Picture(name, image_size) if name in image else Column.of(name, part(name))

    inputs = [name for name in cells if name not in wanted and name not in drop]
    columns = [reader(name) for name in inputs if any(cell is not None for cell in part(name))]
    if not columns:
        raise ValueError(f"{path}: no column is left as a feature")
    found = {name: Target.of(name, line, cells[name], part(name)) for name, line in wanted.items()}
    trunk: dict[str, Any] = dict(
        inputs=sum(column.width for column in columns), width=width, layers=layers, dropout=dropout
    )
    heads = {name: target.head for name, target in found.items()}
    model = MultiHead(make_trunk(**trunk), heads, width=width, balance=balance)
    whole = TableModel(model, columns, found, trunk)
    x, y = features_of(columns, cells), whole.labels(cells)
    held = {name: each[rest] for name, each in y.items()}
    unheld = [name for name, each in held.items() if bool(each.isnan().all())]
    if len(unheld) == len(held):
        raise ValueError(f"{path}: no head has a label in the {hidden} rows held out, so nothing says when to stop")
    options: dict[str, Any] = dict(epochs=epochs, patience=patience, batch=batch, lr=lr)
    told = None if progress is None else lambda done, of: progress("train", done, of)
    history = fit(model, x, y, train, rest, progress=told, **options)
    now = measure(model, x[rest], held)
    result = {
        "table": str(path), "rows": count, "held_out": hidden, "epochs": len(history.losses),
        "best_epoch": history.best_epoch, "loss": history.loss,
        "parameters": parameters(model), "balance": balance, "seed": seed, **options,
        "width": width, "layers": layers, "dropout": dropout, "inputs": trunk["inputs"],
        "heads": {
            name: {
                "kind": target.head.name, "better": target.head.better,
                "labels": int((~y[name][train].isnan()).sum()), "held_out_labels": int((~held[name].isnan()).sum()),
                "metrics": now.metrics.get(name, {}),
                "calibration": calibration(target.head, now.outputs[name], held[name]),
            }
            for name, target in found.items()
        },
        "curves": dict(history.curves), "without_held_out_labels": unheld, "notes": _notes(columns, found, cells),
    }  # fmt: skip
    if compare:
        single = train_singles(whole, x, y, train, rest, seed=seed, progress=progress, **options)
        result["single"] = asdict(single)
    whole.save(out)
    again = TableModel.load(out)  # what was written is what was trained
    with torch.no_grad():
        for name, output in again.model(x[rest]).outputs.items():
            if not torch.equal(output, model.eval()(x[rest], heads=[name]).outputs[name]):
                raise ValueError(f"head {name!r}: the folder {out} does not give the outputs of the trained model")
    write_result(result, out)
    return result


def write_result(result: Mapping[str, Any], folder: Path) -> None:
    write_text(json.dumps(result, indent=1, ensure_ascii=False), folder / RESULT)


def _notes(
    columns: Sequence[Reader], targets: Mapping[str, Target], cells: Mapping[str, Sequence[str | None]]
) -> list[str]:
    """Columns of more texts than are told apart, and those that some text among numbers made texts."""
    read = [column.name for column in columns if isinstance(column, Column) and column.texts]
    read += [name for name, target in targets.items() if target.classes]
    notes = [f"column {name!r} is read as texts: {where}" for name in read if (where := stray(cells[name]))]
    for column in columns:
        if isinstance(column, Column) and len(column.texts) == MOST:
            count = len({cell for cell in cells[column.name] if cell is not None})
            if count > MOST:
                notes.append(
                    f"column {column.name!r} has {count} texts, of which {MOST} are told apart; named as text its "
                    "words are read"
                )
    return notes
