"""`manyheads list`: the parts that a spec may name."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from manyheads.cli.output import Debug, Json, command, finish, table


@command
def list_parts(
    part: Annotated[str | None, typer.Argument(metavar="[PART]", help="Show what this part does.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the parts of attention by stage, with their papers and options, or explain one."""
    from manyheads.core.registry import all_parts, all_presets, find

    presets = all_presets()
    if part is not None:
        kind = presets.get(part) or find(part)
        entry: dict[str, Any] = _entry(kind) | {"doc": inspect.getdoc(kind) or ""}
        typer.echo(f"{entry['name']} ({entry['stage']}{', ' if entry['paper'] else ''}{entry['paper']})\n")
        typer.echo(entry["doc"])
        if entry["options"]:
            table(
                ["option", "type", "default"],
                [[name, each["type"], _shown(each["default"])] for name, each in entry["options"].items()],
                left=3,
            )
        finish(entry, as_json)
        return
    entries = [_entry(kind) for kind in [*all_parts().values(), *presets.values()]]
    rows = [[each["stage"], each["name"], each["paper"], ", ".join(each["options"])] for each in entries]
    repeats = [index and row[0] == rows[index - 1][0] for index, row in enumerate(rows)]
    rows = [["", *row[1:]] if repeated else row for row, repeated in zip(rows, repeats, strict=True)]
    table(["stage", "part", "paper", "options"], rows, left=4)
    finish(entries, as_json)


def _entry(kind: Any) -> dict[str, Any]:
    """A part in JSON; a preset's stage is `preset`, and it names the parts that it stands for."""
    from manyheads.core.registry import options

    stage = getattr(kind, "stage", "preset")
    entry: dict[str, Any] = {"name": kind.name, "stage": stage, "paper": kind.paper, "options": options(kind)}
    if stage == "preset":
        entry["parts"] = [part.name for part in kind().parts()]
    return entry


def _shown(default: Any) -> str:
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
