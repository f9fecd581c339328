"""`manyheads decode train`: heads that draft several tokens a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, number, table

decode = typer.Typer(
    help="Heads that write several tokens a step, the same text as the model's own.", no_args_is_help=True
)


@decode.callback()
def _group() -> None:
    pass


@decode.command("train")
@command
def train(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in shrink, or a checkpoint.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="A folder for the drafter; an interrupted job goes on in it.")
    ],
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text whose beginnings the model continues. Repeatable.")
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(
            help="medusa: heads beside the model's own; jakiro: a layer with two experts; mtp: a chain of layers."
        ),
    ] = "medusa",
    heads: Annotated[int, typer.Option(min=1, help="Tokens drafted at most.")] = 3,
    layers: Annotated[int, typer.Option(min=1, help="Medusa: residual blocks a head.")] = 1,
    contrast: Annotated[
        bool, typer.Option(help="Jakiro: the last token comes from the difference of experts, not another pass.")
    ] = True,
    words: Annotated[int, typer.Option(min=1, help="Only so many tokens, the most frequent, are drafted.")] = 8192,
    texts: Annotated[int, typer.Option(min=16, help="Texts that the model writes; one in eight is held out.")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that each text begins with.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens that the model adds.")] = 112,
    sample: Annotated[bool, typer.Option("--sample", help="The model draws tokens instead of the likeliest.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Texts a step.")] = 8,
    lr: Annotated[float, typer.Option(min=0.0, help="The highest rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the choice of texts.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a drafter on text that the model writes itself; the model stays as it is.

    Interrupted, the same command goes on, and ends with the same bits.
    """
    name = find(model)
    from transformers.utils import logging

    from manyheads.convert.adopt import adopt
    from manyheads.convert.source import load_source
    from manyheads.convert.text import default_text, read_text
    from manyheads.decode.distil import Distillation
    from manyheads.decode.distil import train as distil

    logging.disable_progress_bar()
    how = Distillation(
        cast(Any, drafter), heads, layers, contrast=contrast, words=words, texts=texts, prompt=prompt, length=length,
        sample=sample, steps=steps, batch=batch, lr=lr, seed=seed,
    )  # fmt: skip
    source = load_source(name)
    tokenizer = source.reader(name)
    begun = read_text(text) if text else default_text()
    with Bars() as bars:
        made = distil(adopt(source.model), begun, out, how, tokenizer=tokenizer, name=source.name, progress=bars)
    shown = [0, 1, 2]
    rows = [
        [f"{head + 2} ahead", *(number(float(made.odds[head, : choice + 1].sum()), 3) for choice in shown)]
        for head in range(made.depth)
    ]
    table(["the token", *(f"in the best {choice + 1}" for choice in shown)], rows)
    typer.echo(f"drafter  {out}: manyheads generate {model} --draft {out}")
    weights = sum(parameter.numel() for parameter in made.parameters())
    finish({"model": name, "out": out, "parameters": weights, "odds": made.odds.tolist()}, as_json)
