"""`manyheads share`: weights that layers have in common."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Debug, Json, command, finish, number, table

WINDOWS = 16, 128
"""Windows of text, and tokens in each, that say where groups end and what a layer's inputs are like."""


class Method(Enum):
    """How layers share."""

    directshare = "directshare"
    masa = "masa"


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
    method: Annotated[
        Method, typer.Option(help="Heads take those of others, or layers combine common matrices.")
    ] = Method.directshare,
    share: Annotated[float, typer.Option(help="Of all heads, or matrices, how many are saved.")] = 0.3,
    of: Annotated[
        Of | None, typer.Option(help="directshare: heads are alike by these weights.", show_default="qk")
    ] = None,
    output: Annotated[
        bool | None,
        typer.Option("--output/--no-output", help="Share the output projection too.", show_default="not with masa"),
    ] = None,
    groups: Annotated[int, typer.Option(help="masa: groups of layers, each with its own matrices.")] = 1,
    rank: Annotated[int, typer.Option(help="masa: of what a layer's weights keep besides.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let layers share weights, so that the file holds fewer of them.

    directshare: heads of later layers use the weights of the earlier heads that they are most like. masa: the weights
    of each layer become a combination of a few matrices that all have (the least loss in squares). The cache stays what
    it is. `manyheads eval` says what it cost; `manyheads export --format family` writes the weights out again.
    """
    name = find(model)
    if method is Method.masa and of is not None:
        raise typer.BadParameter("--of is of --method directshare: masa compares no heads")
    if method is Method.directshare and (groups != 1 or rank):
        raise typer.BadParameter("--groups and --rank are of --method masa")
    if out.exists():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    from transformers.utils import logging

    from manyheads.convert.adopt import adopt
    from manyheads.convert.export import save
    from manyheads.convert.source import load_source

    logging.disable_progress_bar()
    source = load_source(name)
    ours = adopt(source.model)
    before = sum(parameter.numel() for parameter in ours.parameters())
    result: dict[str, Any]
    if method is Method.masa:
        shared, result = _combined(ours, source.tokenizer, share, bool(output), groups, rank)
    else:
        of = of or Of.qk
        shared, result = _replaced(ours, share, of.value, output is not False)
    after = sum(parameter.numel() for parameter in shared.parameters())
    notes = {"share": share, "method": method.value} | ({} if of is None else {"of": of.value})
    report = save(shared, out, tokenizer=source.tokenizer, notes=notes)
    typer.echo(f"{result.pop('what')}; {before:,} parameters, now {after:,}")
    typer.echo(str(report))
    finish(result | {"before": before, "after": after, "report": dataclasses.asdict(report)}, as_json)


def _replaced(ours: Any, share: float, of: Any, output: bool) -> tuple[Any, dict[str, Any]]:
    from manyheads.convert.directshare import direct_share, match_heads

    found = match_heads(ours, share, of=of)
    shared = direct_share(ours, found, output=output)

    def place(group: int) -> str:
        return f"{group // found.heads}.{group % found.heads}"

    rows = [[place(g), place(found.matches[g]), place(found.root(g)), number(s, 3)] for g, s in found.scores.items()]
    if rows:
        table(["layer.head", "its match", "weights of", "cosine"], rows, left=3)
    what = f"{len(rows)} of {found.layers * found.heads} head groups replaced"
    return shared, {"what": what, "matches": {place(g): place(m) for g, m in found.matches.items()}}


def _combined(
    ours: Any, tokenizer: Any, share: float, output: bool, groups: int, rank: int
) -> tuple[Any, dict[str, Any]]:
    from manyheads.convert.masa import cut, drift, masa, moments
    from manyheads.convert.text import default_text, windows

    starts, inputs = [0], None
    if groups != 1 or rank:
        if tokenizer is None:
            raise ValueError("--groups and --rank read text, and MODEL has no tokenizer")
        ids = windows(tokenizer, default_text(), count=WINDOWS[0], length=WINDOWS[1], spread=True)
        starts = cut(drift(ours, ids), groups)
        inputs = moments(ours, ids) if rank else None
    shared = masa(ours, share, output=output, groups=starts, rank=rank, inputs=inputs)
    parts: list[Any] = [layer.spec.by_stage["project"][0] for layer in shared.attentions]
    atoms = {part.group: part.atoms for part in parts}
    rows = [[str(start), str(atoms[group])] for group, start in enumerate(starts)]
    table(["from layer", "matrices of a type"], rows)
    what = f"{len(parts)} layers of {sum(atoms.values())} matrices a type"
    return shared, {"what": what, "groups": starts, "atoms": [atoms[group] for group in range(len(starts))]}
