"""`manyheads multi`: one trunk with a head for each of several columns of a table."""

from __future__ import annotations

import csv
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, table

multi = typer.Typer(
    name="multi", help="One trunk, many output heads: train on a table with gaps, and predict.", no_args_is_help=True
)


@multi.command()
@command
def train(
    path: Annotated[Path, typer.Argument(metavar="TABLE", help="A file of commas, semicolons or tabs, with names.")],
    targets: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Columns to learn, `age,kind`; with a kind of head, `age:density(components=3),kind:classification`. "
            "Kinds: regression, classification, ordinal, density, hypotheses.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    drop: Annotated[str, typer.Option(metavar="LIST", help="Columns that are no features, such as a number.")] = "",
    balance: Annotated[str, typer.Option(help="sum, uncertainty, or an aggregator of torchjd.")] = "sum",
    width: Annotated[int, typer.Option(help="Of the trunk's layers.")] = 64,
    layers: Annotated[int, typer.Option(help="Of the trunk.")] = 2,
    dropout: Annotated[float, typer.Option(help="In the trunk.")] = 0.1,
    epochs: Annotated[int, typer.Option(help="At most.")] = 200,
    patience: Annotated[int, typer.Option(help="Epochs without a lower held-out loss before it stops.")] = 20,
    batch: Annotated[int, typer.Option(help="Rows a step.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    held_out: Annotated[float, typer.Option(help="Part of the rows that are not trained on.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the order.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train one model of several columns, of which any cell may be missing.

    A number becomes a feature centred and scaled, a text one of several; a gap is marked. DIR gets the weights, what
    reads a table, and result.json.
    """
    from manyheads.multi.fit import train_table

    left_out = tuple(name.strip() for name in drop.split(",") if name.strip())
    with Bars() as bars:
        result = train_table(
            path, targets, out, drop=left_out, width=width, layers=layers, dropout=dropout, balance=balance,
            epochs=epochs, patience=patience, batch=batch, lr=lr, held_out=held_out, seed=seed, progress=bars,
        )  # fmt: skip
    rows = []
    for name, each in result["heads"].items():
        figures = ", ".join(f"{metric} {number(value, 3)}" for metric, value in each["metrics"].items()) or "–"
        rows.append((name, each["kind"], figures, f"{each['labels']:,}", f"{each['held_out_labels']:,}"))
    table(("head", "kind", "held out", "labels", "held-out\nlabels"), rows, left=3)
    for name in result["without_held_out_labels"]:
        note(f"head {name!r}: no held-out row has its label, so nothing says how good it is")
    typer.echo(f"{result['rows']:,} rows, best of {result['epochs']} epochs: {result['best_epoch']}. {out}")
    finish(result, as_json)


@multi.command()
@command
def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `manyheads multi train` wrote.")],
    path: Annotated[Path, typer.Argument(metavar="TABLE", help="With the columns that the model reads.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A new file; else standard output.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write what each head says of each row, as a table; where TABLE has labels, how right that is."""
    if out is not None and out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another file")
    if as_json and out is None:
        raise ValueError("--json needs --out: the predictions are on standard output already")
    from manyheads.multi.fit import TableModel, measure
    from manyheads.multi.table import features_of, read_table

    model, cells = TableModel.load(folder), read_table(path)
    said = model.predict(cells)
    to = nullcontext(sys.stdout) if out is None else open(out, "w", newline="", encoding="utf-8")  # noqa: SIM115
    with to as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(said)
        writer.writerows(
            [f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in zip(*said.values(), strict=True)
        )
    labels = model.labels(cells)
    figures = measure(model.model, features_of(model.columns, cells), labels)[1] if labels else {}
    for name, each in figures.items():
        note(f"{name}: " + ", ".join(f"{metric} {number(value, 3)}" for metric, value in each.items()))
    finish({"rows": len(next(iter(said.values()))), "metrics": figures}, as_json)
