"""`manyheads shrink`: a model and cache budgets in; checkpoints, figures and a report out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, numbers, sizes, table, wrapped


@command
def shrink(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub name, a folder, a GGUF file, or smollm2 (embedded).")
    ],
    kv: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BUDGET",
            help="Cache to keep: a share of the source's, or numbers a token and layer (192). "
            "Give it again for another candidate. Default 50%.",
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="mla: latent attention. gqa: fewer key heads. auto: a plan, each layer becomes what hurts least. "
            "share: layers read the cache of others. Published methods: see 'manyheads list --methods'. Options as in "
            "'gqa(mean)' or 'mha2mla(keep=uniform, rotary=16)'; a wrong one is answered with those that there are.",
        ),
    ] = "mla",
    target: Annotated[
        str | None,
        typer.Option(
            help="Of --to auto, what the budget is a share of: cache, params (of attention), or speed (numbers read "
            "in a decode step)."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Text to calibrate on (first 80 %) and to evaluate on (the rest). Repeatable."
        ),
    ] = None,
    heal: Annotated[
        str, typer.Option(help="Fit each converted layer to its source: layerwise, none, or a number of steps.")
    ] = "layerwise",
    distil: Annotated[
        int | None,
        typer.Option(metavar="N", help="Afterwards train each candidate N steps towards the source's predictions."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for everything. Default NAME-shrunk.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted job.")] = False,
    prompt: Annotated[str | None, typer.Option(help="What every model's sample of text continues.")] = None,
    contexts: Annotated[str, typer.Option(help="Lengths of context at which decoding is timed, or none.")] = "128,2048",
    calibrate: Annotated[str, typer.Option(metavar="NxT", help="Calibrate on N windows of T tokens.")] = "16x1024",
    evaluate: Annotated[str, typer.Option(metavar="NxT", help="Evaluate on N windows of T tokens.")] = "5x2048",
    stages: Annotated[
        bool, typer.Option("--stages", help="Also measure the loss after each stage of a conversion.")
    ] = False,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="For models larger than memory: read a folder layer by layer, and time nothing.",
        ),
    ] = False,
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="MAP",
            help="Devices that work on the layers: auto, cuda:1, cuda:0,cuda:1 (blocks of layers), or a JSON file of "
            "devices by layer. Default the CPU.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of healing.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Shrink a model's key/value cache, and measure what that costs.

    Writes a new folder with a checkpoint for each budget, result.json and report.html, and prints a table of the
    source and the candidates.
    """
    options: dict[str, Any] = {"contexts": numbers(contexts), "calibration": sizes(calibrate)}
    options |= {"evaluation": sizes(evaluate)} | ({} if prompt is None else {"prompt": prompt})
    from manyheads.bench import job
    from manyheads.convert.methods import read_method
    from manyheads.convert.ranks import Ranks

    if target is not None:
        if to.strip() != "auto":
            raise typer.BadParameter(f"a target is of --to auto, not of --to {to}", param_hint="--target")
        to = f"auto(target={target})"
    try:
        read_method(to)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--to") from None
    try:
        with Bars() as bars:
            result = job.shrink_model(
                model, kv or ["50%"], to=to, texts=text or (), heal=heal, end_to_end=distil, out=out, resume=resume,
                stages=stages, stream=stream, device_map=device_map, seed=seed, **options,
                progress=bars if Ranks.here().rank == 0 else lambda *step: None,
            )  # fmt: skip
    except KeyboardInterrupt:
        unfinished = job.partial_folder(job.out_folder(model, out))
        if unfinished.exists():
            note(f"{unfinished} keeps what is finished; the same command with --resume goes on from there")
        raise
    if Ranks.here().rank:
        return
    for line in result["notes"]:
        note(line)
    show(result)
    finish(result, as_json)


def show(result: dict[str, Any]) -> None:
    """The table of figures, what each candidate is, and where everything lies."""
    rows = [result["source"], *result["candidates"]]
    lengths = list(result["source"]["decode_ms"])
    second = result["source"]["perplexity_second"] is not None
    head = ["model", "KV B/\ntoken", "perplex-\nity", *(["second\ntext"] if second else []), "KL", "top-1\n%"]
    head += [*(f"ms at\n{length}" for length in lengths), "peak\nMB"]
    table(
        head,
        [
            [
                row["name"], number(row["kv_bytes_per_token"], 0), number(row["perplexity"], 2),
                *([number(row["perplexity_second"], 2)] if second else []), number(row["kl"], 3),
                number(100 * row["top1"], 1), *(number(row["decode_ms"][length], 1) for length in lengths),
                number(row["peak_mb"], 0),
            ]
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        wrapped(f"{row['name']}: {row['spec']}")
    for row in result["candidates"]:
        if row.get("planned"):
            typer.echo(f"\nwhy {row['name']}:")
            for reason in row["planned"]["reasons"]:
                wrapped(reason)
    typer.echo("")
    for row in result["candidates"]:
        typer.echo(f"checkpoint  {row['folder']}")
    typer.echo(f"figures     {result['out']}/result.json")
    if result["report"] is not None:
        typer.echo(f"report      {result['report']}")
