"""`manyheads share`: heads that use the weights of similar heads in earlier layers."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Debug, Json, command, finish, number, table


class Of(Enum):
    """Which weights must be alike."""

    q = "q"
    k = "k"
    v = "v"
    qk = "qk"
    qkv = "qkv"


@command
def share(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint, or any MODEL that shrink takes.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new folder.")],
    share: Annotated[float, typer.Option(help="Of all heads, how many are replaced.")] = 0.3,
    of: Annotated[Of, typer.Option(help="Heads are alike by these weights.")] = Of.qk,
    output: Annotated[
        bool, typer.Option("--output/--no-output", help="Share the columns of the output projection too.")
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let heads of later layers use the weights of the earlier heads that they are most like (DirectShare).

    The file holds each set of weights once. The cache and the speed stay what they are. `manyheads eval` says what it
    cost; `manyheads export --format family` writes the weights out again.
    """
    name = find(model)
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    from transformers.utils import logging

    from manyheads.convert.adopt import adopt
    from manyheads.convert.directshare import direct_share, match_heads
    from manyheads.convert.export import save
    from manyheads.convert.source import load_source

    logging.disable_progress_bar()
    source = load_source(name)
    ours = adopt(source.model)
    before = sum(parameter.numel() for parameter in ours.parameters())
    found = match_heads(ours, share, of=of.value)
    shared = direct_share(ours, found, output=output)
    after = sum(parameter.numel() for parameter in shared.parameters())
    report = save(shared, out, tokenizer=source.tokenizer, notes={"share": share, "of": of.value})

    def place(group: int) -> str:
        return f"{group // found.heads}.{group % found.heads}"

    rows = [[place(g), place(found.matches[g]), place(found.root(g)), number(s, 3)] for g, s in found.scores.items()]
    if rows:
        table(["layer.head", "its match", "weights of", "cosine"], rows, left=3)
    typer.echo(
        f"{len(rows)} of {found.layers * found.heads} head groups replaced; {before:,} parameters, now {after:,}"
    )
    typer.echo(str(report))
    result: dict[str, Any] = {"matches": {place(g): place(m) for g, m in found.matches.items()}}
    finish(result | {"before": before, "after": after, "report": dataclasses.asdict(report)}, as_json)
