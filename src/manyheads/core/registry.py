"""Every part by name. A part registers itself; the parser, `manyheads list` and the docs read this."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from manyheads.core.part import STAGES, OptionError, Part

if TYPE_CHECKING:
    from manyheads.core.feed import Feed

P = TypeVar("P", bound=type[Part])
Q = TypeVar("Q", bound=type)


class Preset(Protocol):
    """A name for several parts: a frozen dataclass of options whose `parts` it stands for."""

    name: ClassVar[str]
    paper: ClassVar[str]

    def parts(self) -> tuple[Part, ...]: ...


LIBRARY, FEEDS = "manyheads.attention", "manyheads.experts"
"""Importing them registers the library's own parts; by name, since core knows no room above it."""

_PRESETS: dict[str, Any] = {}
_PARTS: dict[str, type[Part]] = {}
_FEEDS: dict[str, type[Feed]] = {}


def register(part: P) -> P:
    """Class decorator: make a part known under its `name`."""
    if part.stage not in STAGES:
        raise OptionError(f"part {part.name!r} names the stage {part.stage!r}; stages are {', '.join(STAGES)}")
    return _enter(_PARTS, part, "parts")


def register_feed(feed: Q) -> Q:
    """Class decorator: make a feed-forward known under its `name`."""
    return _enter(_FEEDS, feed, "feed-forwards")


def _enter(known: dict[str, Any], kind: Any, what: str) -> Any:
    old = known.get(kind.name)
    if old is not None and (old.__module__, old.__qualname__) != (kind.__module__, kind.__qualname__):
        raise OptionError(f"two {what} are called {kind.name!r}: {old.__module__} and {kind.__module__}")
    known[kind.name] = kind
    return kind


def register_preset(preset: Q) -> Q:
    """Class decorator: make a preset known under its `name`."""
    _PRESETS[preset.name] = preset  # type: ignore[attr-defined]
    return preset


def all_presets() -> dict[str, type[Preset]]:
    """All presets by name."""
    all_parts()
    return dict(sorted(_PRESETS.items()))


def find(name: str) -> type[Part]:
    """The part of that name; an unknown one raises with the nearest names."""
    parts = all_parts()
    if name not in parts:
        near = _near(name.lower(), [*parts, *_PRESETS])
        said = f"did you mean {' or '.join(near)}?" if near else "`manyheads list` shows what there is"
        raise OptionError(f"no part {name!r}; {said}")
    return parts[name]


def _near(name: str, known: list[str]) -> list[str]:
    """The three likeliest names, and those that are as likely as the third."""

    def off(each: str) -> tuple[float, int]:
        ratio = difflib.SequenceMatcher(None, each, name).ratio()
        return -round(ratio, 3), sum(a != b for a, b in zip_longest(each, name))

    near = sorted(difflib.get_close_matches(name, known, n=12), key=off)
    return [each for each in near if off(each) <= off(near[:3][-1])]


def all_parts() -> dict[str, type[Part]]:
    """All parts, by stage and name."""
    import_module(LIBRARY)
    ordered = sorted(_PARTS.values(), key=lambda part: (STAGES.index(part.stage), part.name))
    return {part.name: part for part in ordered}


def find_feed(name: str) -> type[Feed]:
    """The feed-forward of that name; an unknown one raises with the names there are."""
    feeds = all_feeds()
    if name not in feeds:
        raise OptionError(f"no feed-forward {name!r}; there are {', '.join(feeds)}")
    return feeds[name]


def all_feeds() -> dict[str, type[Feed]]:
    """All feed-forwards by name."""
    import_module(FEEDS)
    return dict(sorted(_FEEDS.items()))


def options(part: type) -> dict[str, dict[str, Any]]:
    """The options of a part: `{name: {"type": text, "default": value}}`."""
    hints = typing.get_type_hints(part)
    return {
        field.name: {
            "type": _type(hints[field.name]),
            "default": None if field.default is dataclasses.MISSING else field.default,
        }
        for field in dataclasses.fields(part)
    }


def _type(hint: Any) -> str:
    """In the grammar of specs: `int | none`, `linear | norm`, `[int]`."""
    if typing.get_origin(hint) is tuple:
        return f"[{_type(typing.get_args(hint)[0])}]"
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_args(hint):
        return " | ".join(map(_type, typing.get_args(hint)))
    return "none" if hint is type(None) else hint.__name__
