"""`manyheads inspect`: what each head of a model does, as a page."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyheads.cli.models import find
from manyheads.cli.output import Bars, Debug, Json, command, finish, note, number, sizes, table, wrapped

if TYPE_CHECKING:
    from manyheads.inspect.atlas import Atlas


@command
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint, the output of shrink, or any MODEL that shrink takes.")
    ],
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text instead of Python's help topics. Repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for result.json and report.html.")] = Path("atlas"),
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model of the same vocabulary, to show it beside.")
    ] = None,
    windows: Annotated[str, typer.Option(metavar="NxT", help="Look at N windows of T tokens.")] = "8x256",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure every head: where it looks, what for, how much it matters, which others do the same.

    The model runs on its own kernels and gives what it always gives. Writes result.json and one page, report.html.
    """
    count, length = sizes(windows)
    name = find(model)
    beside = None if against is None else find(against)
    from manyheads.bench.heal import check_vocabularies
    from manyheads.convert.source import load_source
    from manyheads.convert.text import default_text, fitting, max_positions, read_text
    from manyheads.convert.text import windows as cut
    from manyheads.inspect.atlas import atlas, write_atlas
    from manyheads.inspect.measures import ordinals

    own = read_text(text) if text else None
    loaded = load_source(name)
    tokenizer = loaded.reader(name)
    other = None if beside is None else load_source(beside)
    if other is not None:
        check_vocabularies(loaded, other)
    notes: list[str] = []
    for each in filter(None, (loaded, other)):
        count, length = fitting((count, length), max_positions(each.model.config), notes)
    ids = cut(tokenizer, own or default_text(), count=count, length=length)
    said = ", ".join(file.name for file in text) if text else "Python's help topics"

    def decode(token: int) -> str:
        return str(tokenizer.decode([token]))

    with Bars() as bars:
        lists = list(ordinals(tokenizer).values())
        words = [decode(token) for token in ids[0].tolist()]
        look = partial(atlas, ids=ids, text=said, progress=bars, ordinals=lists, words=words, decode=decode)
        found = look(loaded.model.eval(), name=Path(name).name)
        if other is not None:
            found = replace(found, against=look(other.model.eval(), name=Path(str(beside)).name))
    found = write_atlas(replace(found, notes=(*notes, *found.notes)), out.expanduser())
    for line in found.notes:
        note(line)
    show(found)
    typer.echo(f"figures     {out}/result.json")
    if found.report is not None:
        typer.echo(f"report      {found.report}")
    finish(found.to_json(), as_json)


def show(found: Atlas) -> None:
    """The heads with a role, and those that matter most."""
    columns = [name for name in ("sink", "previous", "induction", "importance") if name in found.tables]
    top = [(layer, head) for layer, head, _ in found.tables["importance"].top(5)] if "importance" in columns else []
    best = [at for role in ("induction", "duplicate", "previous") for at, of in found.labels.items() if role in of][:10]
    chosen = sorted({*top, *best})
    rows = [
        [f"{layer}.{head}", ", ".join(found.labels.get((layer, head), ())) or "–",
         *(number(_at(found, name, layer, head), 4 if name == "importance" else 2) for name in columns)]
        for layer, head in chosen
    ]  # fmt: skip
    table(["head", "roles", *columns], rows, left=2)
    heads = sum(found.heads.values())
    wrapped(
        f"{found.model}, {found.text}, {found.tokens} tokens: {len(found.labels)} of {heads} heads have a role. Shown: "
        "those of induction, duplicates and the token before, and the five that the loss feels most."
    )


def _at(found: Atlas, name: str, layer: int, head: int) -> float | None:
    table = found.tables[name]
    return float(table[layer][head]) if layer in table else None
