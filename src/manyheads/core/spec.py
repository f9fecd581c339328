"""A spec: the one-line name of a combination of parts, such as `mla(rank=160, rope_dim=32) + moh(top=6)`.

It parses to frozen dataclasses, prints back to the same line, and says no with a reason when two parts exclude each
other.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from manyheads.core.cost import Cost
from manyheads.core.part import (
    FACTS,
    NONE,
    PLACES,
    STAGE_BREAKS,
    STAGE_NEEDS,
    STAGES,
    Heads,
    OptionError,
    Part,
    Site,
)
from manyheads.core.registry import all_presets, find


class SpecError(OptionError):
    """A line that is not a spec, or parts that do not go together."""


_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_][\w-]*(?:\.[\w-]+)*)|(?P<number>[-+]?\d[\w.+-]*)|(?P<sign>[+(),=\[\]]))")


@dataclass(frozen=True)
class Spec:
    """Parts in pipeline order. Build one with `Spec.parse`."""

    parts: tuple[Part, ...]

    @classmethod
    def parse(cls, line: str | Spec) -> Spec:
        """Read a line; an error points at the token."""
        if not isinstance(line, str | Spec):
            raise SpecError(f"a spec is a line of text such as 'gqa + kha', not {type(line).__name__}")
        return line if isinstance(line, Spec) else cls(tuple(_Parser(line).parts()))

    def __str__(self) -> str:
        return " + ".join(map(printed, self.parts))

    def resolve(self, site: Site) -> Spec:
        """In pipeline order, with what is implied: `gqa` (all heads) and, in causal self-attention, `rope`.

        A scan knows the order of tokens without it.
        """
        spec = self._whole(site)
        spec.check(site)
        return spec

    def _whole(self, site: Site) -> Spec:
        parts = sorted(self.parts, key=lambda part: STAGES.index(part.stage))
        stages = {part.stage for part in parts}
        if "project" not in stages:
            parts.append(find("gqa")())
        scores = all("scores" not in part.breaks for part in parts)
        if "position" not in stages and scores and site.causal and not site.cross:
            parts.append(find("rope")())
        return Spec(tuple(sorted(parts, key=lambda part: STAGES.index(part.stage))))

    def check(self, site: Site) -> None:
        """Judge the combination from slots and facts alone, left to right; a refusal says what is legal instead."""
        refusal = self._refusal(site)
        if refusal is None:
            return
        nearest = [refusal.hint] if refusal.hint else [refusal.place, *(f"'{spec}'" for spec in self._nearest(site))]
        said = " or ".join(filter(None, nearest))
        raise SpecError(refusal.why + (f"; nearest legal: {said}" if said else ""))

    def _nearest(self, site: Site) -> list[Spec]:
        """What is legal with as few parts less as possible, each of them a party to the quarrel that it ends."""
        tried: list[Spec] = [self]
        seen = set(tried)
        while tried:
            found = [(spec, spec._refusal(site)) for spec in tried]
            if legal := [spec for spec, refusal in found if refusal is None]:
                return legal
            less = dict.fromkeys(
                Spec(tuple(each for each in spec.parts if each is not part))._whole(site)
                for spec, refusal in found
                for part in (refusal.parties if refusal else ())
            )
            tried = [spec for spec in less if spec not in seen]
            seen.update(tried)
        return []

    def _refusal(self, site: Site) -> _Refusal | None:
        taken: dict[str, Part] = {}
        facts = site.facts
        broken: dict[str, Part] = {}
        kept: dict[str, Part] = {}
        projects = [part for part in self.parts if part.stage == "project"]
        for part in self.parts:
            if part.slot is not None and part.slot in taken:
                other = taken[part.slot]
                return _Refusal(f"{other.name!r} and {part.name!r} both take the slot {part.slot!r}", (part, other))
            for fact in sorted((part.needs | STAGE_NEEDS.get(part.stage, NONE)) - facts):
                before = " + ".join(other.name for other in self.parts[: self.parts.index(part)])
                why = "which nothing here gives" + (f" ({before})" if before else "")
                why = f"which {broken[fact].name!r} breaks" if fact in broken else why
                hint = part.hint.get(fact)
                for other in self.parts:
                    hint = other.hint.get(f"gives {fact}", hint)
                place = None if fact in broken else PLACES.get(fact)
                parties = (part, broken[fact]) if fact in broken else (part,) if place else (part, *projects)
                return _Refusal(f"{part.name!r} needs {fact!r} ({FACTS[fact]}), {why}", parties, hint, place)
            breaks = part.breaks | (STAGE_BREAKS.get(part.stage, NONE) - part.spares)
            breaks |= {"cached heads"} if part.at == "read" else NONE
            breaks |= {"values alone"} if part.stage == "transform" and not part.scores_only else NONE
            for fact in sorted(breaks & kept.keys()):
                why = f"{part.name!r} breaks {fact!r} ({FACTS[fact]}), which {kept[fact].name!r} relies on"
                return _Refusal(why, (part, kept[fact]), kept[fact].hint.get(fact))
            if part.slot is not None:
                taken[part.slot] = part
            broken.update(dict.fromkeys(breaks & facts, part))
            kept.update(dict.fromkeys(part.keeps, part))
            facts = (facts - breaks) | part.gives
        for fact in sorted(site.needs - facts):
            why = f"{broken[fact].name!r} breaks" if fact in broken else f"nothing here gives ({self})"
            why = f"a layer that takes its attention weights from another needs {fact!r} ({FACTS[fact]}), which {why}"
            return _Refusal(why, (broken[fact],) if fact in broken else ())
        if len(projects) != 1:
            names = [part.name for part in projects]
            return _Refusal(f"a spec has one projection, this one has {names or 'none'}", tuple(projects))
        return None

    def layouts(self, dim: int, heads: int, site: Site) -> list[tuple[Part, Heads, Heads]]:
        """Each part with the layout before and after it; the projection's `after` carries what later parts settle."""
        now = Heads.start(dim, heads)
        steps: list[tuple[Part, Heads, Heads]] = []
        for part in self.parts:
            try:
                after = part.layout(now, site)
            except OptionError as error:
                raise type(error)(_named(part.name, error)) from None
            if part.stage == "transform" and part.at == "read":
                after = after._replace(read=True)
            steps.append((part, now, after))
            now = after
        if now.grouped and now.q % now.kv:
            fits = [kv for kv in range(1, now.q + 1) if now.q % kv == 0]
            name = next(part.name for part, old, new in reversed(steps) if (old.q, old.kv) != (new.q, new.kv))
            raise OptionError(f"{name}: {now.q} query heads cannot share kv_heads={now.kv}; kv_heads may be {fits}")
        final = {name: getattr(now, name) for name in ("out", "out_width", "keep", "rotary", "keys")}
        return [
            (part, before, after._replace(**final)) if part.stage == "project" else (part, before, after)
            for part, before, after in steps
        ]

    def cost(self, dim: int, heads: int, site: Site | None = None) -> Cost:
        """Parameters, cache and FLOPs of a layer with this spec."""
        site, total = site or Site(), Cost()
        spec = self.resolve(site)
        for part, before, after in spec.layouts(dim, heads, site):
            cost = part.cost(before, after, site)
            if part.lent(site):  # weights are computed anew, by the parameters of their owner
                cost = Cost(pair_flops=cost.pair_flops)
            total = total + (cost._replace(pair_flops=0) if spec.by_stage["scan"] and part.stage != "scan" else cost)
        return total.settled()

    @cached_property
    def by_stage(self) -> dict[str, list[Part]]:
        return {stage: [part for part in self.parts if part.stage == stage] for stage in STAGES}


def read_one(line: str, lookup: Callable[[str], type], what: str = "what is wanted") -> Any:
    """One `name(option=value, …)`, made from the dataclass that `lookup` finds; an error points at the token.

    The first option may go without its name, the first `unnamed` ones where the dataclass says so.
    what: the argument that the line is.
    """
    if not isinstance(line, str):
        raise SpecError(f"{what} is a line of text such as 'name(option=3)', not {line!r}")
    return _Parser(line, lookup).one()


def printed(part: Any) -> str:
    """The line that reads back as these options (a dataclass with a `name`)."""
    changed = [
        f"{field.name}={_value(getattr(part, field.name))}"
        for field in dataclasses.fields(part)
        if getattr(part, field.name) != field.default
    ]
    return part.name + (f"({', '.join(changed)})" if changed else "")


def _named(name: str, error: OptionError) -> str:
    """What a part says of its options, with its name once."""
    said = str(error)
    return said if said.startswith((f"{name}:", f"{name}(")) else f"{name}: {said}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


class _Refusal(NamedTuple):
    """Why parts do not go together. parties: the parts of which one is to go; place: where the first of them fits."""

    why: str
    parties: tuple[Part, ...]
    hint: str | None = None
    place: str | None = None


_SAID = {"part": "a part", "word": "a word", "number": "a number", "end": "the end"}


def _part_or_preset(name: str) -> type:
    return all_presets().get(name) or find(name)


class _Parser:
    def __init__(self, line: str, lookup: Callable[[str], type] = _part_or_preset) -> None:
        self.line, self.lookup = line, lookup
        self.tokens = list(self._scan())
        self.next = 0

    def _scan(self) -> Iterator[tuple[str, str, int]]:
        at = 0
        text = self.line.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(at + len(text[at:]) - len(text[at:].lstrip()), "not part of a spec")
            kind = match.lastgroup or ""
            yield kind, match.group(kind), match.start(kind)
            at = match.end()
        yield "end", "", len(text)

    def _error(self, at: int, message: str) -> SpecError:
        return SpecError(f"{message}\n  {self.line}\n  {' ' * at}^")

    def _take(self, *wanted: str) -> tuple[str, str, int]:
        kind, text, at = self.tokens[self.next]
        if text not in wanted and kind not in wanted and not (kind == "word" and "part" in wanted):
            found = repr(text) if text else "the end"
            sought = [_SAID.get(each, repr(each)) for each in wanted]
            raise self._error(at, f"expected {' or '.join(sought)}, found {found}")
        self.next += 1
        return kind, text, at

    def parts(self) -> Iterator[Part]:
        while True:
            at = self.tokens[self.next][2]
            made = self._part()
            try:
                yield from (made,) if isinstance(made, Part) else made.parts()
            except OptionError as error:  # of a line that the user has not written
                raise self._error(at, f"{made.name}: {str(error).splitlines()[0]}") from None
            if self.tokens[self.next][0] == "end":
                return
            self._take("+")

    def one(self) -> Any:
        made = self._part()
        self._take("end")
        return made

    def _part(self) -> Any:
        _, name, at = self._take("part")
        try:
            part = self.lookup(name)
        except OptionError as error:
            raise self._error(at, str(error)) from None
        given: dict[str, Any] = {}
        if self.tokens[self.next][1] == "(":
            self._take("(")
            while self.tokens[self.next][1] != ")":
                self._option(part, given)
                if self.tokens[self.next][1] != ")":
                    self._take(",", *([")"] if self.tokens[self.next][0] == "end" else []))
            self._take(")")
        fields = dataclasses.fields(part)
        missing = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in given]
        if missing:
            line = f"{name}({', '.join(f'{each}=…' for each in missing)})"
            raise self._error(at, f"{name!r} needs {' and '.join(missing)}: {line}")
        try:
            return part(**given)
        except OptionError as error:
            raise self._error(at, _named(name, error)) from None

    def _option(self, part: type, given: dict[str, Any]) -> None:
        fields = [field.name for field in dataclasses.fields(part)]
        at = self.tokens[self.next][2]
        named = self.tokens[self.next][0] != "end" and self.tokens[self.next + 1][1] == "="
        if named:
            _, name, _ = self._take("word")
            self._take("=")
        elif len(given) >= min(len(fields), getattr(part, "unnamed", 1)):
            most = getattr(part, "unnamed", 1)
            those = "option" if most == 1 else f"{most} options"
            raise self._error(at, f"only the first {those} of {part.name!r} may go without its name")
        else:
            name = fields[len(given)]
        if name not in fields:
            raise self._error(at, f"{part.name!r} has no option {name!r}; it has {', '.join(fields) or 'none'}")
        if name in given:
            raise self._error(at, f"option {name!r} is given twice")
        value_at = self.tokens[self.next][2]
        value = self._value()
        try:
            given[name] = _fit(value, typing.get_type_hints(part)[name])
        except ValueError as error:
            raise self._error(value_at, f"{part.name}({name}=…): {error}") from None

    def _value(self) -> Any:
        kind, text, at = self._take("word", "number", "[")
        if text == "[":
            values = []
            while self.tokens[self.next][1] != "]":
                values.append(self._value())
                if self.tokens[self.next][1] != "]":
                    self._take(",")
            self._take("]")
            return tuple(values)
        if kind == "number":
            try:
                return int(text)
            except ValueError:
                try:
                    return float(text)
                except ValueError:
                    raise self._error(at, f"{text!r} is not a number") from None
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _fit(value: Any, hint: Any) -> Any:
    """The value as the option's type wants it, or a ValueError that says what would fit."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        choices = typing.get_args(hint)
        lists = [choice for choice in choices if typing.get_origin(choice) is tuple]
        for choice in choices:
            with suppress(ValueError):
                return _fit(value, choice)
        if isinstance(value, tuple) and lists:
            return _fit(value, lists[0])  # says which of its values does not fit
        raise ValueError(f"{_value(value)} is not {' or '.join(map(_wanted, choices))}")
    if origin is Literal:
        choices = typing.get_args(hint)
        value = "none" if value is None and "none" in choices else value
        if value not in choices:
            raise ValueError(f"{_value(value)} is none of {', '.join(map(str, choices))}")
        return value
    if origin is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{_value(value)} is not {_wanted(hint)}")
        return tuple(_fit(each, typing.get_args(hint)[0]) for each in value)
    if hint is type(None):
        if value is not None:
            raise ValueError(f"{_value(value)} is not {_wanted(hint)}")
        return None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int) and not isinstance(value, bool):  # a submodule may be called 0
        return str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{_value(value)} is not {_wanted(hint)}")
    return value


def _wanted(hint: Any) -> str:
    """What an option's type takes, in words."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if typing.get_origin(hint) is tuple:
        return "a list [...]"
    return "none" if hint is type(None) else "an int" if hint is int else f"a {hint.__name__}"
