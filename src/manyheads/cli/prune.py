"""`manyheads prune` and `manyheads mask`: heads taken out of a model's weights, or silenced while it is measured."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, sizes, table, wrapped


class Of(Enum):
    """What a share is of."""

    heads = "heads"
    params = "params"
    cache = "cache"


class By(Enum):
    """What heads are chosen by."""

    gradient = "gradient"
    by_layer = "gradient-by-layer"
    ablation = "ablation"
    output = "output"
    greedy = "greedy"
    random = "random"


class Regroup(Enum):
    """What becomes of groups of unequal size."""

    refuse = "refuse"
    map = "map"
    repeat = "repeat"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, or any MODEL that shrink takes.")]
Text = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Text to choose by (first 80 %) and to evaluate on (the rest). Repeatable."),
]
Evaluate = Annotated[str, typer.Option(metavar="NxT", help="Evaluate on N windows of T tokens.")]

_SAID = {
    "gradient": "what the loss feels of them (|o · dL/do| a token)",
    "gradient-by-layer": "what the loss feels of them, over each layer's length",
    "ablation": "how much the loss rises without each",
    "output": "how much they add to the residual stream",
    "greedy": "how far predictions move without them, measured again after each round",
    "random": "chance",
}


_STOPPED = {
    "keep": "",
    "limit": ", as one step more takes perplexity above its limit",
    "heads": ", as no more heads may go",
}


@command
def prune(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder for the checkpoint.")],
    heads: Annotated[
        str | None, typer.Option(metavar="HEADS", help="Those to take out, as layer:head,head: '3:0,1 5:2'.")
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="SHARE", help="Or choose them: keep so much, such as 75%.")] = None,
    of: Annotated[Of, typer.Option(help="What the share is of; cache: bytes a token.")] = Of.heads,
    by: Annotated[By, typer.Option(help="Heads that matter least by this go first.")] = By.gradient,
    ppl_limit: Annotated[
        float | None, typer.Option(metavar="TIMES", help="Or: as many as keep perplexity below so many times, 1.05.")
    ] = None,
    regroup: Annotated[
        Regroup,
        typer.Option(help="Groups of unequal size: refuse; map: each head names its key head; repeat key heads."),
    ] = Regroup.refuse,
    at_least: Annotated[int, typer.Option(help="Heads that every layer keeps.")] = 1,
    again: Annotated[
        int | None, typer.Option(metavar="N", help="Measure again after N steps. Default: once; greedy: 1.")
    ] = None,
    tries: Annotated[int, typer.Option(help="Candidates that greedy tries in each round; 0: all.")] = 16,
    text: Text = None,
    calibrate: Annotated[str, typer.Option(metavar="NxT", help="Choose by N windows of T tokens.")] = "8x512",
    evaluate: Evaluate = "5x2048",
    context: Annotated[int, typer.Option(help="Tokens in the cache when decoding is timed; 0: it is not.")] = 128,
    seed: Annotated[int, typer.Option(help="Of random.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted choice.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take attention heads out of a model: fewer parameters, and a smaller cache where whole groups go.

    The result computes what the model does with these heads at zero. It is a checkpoint like any other: generate, eval,
    heal and export take it.
    """
    windows, calibration = sizes(evaluate), sizes(calibrate)
    keep = None if to is None else _share(to)
    if (heads is None) == (keep is None and ppl_limit is None):
        raise typer.BadParameter("give --heads, or --to and --ppl-limit or one of them", param_hint="--heads")
    name = find(model)
    from transformers.utils import logging

    from manyheads.bench.folders import partial_folder
    from manyheads.edit import job
    from manyheads.edit.mask import read_heads

    logging.disable_progress_bar()
    try:
        with Bars() as bars:
            found = job.prune_model(
                name, out, heads=None if heads is None else read_heads(heads), keep=keep, of=of.value, by=by.value,
                limit=ppl_limit, regroup=regroup.value, at_least=at_least, again=again, tries=tries or None,
                texts=text or (), calibration=calibration, evaluation=windows, context=context, seed=seed,
                resume=resume, progress=bars,
            )  # fmt: skip
    except KeyboardInterrupt:
        unfinished = partial_folder(out.expanduser())
        if unfinished.exists():
            note(f"{unfinished} keeps the steps so far; the same command with --resume goes on from there")
        raise
    for line in found["notes"]:
        note(line)
    show(found)
    finish(found, as_json)


def show(found: dict[str, Any]) -> None:
    """What went and why, the figures before and after, and where the checkpoint lies."""
    plan, scores = found["plan"], dict[int, float]()
    for step in plan["steps"] if plan else ():
        scores[step["layer"]] = max(scores.get(step["layer"], -float("inf")), step["score"])
    table(
        ["layer", "heads out", "left", "key heads", *(["score"] if plan else [])],
        [
            [
                str(layer), ", ".join(map(str, of)), str(found["heads"][layer]), str(found["key_heads"][layer]),
                *([f"{scores[layer]:.3g}"] if plan else []),
            ]
            for layer, of in found["heads_out"].items()
        ],
        left=2,
    )  # fmt: skip
    if plan:
        first, last = plan["steps"][0]["score"], plan["steps"][-1]["score"]
        wrapped(
            f"Heads went by {_SAID[plan['by']]}, for what they save of {plan['of']}: {len(plan['steps'])} steps, the "
            f"first at {first:.3g}, the last at {last:.3g}; {plan['kept']:.1%} is left{_STOPPED[plan['stopped']]}. "
            f"A layer's score is that of its last step. Measured on {found['text']['calibration']}."
        )
    head = ["", "heads", "parameters", "MB", "KV B/\ntoken", "perplex-\nity", "KL", "top-1\n%", "ms/\ntoken"]
    table(
        head,
        [
            [
                row["name"], number(row["heads"], 0), number(row["parameters"], 0),
                number(row["parameter_bytes"] / 2**20, 1), number(row["kv_bytes_per_token"], 0),
                number(row["perplexity"], 2), number(row["kl"], 3), number(100 * row["top1"], 1),
                number(row["decode_ms"], 1),
            ]
            for row in found["rows"]
        ],
        tight=True,
    )  # fmt: skip
    took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["seconds"].items())
    wrapped(f"Evaluated on {found['text']['evaluation']}. It took: {took}.")
    typer.echo(f"checkpoint  {found['out']}")


@command
def mask(
    model: Model,
    heads: Annotated[
        str, typer.Option(metavar="HEADS", help="Those to silence, '3:0,1 5:2', or a file that --save wrote.")
    ],
    text: Text = None,
    evaluate: Evaluate = "5x2048",
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the heads as JSON.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a model with some heads at zero. Nothing of the model changes.

    In Python: `with mh.edit.mask(model, "heads.json"): …`.
    """
    windows, name = sizes(evaluate), find(model)
    if save is not None and save.exists():
        raise FileExistsError(f"{save} exists already; remove it or choose another file")
    from manyheads.edit import job
    from manyheads.edit.mask import read_heads

    given = Path(heads) if Path(heads).is_file() else read_heads(heads)
    with Bars() as bars:
        found = job.mask_model(name, given, texts=text or (), evaluation=windows, save=save, progress=bars)
    for line in found["notes"]:
        note(line)
    count, masked = sum(map(len, found["heads_out"].values())), found["masked"]
    table(
        ["", "perplexity", "KL", "top-1 %"],
        [
            ["whole", number(found["perplexity"], 3), number(0, 4), number(100, 1)],
            ["masked", number(masked["perplexity"], 3), number(masked["kl"], 4), number(100 * masked["top1"], 1)],
        ],
    )
    wrapped(f"{count} heads at zero. Evaluated on {found['text']}.")
    if save is not None:
        typer.echo(f"heads       {save}")
    finish(found, as_json)


def _share(text: str) -> float:
    """`75%` or 0.75."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{text!r} is no share such as 75% or 0.75", param_hint="--to")
    return value
