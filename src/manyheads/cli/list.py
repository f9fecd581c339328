"""`manyheads list`: parts that a spec may name, feed-forwards of a stack, methods of `shrink`, families adopted."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from manyheads.cli.output import Debug, Json, command, finish, paragraphs, table, wrapped

Pairs = Mapping[tuple[str, str], str | None]
"""Why two parts exclude each other, None where they do not."""


@command
def list_parts(
    part: Annotated[str | None, typer.Argument(metavar="[PART]", help="Show what this part does.")] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Show which parts go together (with PART: and why not).")
    ] = False,
    methods: Annotated[
        bool, typer.Option("--methods", help="Show what `shrink --to` takes (with a name: its options).")
    ] = False,
    families: Annotated[bool, typer.Option("--families", help="Show which transformers models `adopt` knows.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the parts of attention by stage and the feed-forwards, with papers and options, or explain one."""
    from manyheads.core.part import OptionError
    from manyheads.core.registry import all_feeds, all_parts, all_presets, find

    if methods:
        _methods(part, as_json)
        return
    if families:
        _families(as_json)
        return
    presets, feeds = all_presets(), all_feeds()
    known = {*presets, *all_parts(), *feeds}
    other = {} if part is None or part in known else _elsewhere()
    if pairs:
        if part in other:
            raise OptionError(f"{part} is no part of a spec, but a {other[part][0]}; parts alone go together")
        _pairs(None if part is None else find(part).name, as_json)
        return
    if part in other:
        stage, kind = other[part]
        found = _entry(kind) | {"stage": stage, "doc": inspect.getdoc(kind) or ""}
        _explain(found)
        finish(found, as_json)
        return
    if part is not None:
        kinds = [presets.get(part) or find(part)] if part in {*presets, *all_parts()} else []
        kinds = [*kinds, *([feeds[part]] if part in feeds else [])] or [find(part)]
        entries = [_entry(kind) | {"doc": inspect.getdoc(kind) or ""} for kind in kinds]
        for entry in entries:
            _explain(entry)
        finish(entries[0] if len(entries) == 1 else entries, as_json)
        return
    entries = [_entry(kind) for kind in [*all_parts().values(), *presets.values(), *feeds.values()]]
    rows = [[each["stage"], each["name"], each["paper"], ", ".join(each["options"])] for each in entries]
    repeats = [index and row[0] == rows[index - 1][0] for index, row in enumerate(rows)]
    rows = [["", *row[1:]] if repeated else row for row, repeated in zip(rows, repeats, strict=True)]
    table(["stage", "part", "paper", "options"], rows, left=4)
    finish(entries, as_json)


def _elsewhere() -> dict[str, tuple[str, Any]]:
    """What has a line in other places than specs: what it is and where it is given, and its options, by name."""
    from manyheads.aggregate.aggregator import KINDS as AGGREGATORS
    from manyheads.convert.methods import METHODS
    from manyheads.experts import adapters
    from manyheads.multi.between import KINDS as BETWEEN
    from manyheads.multi.head import KINDS as HEADS
    from manyheads.stack.heads import SCHEDULES
    from manyheads.stack.maps import MAPS
    from manyheads.stack.melt import MELT
    from manyheads.stack.residual import RESIDUALS

    places: dict[str, Mapping[str, Any]] = {
        "module between trunk and heads, of `manyheads.multi`": BETWEEN,
        "output head, of `manyheads.multi`": HEADS,
        "aggregator, of `manyheads.aggregate`": AGGREGATORS,
        "adapter, of `manyheads.adapt`": adapters.kinds(),
        "map of layers, kv_source= or attn_source= of a stack": MAPS,
        "schedule of head counts, heads= of a stack": SCHEDULES,
        "residual, residual= of a stack": RESIDUALS,
        "feature of looped stacks, melt= of a stack": {MELT.name: MELT},
        "method, --to of `manyheads shrink`": METHODS,
    }
    return {name: (what, kind) for what, kinds in places.items() for name, kind in kinds.items()}


def _methods(name: str | None, as_json: bool) -> None:
    """The methods with a line each, or one with its options."""
    from manyheads.convert.methods import METHODS, find_method
    from manyheads.core.registry import options

    def entry(kind: Any) -> dict[str, Any]:
        what = (inspect.getdoc(kind) or "").splitlines()[0]
        return {"name": kind.name, "stage": "method", "paper": kind.paper, "options": options(kind), "what": what}

    if name is not None:
        kind = find_method(name)
        found = entry(kind) | {"doc": inspect.getdoc(kind) or ""}
        _explain(found)
        finish(found, as_json)
        return
    entries = [entry(kind) for kind in METHODS.values()]
    table(
        ["method", "paper", "what it does"], [[each["name"], each["paper"], each["what"]] for each in entries], left=3
    )
    finish(entries, as_json)


def _families(as_json: bool) -> None:
    """The models whose attention can become ours, by their transformers type."""
    from manyheads.convert.adopt import FAMILIES

    entries = [
        {
            "models": [*family.model_types],
            "attention": family.path,
            "class": "its own" if family.keeps_class else "ManyheadsForCausalLM",
        }
        for family in FAMILIES
    ]
    rows = [[", ".join(each["models"]), each["attention"], each["class"]] for each in entries]
    table(["model types", "attention layers at", "class once adopted"], rows, left=3)
    finish(entries, as_json)


def _explain(entry: dict[str, Any]) -> None:
    typer.echo(f"{entry['name']} ({entry['stage']}{', ' if entry['paper'] else ''}{entry['paper']})\n")
    paragraphs(entry["doc"])
    if entry["options"]:
        table(
            ["option", "type", "default"],
            [[name, each["type"], _shown(each["default"])] for name, each in entry["options"].items()],
            left=3,
        )


def pair_lines(decoder: Pairs, encoder: Pairs, width: int = 80) -> list[str]:
    """The matrix of legal pairs as text: + makes a layer, o only in an encoder, . exclude each other.

    What is wider than `width` goes on below, all rows again.
    """
    marks = {pair: "+" if why is None else "o" if encoder[pair] is None else "." for pair, why in decoder.items()}
    names = list(dict.fromkeys(name for pair in decoder for name in pair))
    wide, lines = max(map(len, names)), []
    for first in range(0, len(names), width - wide - 4):
        shown = range(first, min(first + width - wide - 4, len(names)))
        lines += [
            "",
            *(" " * (wide + 4) + "".join(digits) for digits in zip(*(f"{at + 1:2}" for at in shown), strict=True)),
        ]
        for index, row in enumerate(names, 1):
            both = ((marks.get((row, names[at]), ""), marks.get((names[at], row), "")) for at in shown)
            lines.append(f"{index:2} {row:{wide}} {''.join(max(pair, key=' .o+'.find) for pair in both)}")
    return lines[1:]


def _pairs(part: str | None, as_json: bool) -> None:
    """The matrix of legal pairs, or the partners of one part; the same judgement that a spec gets when it is built."""
    from manyheads.core.part import Site
    from manyheads.testing import matrix

    decoder, encoder = matrix(), matrix(Site(causal=False))
    if part is None:
        typer.echo("\n".join(pair_lines(decoder, encoder)))
        wrapped(
            "+ make a layer; o only where every token sees all others; . exclude each other (list PART --pairs: why)"
        )
    else:
        legal = {pair for pair, why in decoder.items() if why is None}
        names = dict.fromkeys(name for pair in decoder for name in pair)
        goes = [each for each in names if (part, each) in legal or (each, part) in legal]
        wrapped(f"{part} goes with {', '.join(goes) or 'no other part'}")
        for (first, second), why in decoder.items():
            if part in (first, second) and why is not None:
                wrapped(
                    f"{first} + {second}: {why}" + (" (legal in an encoder)" * (encoder[first, second] is None)), "  "
                )
    finish(
        [
            {
                "first": first,
                "second": second,
                "legal": why is None,
                "encoder": encoder[first, second] is None,
                "why": why,
            }
            for (first, second), why in decoder.items()
            if part in (None, first, second)
        ],
        as_json,
    )


def _entry(kind: Any) -> dict[str, Any]:
    """A part in JSON; a preset's stage is `preset`, and it names the parts that it stands for; else `feed-forward`."""
    from manyheads.core.feed import Feed
    from manyheads.core.registry import options

    feed: bool = issubclass(kind, Feed)
    stage = "feed-forward" if feed else getattr(kind, "stage", "preset")
    paper: str = getattr(kind, "paper", "")
    entry: dict[str, Any] = {"name": kind.name, "stage": stage, "paper": paper, "options": options(kind)}
    if stage == "preset" and hasattr(kind, "parts"):
        entry["parts"] = [part.name for part in kind().parts()]
    return entry


def _shown(default: Any) -> str:
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
