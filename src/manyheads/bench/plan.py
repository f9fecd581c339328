"""What `compare` is about to do: judged, and every width settled, before a step is made or a file written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from manyheads.bench.design import Design
from manyheads.bench.measure import measured_cache
from manyheads.bench.train import DTYPES, Corpus, Training
from manyheads.bench.width import EQUAL, NEAR, Equal, Fitted, figure, fit_width
from manyheads.bench.workers import Task
from manyheads.convert.text import default_text, read_text, split
from manyheads.core.check import check_whole, is_number
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec

PYDOC = "pydoc"


@dataclass(frozen=True)
class Plan:
    """What is to be done: a design for each spec, as every one of them will be built and trained."""

    lines: tuple[str, ...]
    fitted: tuple[Fitted, ...]
    training: Training
    corpus: Corpus
    cached: tuple[int, ...]
    notes: tuple[str, ...]

    def tasks(self, seeds: int, out: Path) -> list[Task]:
        """Every seed of every design, the first seed of all first."""
        return [
            Task(f"{line}, seed {seed}", fitted.design, seed, out / "runs" / f"{index}-{seed}.json")
            for seed in range(seeds)
            for index, (line, fitted) in enumerate(zip(self.lines, self.fitted, strict=True))
        ]


def check_numbers(
    counts: dict[str, int], lr: float, warmup: int | None, aux_weight: float, dtype: str, equal: str
) -> None:
    """Refuse what is no number of its kind, and names that there are not."""
    check_whole(**counts)
    if warmup is not None:
        check_whole(0, warmup=warmup)
    if warmup is not None and warmup > counts["steps"]:
        raise ValueError(f"warmup={warmup} of steps={counts['steps']}; it may be 0 to {counts['steps']}")
    if not (is_number(lr) and lr > 0):
        raise ValueError(f"lr is a positive number, not {lr!r}")
    if not (is_number(aux_weight) and aux_weight >= 0):
        raise ValueError(f"aux_weight is a number of at least 0, not {aux_weight!r}")
    for name, value, known in (("dtype", dtype, DTYPES), ("equal", equal, EQUAL)):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")


def check_lines(lines: Sequence[str], layers: int) -> list[str]:
    """The lines, evenly spaced: every one is a spec of a causal decoder, and no two are the same one."""
    if not lines:
        raise ValueError("no spec given; the first is what the others are compared with")
    seen: dict[str, int] = {}
    for index, line in enumerate(lines, 1):
        try:
            resolved = str(Spec.parse(line).resolve(Site(layers=layers)))
        except OptionError as error:
            raise type(error)(f"{_which(lines, index)}: {error}") from None
        if resolved in seen:
            raise ValueError(f"specs {seen[resolved]} and {index} are the same: {resolved}")
        seen[resolved] = index
    return [re.sub(r"\s*,\s*", ", ", " ".join(line.split())) for line in lines]


def _which(lines: Sequence[str], index: int) -> str:
    return f"spec {index} of {len(lines)}, {lines[index - 1]!r}"


def read_corpus(text: str | Path) -> tuple[str, Corpus]:
    """What a text is called, and its two sides."""
    whole = default_text() if str(text) == PYDOC else read_text([Path(text).expanduser()])
    sides = (side.encode("utf-8", "replace") for side in split(whole))
    return "Python's help topics" if str(text) == PYDOC else Path(text).name, Corpus(*sides)


def make_plan(lines: Sequence[str], base: Design, training: Training, corpus: Corpus, equal: Equal = "none") -> Plan:
    """Settle every width, and see that every model can be built and reads as many tokens as it will be given.

    Raises:
        OptionError, ValueError: naming the spec.
    """
    context, itemsize = training.context, DTYPES[training.dtype].itemsize
    for side, data in (("training", corpus.train), ("held-out", corpus.held)):
        if len(data) < context + 1:
            raise ValueError(
                f"context={context} needs {context + 1} bytes of text on either side, and the {side} one has "
                f"{len(data)}; a longer text or a shorter context would do"
            )
    fitted: list[Fitted] = []
    cached: list[int] = []
    notes: list[str] = []
    for index, line in enumerate(lines, 1):
        design = replace(base, spec=line)
        try:
            if index == 1 or equal == "none":
                design.check(context)
                fitted.append(Fitted(design, design.costs(context, itemsize)))
            else:
                fitted.append(fit_width(design, fitted[0].costs, equal, context, itemsize))
            cached.append(measured_cache(fitted[-1].design, context, training.dtype))
        except (ValueError, ImportError) as error:
            kind = type(error) if isinstance(error, OptionError) else ValueError
            raise kind(f"{design.blame(context) or _which(lines, index)}: {error}") from error
        notes += _said(line, fitted[0], fitted[-1], equal) if index > 1 and equal != "none" else []
        stated = round(fitted[-1].costs.cache * context)
        if abs(cached[-1] - stated) > stated / 100:
            notes.append(f"{line}: a cache of {context} tokens holds {cached[-1]:,} bytes; its parts say {stated:,}")
    return Plan(tuple(lines), tuple(fitted), training, corpus, tuple(cached), tuple(notes))


_FIGURES = {"params": "parameters", "flops": "training FLOPs a token", "cache": "cache bytes a token"}


def _said(line: str, base: Fitted, fitted: Fitted, equal: Equal) -> list[str]:
    """How near a width came to the budget."""
    got, wanted = (f"{figure(each.costs, equal):,.0f}" for each in (fitted, base))
    what, off, width = _FIGURES[equal], f"{100 * fitted.off:+.1f} %".replace("-", "−"), f"{fitted.design.dim}"
    if fitted.design.hidden is not None:
        width += f" with a feed-forward of {fitted.design.inner} (the base's is {base.design.inner})"
    if fitted.met:
        return [f"{line}: width {width}, {got} {what} ({off})"]
    return [
        f"{line}: no width is within {100 * NEAR:.0f} % of {wanted} {what}; the nearest, {width}, has {got} ({off})"
    ]
