"""Every part with its paper, and which two go together: `python docs/make_parts.py` writes parts.md beside it."""

from __future__ import annotations

import inspect
from pathlib import Path

from manyheads import Site
from manyheads.cli.list import pair_lines
from manyheads.core.registry import all_feeds, all_parts, all_presets
from manyheads.testing import matrix

PAGE = Path(__file__).with_name("parts.md")


def page() -> str:
    parts = all_parts()
    lines = [
        "# Parts",
        "",
        "Made by `python docs/make_parts.py` from the registry. `manyheads list PART` shows equation, options, source.",
        "",
        "| stage | part | what it is | paper |",
        "|---|---|---|---|",
    ]
    for name, part in [*parts.items(), *all_presets().items()]:
        module = inspect.getdoc(inspect.getmodule(part)) or ""
        stage = getattr(part, "stage", "preset")
        doc = (inspect.getdoc(part) if stage == "preset" else module) or ""
        lines.append(f"| {stage} | `{name}` | {doc.splitlines()[0]} | {part.paper} |")
    lines += [
        "",
        "## Feed-forwards",
        "",
        'What a stack\'s `ffn` may name, for all layers or one a layer: `ffn="moe(experts=8, top=2)"`.',
        "",
        "| feed-forward | what it is | paper |",
        "|---|---|---|",
    ]
    for name, feed in all_feeds().items():
        doc = inspect.getdoc(inspect.getmodule(feed)) or ""
        lines.append(f"| `{name}` | {doc.splitlines()[0]} | {feed.paper} |")
    lines += [
        "",
        "## Which two go together",
        "",
        "`+` makes a layer, `o` only where every token sees all others, `.` exclude each other; judged from what each",
        "part needs, gives, breaks and keeps, as a spec is when it is built. `manyheads list PART --pairs` says why.",
        "",
        "```",
    ]
    return "\n".join([*lines, *pair_lines(matrix(), matrix(Site(causal=False)), width=200), "```", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
