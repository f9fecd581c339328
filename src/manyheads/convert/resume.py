"""Jobs that go on after an interrupt: what they were started with, and files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ResumeError(ValueError):
    """A folder of an interrupted job that was started with other options."""


def check_resume(work: Path, options: dict[str, Any]) -> None:
    """A job's options are written down when it starts; going on with others would mix two jobs.

    Raises:
        ResumeError: `work` holds a job with other options, each of which is named with its old and new value.
    """
    file = work / "job.json"
    options = _flat(json.loads(json.dumps(options, default=str)))
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        write_text(json.dumps(options, indent=1), file)
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ResumeError(f"{file} cannot be read; remove {work}, and the job starts anew") from error
    differ = sorted(name for name in before.keys() | options.keys() if before.get(name) != options.get(name))
    if differ:
        told = ", ".join(f"{name} was {before.get(name)!r}, is {options.get(name)!r}" for name in differ)
        raise ResumeError(f"{work} holds a job with other options ({told}); repeat them, or choose another folder")


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """One level, so that a difference is named by what differs: `heal.steps`."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def write_text(text: str, file: Path) -> None:
    """Whole or not at all; several processes may write the same file."""
    with whole_file(file) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A temporary neighbour to write, one for each process, that takes the name of `file` when the block ends well."""
    partial = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
