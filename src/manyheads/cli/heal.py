"""`manyheads heal`: a converted checkpoint, trained to predict what its source predicts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, sizes, table, wrapped


class Train(Enum):
    """Which weights are trained."""

    attention = "attention"
    all = "all"


@command
def heal(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A converted checkpoint, or the output of shrink.")
    ],
    teacher: Annotated[str, typer.Option(metavar="MODEL", help="What it was made from, by any name shrink takes.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the healed checkpoint.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Files or folders: train on the first 80 %, evaluate on the rest. Or datasets:OWNER/NAME[:CONFIG]. "
            "Repeatable. Default: Python's help topics.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 300,
    batch: Annotated[
        str, typer.Option(metavar="NxT", help="N windows of T tokens a step, in all processes.")
    ] = "2x512",
    accumulate: Annotated[int, typer.Option(help="Passes in which a process computes its share of a step.")] = 1,
    train: Annotated[Train, typer.Option(help="Weights to train.")] = Train.attention,
    lora: Annotated[int, typer.Option(help="Rank of adapters to train in their place, merged at the end.")] = 0,
    ce: Annotated[float, typer.Option(help="Weight of the cross-entropy.")] = 0.1,
    kl: Annotated[float, typer.Option(help="Weight of the KL divergence from the teacher.")] = 1.0,
    relations: Annotated[int, typer.Option(help="Relation heads of a loss on the last attention layers; 0: none.")] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate at its highest, relative to each weight's size.")] = 3e-4,
    every: Annotated[int, typer.Option(help="Steps between held-out losses, and between checkpoints.")] = 25,
    patience: Annotated[
        int, typer.Option(help="Stop after so many held-out losses without a better one; 0: never.")
    ] = 3,
    evaluate: Annotated[str, typer.Option(metavar="NxT", help="Evaluate on N windows of T tokens.")] = "5x2048",
    seed: Annotated[int, typer.Option(help="Of the text's order, and of what the model draws.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted job.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a converted model end to end, towards its source's predictions.

    Writes a checkpoint and result.json to a new folder, and prints a table of the teacher, and of the model before and
    after. Runs in several processes too: `accelerate launch -m manyheads heal …`, or `torchrun --nproc-per-node 2 -m
    manyheads heal …` (on CPUs `accelerate launch --cpu` starts one process).
    """
    shape, windows = sizes(batch), sizes(evaluate)
    name = find(checkpoint)
    from manyheads.bench import heal as job
    from manyheads.bench.folders import partial_folder
    from manyheads.convert.distil import Distil
    from manyheads.convert.ranks import Ranks
    from manyheads.convert.relations import Relations

    if relations < 0:
        raise typer.BadParameter(f"{relations} relation heads")
    options = Distil(
        steps=steps, batch=shape, accumulate=accumulate, ce=ce, kl=kl, train=train.value, lora=lora, lr=lr, every=every,
        relations=Relations(relations) if relations else None, patience=patience, seed=seed,
    )  # fmt: skip
    try:
        with Bars() as bars:
            found = job.heal_model(
                name, teacher, texts=text or (), options=options, out=out, resume=resume, evaluation=windows,
                progress=bars if Ranks.here().rank == 0 else lambda *step: None,
            )  # fmt: skip
    except KeyboardInterrupt:
        unfinished = partial_folder(out.expanduser())
        if unfinished.exists():
            note(f"{unfinished} keeps what is finished; the same command with --resume goes on from there")
        raise
    if not found:
        return
    for line in found["notes"]:
        note(line)
    show(found)
    finish(found, as_json)


def show(found: dict[str, Any]) -> None:
    """The table of figures, what was trained, and where everything lies."""
    head = ["model", "held-out\nloss", "perplex-\nity", "KL", "top-1\n%"]
    table(
        head,
        [
            [
                row["name"], number(row["loss"], 4), number(row["perplexity"], 3), number(row["kl"], 4),
                number(100 * row["top1"], 1),
            ]
            for row in found["rows"]
        ],
    )  # fmt: skip
    rows, length = found["options"]["batch"]
    wrapped(
        f"{found['steps']} steps of {rows} x {length} tokens of {found['text']['training']}, "
        f"{found['seconds_per_step']:.2f} s each; the weights are those of step {found['best']}. Evaluated on "
        f"{found['text']['evaluation']}."
    )
    typer.echo("")
    typer.echo(f"checkpoint  {found['out']}")
    typer.echo(f"figures     {found['out']}/result.json")
