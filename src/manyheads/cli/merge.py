"""`manyheads merge`: several models of one architecture, a common trunk and heads of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, number, sizes, table


@command
def merge(
    models: Annotated[list[str], typer.Argument(metavar="MODEL MODEL...", help="Two or more; each as in shrink.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder: a checkpoint for each model, 1, 2, ….")],
    until: Annotated[
        int | None,
        typer.Option(help="Layers of the trunk; the rest stays each model's own. Default: one model of all."),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text to match features and to measure on. Repeatable.")
    ] = None,
    calibrate: Annotated[str, typer.Option(metavar="NxT", help="Match on N windows of T tokens.")] = "8x512",
    evaluate: Annotated[str, typer.Option(metavar="NxT", help="Evaluate on N windows of T tokens.")] = "2x1024",
    alpha: Annotated[float, typer.Option(help="What likeness to a merged feature counts.")] = 0.3,
    beta: Annotated[float, typer.Option(help="Of the merges, the share that may lie within one model.")] = 0.125,
    matched: Annotated[
        bool, typer.Option("--matched", help="The models have no common parent: match their residual streams too.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Merge models without training (ZipIt): features that are alike become one, up to a layer.

    Each checkpoint is a whole model of its family; their first layers are the same.
    """
    names = [find(name) for name in models]
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    from transformers.utils import logging

    from manyheads.convert.adopt import adopt
    from manyheads.convert.export import new_folder, save_plainly
    from manyheads.convert.source import load_source
    from manyheads.convert.text import Texts, default_text, read_text
    from manyheads.convert.verify import quality
    from manyheads.convert.zipit import Matching, check, zip_models

    logging.disable_progress_bar()
    how = Matching(alpha, beta)
    (c, c_length), (e, e_length) = sizes(calibrate), sizes(evaluate)
    sources = [load_source(name) for name in names]
    ours = [adopt(source.model) for source in sources]
    check(ours, until)
    tokenizer = sources[0].reader(names[0])
    cut = Texts.from_text(
        tokenizer, read_text(text) if text else default_text(), calibration_windows=c, calibration_length=c_length,
        evaluation_windows=e, evaluation_length=e_length,
    )  # fmt: skip
    with Bars() as bars:
        merged = zip_models(
            ours, cut.calibration, until, how=how, stream="matched" if matched else "same", progress=bars
        )
    before = [quality(model, cut.evaluation).perplexity for model in ours]
    after = [quality(model, cut.evaluation).perplexity for model in merged.members]
    with new_folder(out) as work:
        reports = [
            save_plainly(member, work / str(n), tokenizer=sources[n - 1].tokenizer)
            for n, member in enumerate(merged.members, 1)
        ]
    rows = [
        [name, number(old, 2), number(after[min(n, len(after) - 1)], 2)]
        for n, (name, old) in enumerate(zip(names, before, strict=True))
    ]
    table(["model", "perplexity", "merged"], rows)
    whole = sum(parameter.numel() for model in ours for parameter in model.parameters())
    typer.echo(f"{whole:,} parameters, now {merged.parameters:,}")
    for report in reports:
        typer.echo(f"checkpoint  {out / report.folder.name}: {report.loads_as}")
    result: dict[str, Any] = {"before": before, "after": after, "parameters": merged.parameters}
    finish(result | {"reports": [dataclasses.asdict(each) for each in reports]}, as_json)
