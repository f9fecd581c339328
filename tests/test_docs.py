"""Every ```python block of the README and of docs/ runs, unless `<!-- not run -->` is on the line before."""

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>```+)[ \t]*(?P<language>\w*).*$")
NOT_RUN = "<!-- not run -->"


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a Markdown text that are to be run, each with the line number (from 1) of its first line."""
    found, lines, i = [], text.splitlines(), 0
    while i < len(lines):
        fence = FENCE.match(lines[i])
        if fence is None:
            i += 1
            continue
        start, closing = i + 1, fence["ticks"]
        end = next((j for j in range(start, len(lines)) if lines[j].strip() == closing), len(lines))
        run = i == 0 or lines[i - 1].strip() != NOT_RUN
        if fence["language"] == "python" and run:
            found.append((start + 1, textwrap.dedent("\n".join(lines[start:end])) + "\n"))
        i = end + 1
    return found


def snippets():
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        if file.exists():
            for line, code in blocks(file.read_text(encoding="utf-8")):
                yield pytest.param(file, line, code, id=f"{file.relative_to(ROOT)}:{line}")


# pytest skips a parametrised test with no cases.
@pytest.mark.parametrize(("file", "line", "code"), snippets())
def test_snippet_runs(file, line, code, tmp_path, monkeypatch):
    # A real module, because dataclasses look theirs up by name; a temporary folder, because snippets save files.
    module = types.ModuleType(f"snippet_{file.stem}_{line}".replace("-", "_"))
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    # Blank lines in front make a traceback point at the line of the page.
    exec(compile("\n" * (line - 1) + code, str(file), "exec"), module.__dict__)


def test_blocks_are_found_with_their_line_and_those_marked_not_run_are_left_out():
    text = textwrap.dedent("""\
        # title
        ```python
        a = 1
        ```
        <!-- not run -->
        ```python
        raise SystemExit
        ```
        ````markdown
        ```python
        inside = "another block"
        ```
        ````
        - item
          ```python
          if True:
              b = 2
          ```
        ```bash
        ls
        ```
        """)
    assert blocks(text) == [(3, "a = 1\n"), (16, "if True:\n    b = 2\n")]


def test_the_page_of_parts_is_what_the_registry_says():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_parts
    finally:
        sys.path.pop(0)
    assert make_parts.PAGE.read_text(encoding="utf-8") == make_parts.page(), "run python docs/make_parts.py"
