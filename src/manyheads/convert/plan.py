"""From a budget to what each layer becomes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyheads.core.part import OptionError
from manyheads.core.spec import Spec

Target = Literal["mla", "gqa", "auto", "share"]
SMALLEST_LATENT = 8
"""The smallest cache, in numbers a token and layer, that a latent is made for: one rotary pair and six channels."""


class BudgetError(ValueError):
    """A budget that no asked method can reach, and the smallest that it can."""


@dataclass(frozen=True)
class Shape:
    """What budgets are judged by: a source layer's key heads and widths, and how many layers there are.

    dim: width of its input, one more with biases; a latent as wide holds all of it. None sets no such bound.
    """

    kv_heads: int
    qk_width: int
    v_width: int
    dim: int | None = None
    layers: int = 1

    @property
    def floats(self) -> int:
        """Numbers cached a token and layer."""
        return self.kv_heads * (self.qk_width + self.v_width)

    @property
    def head(self) -> int:
        return self.qk_width + self.v_width


@dataclass(frozen=True)
class Goal:
    """A cache budget, in numbers a token and layer, and the way there.

    name: of the candidate, such as `mla-50` (per cent of the source's cache) or `mla-192f`. kv_heads: for `gqa`, 0
    where not one head fits. turning: rotary pairs of a latent's shared key. exact: the latent's rank at which nothing
    more can be kept. owners: for `share`, how many layers keep rows of their own.
    """

    name: str
    to: Target
    floats: int
    kv_heads: int
    turning: int
    exact: int | None = None
    owners: int = 0

    @property
    def rank(self) -> int:
        return self._asked if self.exact is None else min(self._asked, self.exact)

    @property
    def _asked(self) -> int:
        return self.floats - 2 * self.turning

    @property
    def note(self) -> str | None:
        """What of the budget is left unused, and why."""
        if self.exact is None or self._asked < self.exact:
            return None
        if self._asked == self.exact:
            return f"{self.name}: as large as the source's cache, so that nothing is saved"
        return (
            f"{self.name}: a rank of {self._asked} is above the exact one; clipped to {self.rank}, which makes "
            f"{self.rank + 2 * self.turning} numbers a token and layer"
        )


def read_budget(text: str, shape: Shape) -> int:
    """`50%` of the source's cache, or a number of floats a token and layer, as floats."""
    return int(_read(text, shape))


def _read(text: str, shape: Shape) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if match is None:
        raise BudgetError(
            f"a budget reads 50% (of the source's cache) or 192 (numbers a token and layer), not {text!r}"
        )
    number = float(match[1])
    return shape.floats * number / 100 if match[2] else int(number)


def make_goal(text: str, to: Target, shape: Shape) -> Goal:
    """The goal of a budget; raises `BudgetError` with the smallest that can be reached.

    At the source's own size and above, a latent holds everything: the goal is exact, and its rank clipped.
    """
    floats = read_budget(text, shape)
    owners = int(shape.layers * _read(text, shape) / shape.floats + 1e-9) if to == "share" else 0
    one = -(-shape.floats // shape.layers)
    smallest = {"mla": SMALLEST_LATENT, "gqa": shape.head, "auto": SMALLEST_LATENT, "share": one}[to]
    if (owners < 1) if to == "share" else floats < smallest:
        share = math.ceil(1e4 * smallest / shape.floats) / 100
        raise BudgetError(
            f"no {'method' if to == 'auto' else to} fits {text} ({floats} numbers a token and layer); the smallest is "
            f"{smallest} ({share:g}%)"
        )
    if to in ("gqa", "share") and floats >= shape.floats:
        raise BudgetError(f"a budget of {text} leaves nothing to shrink: the source caches {shape.floats} numbers")
    share = text.replace("%", "").strip() if "%" in text else f"{floats}f"
    name = f"{to}-{share}"
    if to == "share":
        return Goal(name, to, floats, 0, 0, owners=owners)
    fits = [g for g in range(1, shape.kv_heads) if shape.kv_heads % g == 0 and g * shape.head <= floats]
    kv_heads = max(fits, default=0)
    if to == "gqa":
        return Goal(name, to, floats, kv_heads, 0)
    turning = _turning(floats, shape)
    exact = shape.floats - 2 * turning
    return Goal(name, to, floats, kv_heads, turning, exact if shape.dim is None else min(exact, shape.dim))


def _turning(floats: int, shape: Shape) -> int:
    """Rotary pairs of the shared key: five eighths of a head's frequencies, and at most 5/12 of the cache.

    Fewer lose the slow pairs, by which far keys are told apart: a converted model then fails beyond its calibration's
    windows. A latent as wide as the input leaves more.
    """
    every = shape.qk_width * shape.kv_heads // 2
    if floats >= shape.floats:
        return every
    spare = 0 if shape.dim is None else (floats - shape.dim) // 2
    return min(max(1, min(shape.qk_width * 5 // 16, floats * 5 // 24), spare), every)


def check_uniform(specs: Sequence[Spec], shapes: Sequence[Shape]) -> Shape:
    """The one shape of all layers; conversions start from layers that are alike."""
    if len(set(shapes)) != 1:
        raise OptionError(f"layers differ in shape ({', '.join(dict.fromkeys(map(str, specs)))})")
    return shapes[0]
