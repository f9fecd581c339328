"""`manyheads compare`: specs in; small models trained alike, a table and a report of loss and cost out."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, table, wrapped

if TYPE_CHECKING:
    from manyheads.bench.comparison import Comparison, Entry


class EqualIn(Enum):
    """What all models have as much of as the first."""

    none = "none"
    params = "params"
    flops = "flops"
    cache = "cache"


class Dtype(Enum):
    """What is computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


@command
def compare(
    specs: Annotated[
        list[str], typer.Argument(metavar="SPEC...", help="Spec lines; the first is the base of the comparison.")
    ],
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 300,
    seeds: Annotated[int, typer.Option(help="Runs of each spec.")] = 3,
    equal: Annotated[
        EqualIn, typer.Option(help="Choose widths so that parameters, training FLOPs or cache equal the base's.")
    ] = EqualIn.none,
    dim: Annotated[int, typer.Option(help="Width (of the base).")] = 128,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    layers: Annotated[int, typer.Option(help="Layers.")] = 4,
    ffn: Annotated[str, typer.Option(help="Feed-forward.")] = "swiglu",
    residual: Annotated[str, typer.Option(help="How layers add up: sum, or mhar.")] = "sum",
    context: Annotated[int, typer.Option(help="Tokens (bytes) in a window.")] = 256,
    batch: Annotated[int, typer.Option(help="Windows a step.")] = 8,
    text: Annotated[
        str, typer.Option(metavar="FILE|pydoc", help="Train on its first 80 %, measure on the rest.")
    ] = "pydoc",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    warmup: Annotated[int | None, typer.Option(help="Steps of rising rate. Default: a tenth.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="bfloat16: matrix products only.")] = Dtype.float32,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of each run. Default: its share of the cores.")] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of the comparison; the same command again goes on with it.")
    ] = Path("comparison"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small model from scratch for each spec, alike in all else, and compare loss and cost.

    Writes result.json and report.html to a folder, and prints a table. Interrupted, the same command goes on after the
    last checkpoint. Runs under `accelerate launch -m manyheads compare …` too.
    """
    from manyheads.bench import compare as job
    from manyheads.convert.ranks import Ranks

    try:
        with Bars() as bars:
            found = job.compare(
                specs, steps=steps, seeds=seeds, equal=equal.value, dim=dim, heads=heads, layers=layers, ffn=ffn,
                residual=residual, context=context, batch=batch, text=text, lr=lr, warmup=warmup, dtype=dtype.value,
                jobs=jobs, threads=threads, out=out, progress=bars,
            )  # fmt: skip
    except KeyboardInterrupt:
        if (out.expanduser() / "job.json").exists():
            note(f"{out} keeps what is finished; the same command goes on from there")
        raise
    if Ranks.here().rank:
        return
    for line in found.notes:
        note(line)
    show(found)
    finish(found.to_json(), as_json)


def show(found: Comparison) -> None:
    """The table of figures, what its columns mean, and where everything lies."""
    widths = [name for name in ("dim", "hidden") if len({getattr(entry, name) for entry in found.entries}) > 1]
    titles = {"dim": "width", "hidden": "ffn\nwidth"}
    head = ["spec", *(titles[name] for name in widths), "para-\nmeters", "MFLOP/\ntoken", "cache\nB/token", "step\nms"]
    head += ["tok/s", "loss\n± std", "to base\n± err."]
    table(head, [_row(found, entry, widths) for entry in found.entries], tight=True)
    options = found.options
    seen = f"{options['steps']} steps of {options['batch']} x {options['context']} bytes, "
    seen += "one seed" if options["seeds"] == 1 else f"{options['seeds']} seeds"
    wrapped(f"{found.text}, {seen}; loss in nats a byte, held out; error: paired over seeds.")
    typer.echo(f"figures     {found.out}/result.json")
    if found.report is not None:
        typer.echo(f"report      {found.report}")


def _row(found: Comparison, entry: Entry, widths: list[str]) -> list[str]:
    difference, error = found.difference(entry)
    beside = "" if entry is found.base else _between(difference, error, "+.3f")
    return [
        entry.spec, *(number(getattr(entry, name), 0) for name in widths), number(entry.parameters, 0),
        number(entry.flops / 1e6, 2), number(entry.cache_measured, 0), number(entry.step_ms, 0),
        number(entry.tokens_per_second, 0), _between(entry.loss, entry.spread, ".3f"), beside,
    ]  # fmt: skip


def _between(value: float, error: float | None, form: str) -> str:
    """1.234, and below it ± 0.005."""
    import math

    if not math.isfinite(value):
        return "–"
    return f"{value:{form}}".replace("-", "−") + ("" if error is None else f"\n± {error:.3f}")
