"""`manyheads lock`: other weights, the same function."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Debug, Json, command, finish


@command
def lock(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, or any MODEL that shrink takes.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    seed: Annotated[int, typer.Option(help="Of the maps that are drawn.")] = 0,
    condition: Annotated[float, typer.Option(help="Each map's largest stretch, and one over its least.")] = 3.0,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="Draw nothing: the weights that all such models have in common.")
    ] = False,
    parent: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Undo the maps between MODEL and the one it was trained from.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Rewrite a model's attention weights so that its function stays, and averages with its siblings do not work.

    It is a symmetry of the model and no protection: --canonical and --parent undo it. The file is compared with the
    model as it was before.
    """
    name = find(model)
    if canonical and parent is not None:
        raise typer.BadParameter("--canonical and --parent exclude each other")
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    from transformers.utils import logging

    from manyheads.convert import mergelock
    from manyheads.convert.adopt import adopt
    from manyheads.convert.export import save_plainly
    from manyheads.convert.export.reload import compare_models
    from manyheads.convert.source import load_source

    logging.disable_progress_bar()
    source = load_source(name)
    before = adopt(load_source(name).model)
    if parent is not None:
        changed = mergelock.unlock(source.model, load_source(find(parent)).model)
    elif canonical:
        changed = mergelock.canonical(source.model)
    else:
        changed = mergelock.lock(source.model, seed, condition=condition)
    compare_models(before, changed, "the function did not stay")
    report = save_plainly(changed, out, tokenizer=source.tokenizer)
    typer.echo(str(report))
    finish(dataclasses.asdict(report), as_json)
