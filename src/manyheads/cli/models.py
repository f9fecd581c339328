"""Which model a name stands for: a checkpoint, or the one candidate in the output folder of `shrink`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyheads.stack.pretrained import ManyheadsConfig


def find(name: str) -> str:
    """The name that `load_source` takes.

    Raises:
        ValueError: an output folder of `shrink` with more than one candidate, which are listed.
    """
    folder = Path(name).expanduser()
    result = folder / "result.json"
    if (folder / "config.json").exists() or not result.is_file():
        return name
    try:
        names = [row["name"] for row in json.loads(result.read_text(encoding="utf-8"))["candidates"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{result} was not written by manyheads shrink") from error
    if len(names) != 1:
        listed = ", ".join(str(folder / each) for each in names)
        raise ValueError(f"{name} holds {len(names)} candidates; give one of them: {listed or 'none is there'}")
    return str(folder / names[0])


def config_of(name: str) -> ManyheadsConfig:
    """The specs of a model, without its weights."""
    from manyheads.bench import job
    from manyheads.convert.source import EMBEDDED, embedded_file, load_source
    from manyheads.convert.stream import InMemory

    path = embedded_file() if name == EMBEDDED else Path(name).expanduser()
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return job.config_of(path)
    return job.quick_config(name) or InMemory(load_source(name).model).config  # loading says what is wrong with a name
