"""The options of a training as a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

LISTS, PATHS, TEXTS = ("drop", "text", "image"), ("out", "folder"), ("balance", "compare", "encoder")


def settings(path: Path, options: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """The arguments of `train_table`: of a table and options, or of a `.yaml` file and the options that were typed.

    A file holds `table`, and any of the options by name, `-` or `_` inside; lists may be YAML's or text with commas,
    targets may be a map of columns and heads too. Its paths are from its own folder, those of the options from here.

    Args:
        options: every option and its value; what a file may hold. typed: the names of those that override a file.
    """
    told = dict(options)
    table: Any = path
    if path.suffix.lower() in (".yaml", ".yml"):
        found = _read(path)
        table = found.pop("table", None)
        if not isinstance(table, str):
            raise ValueError(f"{path}: it names no table, `table: file.csv`")
        table = path.parent / table
        for name, value in found.items():
            if name not in options:
                raise ValueError(f"{path}: there is no option {name!r}; there are table, {', '.join(options)}")
            if name in PATHS and value is not None:
                value = path.parent / str(value)
            if isinstance(options[name], int | float):
                value = _number(value, type(options[name]), f"{path}: {name}")
            if name in TEXTS and not isinstance(value, str | None):
                raise ValueError(f"{path}: {name} is text, not {value!r}")
            if name not in typed:
                told[name] = value
    for name in ("targets", "out"):
        if told[name] is None:
            raise ValueError(f"--{name} is missing, on the command line and in a .yaml file")
    if isinstance(told["targets"], list):
        told["targets"] = ",".join(map(str, told["targets"]))
    if isinstance(told["targets"], Mapping):
        told["targets"] = {str(name): None if line is None else str(line) for name, line in told["targets"].items()}
    elif not isinstance(told["targets"], str):
        raise ValueError(f"{path}: targets are columns, `age,kind`, not {told['targets']!r}")
    for name in LISTS:
        told[name] = _listed(told[name])
    return {"table": table, **told}


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where}: no YAML ({getattr(error, 'problem', None) or error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: options by name are expected, not {type(found).__name__}")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def _number(value: Any, kind: type, name: str) -> float:
    """As the option is; YAML reads 3e-3 as text."""
    try:
        found = kind(value)
        if isinstance(value, bool) or float(value) != found:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{name} is a {'whole ' if kind is int else ''}number, not {value!r}") from None
    return found


def _listed(value: Any) -> tuple[str, ...]:
    each = value if isinstance(value, list | tuple) else str(value or "").split(",")
    return tuple(str(name).strip() for name in each if str(name).strip())
