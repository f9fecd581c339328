"""`manyheads export`: a checkpoint for others to load."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Debug, Json, command, finish


class Format(Enum):
    """What can be written."""

    deepseek = "deepseek"
    family = "family"
    manyheads = "manyheads"


class Dtype(Enum):
    """Of the weights in the file."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@command
def export(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, the output of shrink, or any MODEL that shrink takes.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR2", help="A new folder.")],
    format: Annotated[
        Format,
        typer.Option(
            help="deepseek: a stock DeepSeek-V3 model, needs no manyheads to run. family: the stock class that the "
            "model came from (Llama), for layers with fewer key heads. manyheads: our own."
        ),
    ] = Format.deepseek,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights in the file.")] = Dtype.float32,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a model in a form that other tools load, and prove that the file says the same.

    A model that a form cannot hold is refused with the reason, and nothing is written.
    """
    name = find(model)
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    import torch
    from transformers.utils import logging

    from manyheads.convert.adopt import adopt
    from manyheads.convert.export import FORMATS
    from manyheads.convert.source import load_source

    logging.disable_progress_bar()  # of single files
    wanted = getattr(torch, dtype.value)
    folding = format is Format.deepseek  # in float32, rounded once at the end
    source = load_source(name, dtype=torch.float32 if folding else wanted)
    options: dict[str, Any] = {"dtype": wanted} if folding else {}
    report = FORMATS[format.value](adopt(source.model), out, tokenizer=source.tokenizer, **options)
    typer.echo(str(report))
    finish(dataclasses.asdict(report), as_json)
