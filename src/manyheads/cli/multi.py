"""`manyheads multi`: one trunk with a head for each of several columns of a table."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, table

multi = typer.Typer(
    name="multi", help="One trunk, many output heads: train on a table with gaps, and predict.", no_args_is_help=True
)


@multi.command()
@command
def train(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE|CONFIG",
            help="A file of commas, semicolons or tabs, with names; or a .yaml file that holds `table` and the options "
            "below, which the command line overrides.",
        ),
    ],
    targets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Columns to learn, `age,kind`; with a kind of head, `age:density(components=3),kind:classification`. "
            "Kinds: regression, classification, ordinal, density, hypotheses.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder.")] = None,
    drop: Annotated[str, typer.Option(metavar="LIST", help="Columns that are no features, such as a number.")] = "",
    text: Annotated[str, typer.Option(metavar="LIST", help="Columns of free text, read as hashed words.")] = "",
    encoder: Annotated[
        str | None, typer.Option(metavar="NAME", help="Reads columns of text: a Hugging Face model, not trained.")
    ] = None,
    image: Annotated[str, typer.Option(metavar="LIST", help="Columns of paths of pictures, read as pixels.")] = "",
    image_size: Annotated[int, typer.Option(help="Pixels a side that pictures are made.")] = 16,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where pictures lie; else in the table's folder.")
    ] = None,
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
    compare: Annotated[
        str | None,
        typer.Option(metavar="single", help="Train a model for each head too, together as large as the one of all."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train one model of several columns, of which any cell may be missing.

    A number becomes a feature centred and scaled, a text one of several; a gap is marked.

    DIR gets the weights, what reads a table, result.json, and report.html.
    """
    from manyheads.bench.heads_report import write_heads
    from manyheads.multi.config import settings
    from manyheads.multi.fit import train_table

    options = {name: value for name, value in context.params.items() if name not in ("path", "as_json", "debug")}
    typed = {name for name in options if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"}
    told = settings(path, options, typed)
    with Bars() as bars:
        result = train_table(**told, progress=bars)
    _show(result)
    to = Path(told["out"])
    for line in result["notes"]:
        note(line)
    try:
        typer.echo(f"report      {write_heads(result, to)}")
    except ImportError as error:
        note(f"no report.html: {error}")
    finish(result, as_json)


def _show(result: dict[str, Any]) -> None:
    """The table of heads, beside models of one head where there are some."""
    single = result.get("single")

    def figures(metrics: Mapping[str, float] | None) -> str:
        return "\n".join(f"{metric} {number(value, 3)}" for metric, value in (metrics or {}).items()) or "–"

    rows = []
    for name, each in result["heads"].items():
        beside = [] if single is None else [figures((single["heads"][name] or {}).get("metrics"))]
        rows.append((name, each["kind"], figures(each["metrics"]), *beside, f"{each['labels']:,}",
                     f"{each['held_out_labels']:,}"))  # fmt: skip
    alone = [] if single is None else ["alone"]
    table(("head", "kind", "held out", *alone, "labels", "held-out\nlabels"), rows, left=3 + len(alone))
    for name in result["without_held_out_labels"]:
        note(f"head {name!r}: no held-out row has its label, so nothing says how good it is")
    typer.echo(f"{result['rows']:,} rows, best of {result['epochs']} epochs: {result['best_epoch']}.")
    if single is not None:
        typer.echo(
            f"{result['parameters']:,} parameters; alone {single['parameters']:,}, trunks {single['width']} wide."
        )


@multi.command()
@command
def predict(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `manyheads multi train` wrote.")],
    path: Annotated[Path, typer.Argument(metavar="TABLE", help="With the columns that the model reads.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A new file; else standard output.")] = None,
    images: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where pictures lie; else in the table's folder.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write what each head says of each row, as a table; where TABLE has labels, how right that is."""
    if out is not None and out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another file")
    if as_json and out is None:
        raise ValueError("--json needs --out: the predictions are on standard output already")
    from manyheads.multi.fit import TableModel
    from manyheads.multi.loop import measure
    from manyheads.multi.table import features_of

    model = TableModel.load(folder)
    cells = model.read(path, images)
    said = model.predict(cells)
    labels = model.labels(cells)
    figures = measure(model.model, features_of(model.columns, cells), labels).metrics if labels else {}
    to = nullcontext(sys.stdout) if out is None else open(out, "w", newline="", encoding="utf-8")  # noqa: SIM115
    with to as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(said)
        writer.writerows(
            [f"{v:.6g}" if isinstance(v, float) else v for v in row] for row in zip(*said.values(), strict=True)
        )
    for name, each in figures.items():
        note(f"{name}: " + ", ".join(f"{metric} {number(value, 3)}" for metric, value in each.items()))
    finish({"rows": len(next(iter(said.values()))), "metrics": figures}, as_json)
