"""What every command shares: figures to standard output, everything else to standard error, errors in one line."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, TypeVar

import typer

WIDTH = 80
EXPECTED = (ValueError, OSError, ImportError, FloatingPointError, MemoryError)
"""What a user can run into; the message says all. Anything else is a bug, and shows where."""

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON that holds the same figures.")]
Debug = Annotated[bool, typer.Option("--debug", help="On an error, show where in the code it happened.")]

F = TypeVar("F", bound=Callable[..., Any])


def command(function: F) -> F:
    """An expected error becomes one line on standard error and exit code 1; an interrupt, 130."""

    @functools.wraps(function)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            function(*args, debug=debug, **kwargs)
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except EXPECTED as error:
            if debug:
                raise
            typer.echo(fitted(f"error: {message(error)}"), err=True)
            raise typer.Exit(1) from None

    return run  # type: ignore[return-value]


def message(error: BaseException) -> str:
    """An error in words, without numbers of the system."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).strip() or type(error).__name__


def note(text: str) -> None:
    """Something that the user should know, on standard error."""
    typer.echo(fitted(f"note: {text}"), err=True)


def fitted(text: str) -> str:
    """A message as a terminal shows it without breaking words; one line where it goes to a file or a program.

    A line that points into another (`^`) stays below it: only the first line, the sentence, is broken.
    """
    import shutil
    import textwrap

    if not sys.stderr.isatty():
        return text
    sentence, *rest = text.split("\n")
    wide = shutil.get_terminal_size().columns
    return "\n".join([textwrap.fill(sentence, wide, break_on_hyphens=False, break_long_words=False), *rest])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, tight: bool = False) -> None:
    """Print a table that fits 80 columns; the first `left` columns hold text, the others numbers. tight: less air."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=tight)
    lines = max(title.count("\n") for title in head)
    for index, title in enumerate(head):
        raised = "\n" * (lines - title.count("\n")) + title  # titles stand at the bottom
        made.add_column(raised, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    console = Console(file=sys.stdout, width=WIDTH, highlight=False)
    console.print(made)


def wrapped(text: str, indent: str = "") -> None:
    """Print a text in lines of at most 80 columns."""
    import textwrap

    typer.echo(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))


def paragraphs(text: str) -> None:
    """Print a docstring in lines of at most 80 columns: what hangs below an option's name stays below it."""
    import textwrap

    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not (blocks and _goes_on(blocks[-1], line)):
            blocks.append([])
        blocks[-1].append(line)
    for first, *rest in blocks:
        own = " " * _depth(first)
        hang = " " * _depth(rest[0]) if rest else own + own
        one = " ".join(line.strip() for line in (first, *rest))
        lines = textwrap.wrap(one, WIDTH, initial_indent=own, subsequent_indent=hang, break_on_hyphens=False)
        typer.echo("\n".join(lines))


def _goes_on(block: Sequence[str], line: str) -> bool:
    """Whether a line belongs to the paragraph, or to the option, before it."""
    if not line.strip() or not block[-1].strip():
        return False
    start = _depth(block[0])
    return _depth(line) > start if start else not block[-1].endswith(":")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def number(value: float | None, digits: int) -> str:
    """1,234.5; a dash where nothing was measured."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def finish(value: Any, as_json: bool) -> None:
    """The last line of standard output, when it was asked for."""
    if as_json:
        typer.echo(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: null instead."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


class Bars:
    """Progress on standard error: a bar for each stage in a terminal, a line when a stage ends elsewhere."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._last = time.perf_counter()  # when a stage ended
        self._began: dict[str, float] = {}

    def __enter__(self) -> Bars:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bars = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._tasks[stage], completed=done)
            return
        now = time.perf_counter()
        began = self._began.setdefault(stage, now if done == 0 else self._last)
        if done == total:
            typer.echo(f"{stage}: done in {now - began:.1f} s", err=True)
            self._last = now
            del self._began[stage]


def sizes(text: str) -> tuple[int, int]:
    """`64x256`: 64 windows of 256 tokens."""
    count, sign, length = text.lower().partition("x")
    if not (sign and count.strip().isdecimal() and length.strip().isdecimal()):
        raise typer.BadParameter(f"{text!r} is not of the form 64x256 (windows x tokens)")
    return int(count), int(length)


def numbers(text: str) -> tuple[int, ...]:
    """`128,2048`, or `none`."""
    parts = [] if text.strip().lower() in ("", "none") else text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 128,2048")
    return tuple(map(int, parts))
