"""Train one trunk with a head for each of several columns of a table; predict with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.multi.folder import load, save, saved
from manyheads.multi.head import from_fields
from manyheads.multi.heads import Classification, Ordinal, Regression
from manyheads.multi.model import MultiHead, naming
from manyheads.multi.table import (
    Column,
    Target,
    columns_from_json,
    columns_to_json,
    features_of,
    parse_targets,
    read_table,
)

RESULT = "result.json"


def _trunk(inputs: int, width: int, layers: int, dropout: float) -> nn.Module:
    blocks: list[nn.Module] = []
    for layer in range(layers):
        blocks += [nn.Linear(width if layer else inputs, width), nn.GELU(), nn.Dropout(dropout)]
    return nn.Sequential(*blocks)


@dataclass
class TableModel:
    """A model with what it needs to read a table."""

    model: MultiHead
    columns: list[Column]
    targets: dict[str, Target]
    trunk: dict[str, Any]

    def save(self, folder: str | Path) -> None:
        classes = {name: list(target.classes) for name, target in self.targets.items()}
        save(self.model, folder, columns=columns_to_json(self.columns), classes=classes, trunk=self.trunk)

    @classmethod
    def load(cls, folder: str | Path) -> TableModel:
        told = saved(folder)
        if "columns" not in told:
            raise ValueError(f"{folder} holds a model of something else than a table")
        heads = {
            name: from_fields({k: v for k, v in each.items() if k != "width"}) for name, each in told["heads"].items()
        }
        columns = columns_from_json(told["columns"])
        model = MultiHead(_trunk(**told["trunk"]), heads, width=told["trunk"]["width"])
        load(model, folder)
        targets = {name: Target(head, tuple(told["classes"][name])) for name, head in heads.items()}
        return cls(model.eval(), columns, targets, told["trunk"])

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
            if isinstance(head, Classification):
                said[f"{name} (probability)"] = output.softmax(-1).amax(-1).tolist()
            elif isinstance(head, Ordinal):
                likely = head.log_probabilities(output).exp()
                said[f"{name} (probability)"] = likely.gather(1, head.predict(output)[:, None]).squeeze(1).tolist()
            elif isinstance(head, Regression) and head.uncertainty:
                said[f"{name} (deviation)"] = head.deviation(output).tolist()
        return said


def measure(model: MultiHead, x: Tensor, targets: dict[str, Tensor]) -> tuple[float, dict[str, dict[str, float]]]:
    """The loss, and each head's metrics."""
    training = model.training
    model.eval()
    with torch.no_grad():
        out = model(x, targets=targets)
    found = model.metrics(model.measure(out.outputs, targets))
    model.train(training)
    return float(out.loss), found


def train_table(
    table: str | Path, targets: str, out: str | Path, *, drop: tuple[str, ...] = (), width: int = 64, layers: int = 2,
    dropout: float = 0.1, balance: str = "sum", epochs: int = 200, patience: int = 20, batch: int = 64,
    lr: float = 3e-3, held_out: float = 0.2, seed: int = 0, progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train on part of the rows, stop when the loss of the others no longer falls, keep the best weights, write them.

    Every column that is no target and not in `drop` is a feature. Classes are those of the whole column, means and
    scales of the rows trained on. Held-out figures are of rows that chose when to stop, so they flatter a little.
    """
    path, out, wanted = table, Path(out), parse_targets(targets)
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} is not between 0 and 1")
    if min(epochs, patience, batch, width, layers) < 1:
        raise ValueError("epochs, patience, batch, width and layers are at least 1")
    cells = read_table(path)
    for name in (*wanted, *drop):
        if name not in cells:
            whose = f"head {name!r}: " if name in wanted else ""
            raise ValueError(f"{whose}{path} has no column {name!r}; it has {', '.join(map(repr, cells))}")
    count = len(next(iter(cells.values())))
    hidden = max(1, round(count * held_out))
    if hidden >= count:
        raise ValueError(f"{path}: {count} rows are too few to hold some out")
    torch.manual_seed(seed)
    order = torch.randperm(count)
    train, rest = order[hidden:].sort().values, order[:hidden].sort().values

    def part(name: str) -> list[str | None]:
        return [cells[name][row] for row in train.tolist()]

    inputs = [name for name in cells if name not in wanted and name not in drop]
    columns = [Column.of(name, part(name)) for name in inputs if any(cell is not None for cell in part(name))]
    if not columns:
        raise ValueError(f"{path}: no column is left as a feature")
    found = {name: Target.of(name, line, cells[name], part(name)) for name, line in wanted.items()}
    trunk: dict[str, Any] = dict(
        inputs=sum(column.width for column in columns), width=width, layers=layers, dropout=dropout
    )
    heads = {name: target.head for name, target in found.items()}
    model = MultiHead(_trunk(**trunk), heads, width=width, balance=balance)
    whole = TableModel(model, columns, found, trunk)
    x, y = features_of(columns, cells), whole.labels(cells)
    held = {name: each[rest] for name, each in y.items()}
    unheld = [name for name, each in held.items() if bool(each.isnan().all())]
    if len(unheld) == len(held):
        raise ValueError(f"{path}: no head has a label in the {hidden} rows held out, so nothing says when to stop")
    optimiser = torch.optim.AdamW(model.parameters(), lr)
    best, kept, since, losses = float("inf"), copy.deepcopy(model.state_dict()), 0, []
    epoch = 0
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in train[torch.randperm(len(train))].split(batch):
            loss = model(x[rows], targets={name: each[rows] for name, each in y.items()}).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        now, _ = measure(model, x[rest], held)
        losses.append(now)
        if not now < float("inf"):
            raise FloatingPointError(f"the held-out loss became {now} in epoch {epoch}; a lower learning rate may help")
        since = 0 if now < best else since + 1
        if now < best:
            best, kept = now, copy.deepcopy(model.state_dict())
        if progress is not None:
            progress("train", epochs if since == patience else epoch, epochs)
        if since == patience:
            break
    model.load_state_dict(kept)
    _, figures = measure(model, x[rest], held)
    result = {
        "table": str(path), "rows": count, "held_out": hidden, "epochs": epoch,
        "best_epoch": losses.index(min(losses)) + 1, "loss": best,
        "parameters": sum(p.numel() for p in model.parameters()), "balance": balance, "seed": seed,
        "heads": {
            name: {
                "kind": target.head.name, "labels": int((~y[name][train].isnan()).sum()),
                "held_out_labels": int((~held[name].isnan()).sum()), "metrics": figures.get(name, {}),
            }
            for name, target in found.items()
        },
        "without_held_out_labels": unheld,
    }  # fmt: skip
    whole.save(out)
    again = TableModel.load(out)  # what was written is what was trained
    with torch.no_grad():
        for name, output in again.model(x[rest]).outputs.items():
            if not torch.equal(output, model.eval()(x[rest], heads=[name]).outputs[name]):
                raise ValueError(f"head {name!r}: the folder {out} does not give the outputs of the trained model")
    (out / RESULT).write_text(json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8")
    return result
