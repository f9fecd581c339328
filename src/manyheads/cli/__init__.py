"""The command line, `manyheads`: one file a command, each a thin layer over a function that Python users can call.

torch and transformers are imported when a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from manyheads import __version__
from manyheads.cli.compare import compare
from manyheads.cli.decode import decode
from manyheads.cli.eval import evaluate
from manyheads.cli.explain import explain
from manyheads.cli.export import export
from manyheads.cli.generate import generate
from manyheads.cli.heal import heal
from manyheads.cli.inspect import inspect
from manyheads.cli.list import list_parts
from manyheads.cli.lock import lock
from manyheads.cli.merge import merge
from manyheads.cli.merge_heads import merge_heads
from manyheads.cli.multi import multi
from manyheads.cli.prune import mask, prune
from manyheads.cli.share import share
from manyheads.cli.shrink import shrink

app = typer.Typer(
    name="manyheads",
    help="Take the heads of a transformer apart and put them back together cheaper, and know what it cost.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, function in (
    ("shrink", shrink),
    ("heal", heal),
    ("compare", compare),
    ("eval", evaluate),
    ("generate", generate),
    ("inspect", inspect),
    ("explain", explain),
    ("export", export),
    ("prune", prune),
    ("mask", mask),
    ("share", share),
    ("merge", merge),
    ("merge-heads", merge_heads),
    ("lock", lock),
    ("list", list_parts),
):
    app.command(name)(function)
app.add_typer(multi)
app.add_typer(decode, name="decode")


@app.callback()
def _version(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point."""
    app()


__all__ = ["app", "main"]
