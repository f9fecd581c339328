"""From a budget to what each layer becomes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.convert.adopt import family_of
from manyheads.convert.methods import Auto, Latent, Method, Move, Wide, read_method
from manyheads.convert.stream import Layers
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsConfig

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

    name: of the candidate, such as `mla-50` (per cent of the source's cache) or `mla-192f`. kv_heads: for `gqa` and
    `qkv-sharing`, 0 where not one head fits. turning: rotary pairs of a latent's shared key. exact: the latent's rank
    (of others: the numbers) at which nothing more can be kept. how: the line of the method with its options, where it
    is not just `to`. owners: for `share`, how many layers keep rows of their own. share: the budget as a share of the
    source's, and shape: a source layer's, for `auto`.
    """

    name: str
    to: Move
    floats: int
    kv_heads: int
    turning: int
    exact: int | None = None
    how: str = ""
    owners: int = 0
    share: float = 1.0
    shape: Shape | None = None

    @property
    def method(self) -> Method:
        return read_method(self.how or self.to)

    @property
    def by_layer(self) -> bool:
        """Whether each layer takes one of several moves, or a share of its own."""
        method = self.method
        own = "adjusted" in (getattr(method, "ranks", ""), getattr(method, "heads", ""))
        return self.to in ("auto", "share", "retrieval") or getattr(method, "fold", 1) == 0 or own

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
        if self.to in ("qkv-sharing", "mfa"):
            over = f"{self._asked} numbers a token and layer are more than it can use"
            return None if self._asked == self.exact else f"{self.name}: {over}; it takes {self.exact}"
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


def make_goal(text: str, to: str | Method, shape: Shape) -> Goal:
    """The goal of a budget and a method; raises `BudgetError` with the smallest that can be reached.

    At the source's own size and above, a latent holds everything: the goal is exact, and its rank clipped.

    Raises:
        BudgetError: the budget does not fit. OptionError: there is no such method, or its options do not fit.
    """
    method, floats = read_method(to), read_budget(text, shape)
    if isinstance(method, Auto):
        return _planned(text, method, shape)
    kind = method.move
    latent = method if isinstance(method, Latent) else Latent()
    width = shape.qk_width // 2
    if latent.fold and width % latent.fold:
        fits = [f for f in range(1, width + 1) if width % f == 0]
        raise OptionError(f"{width} frequencies do not fold by {latent.fold}; fold may be {fits}")
    if kind == "tensorllm" and floats != shape.floats:
        raise BudgetError(
            f"{method.name} leaves the cache as it is; the one budget that it reaches is 100%, not {text}"
        )
    owners = int(shape.layers * _read(text, shape) / shape.floats + 1e-9) if kind == "share" else 0
    smallest = _smallest(method, shape)
    if owners < 1 if kind == "share" else floats < smallest:
        share = math.ceil(1e4 * smallest / shape.floats) / 100
        raise BudgetError(
            f"no {method.name} fits {text} ({floats} numbers a token and layer); the "
            f"smallest is {smallest} ({share:g}%)"
        )
    if kind not in ("mla", "tensorllm") and floats >= shape.floats:
        raise BudgetError(f"a budget of {text} leaves nothing to shrink: the source caches {shape.floats} numbers")
    share = text.replace("%", "").strip() if "%" in text else f"{floats}f"
    name, how = f"{method.name}-{share}", "" if str(method) == kind else str(method)
    if kind in ("dha", "tensorllm", "retrieval", "share"):
        return Goal(name, kind, floats, 0, 0, how=how, owners=owners)
    if kind == "mfa":
        return Goal(name, kind, floats, 0, 0, shape.kv_heads * shape.qk_width * _stored(method), how)
    head, most = (shape.qk_width, shape.kv_heads) if kind == "qkv-sharing" else (shape.head, shape.kv_heads - 1)
    fits = [g for g in range(1, most + 1) if shape.kv_heads % g == 0 and g * head <= floats]
    kv_heads = max(fits, default=0)
    if kind == "qkv-sharing":
        return Goal(name, kind, floats, kv_heads, 0, kv_heads * head, how)
    if kind == "gqa":
        return Goal(name, kind, floats, kv_heads, 0, how=how)
    turning = _turning(floats, shape, latent)
    exact = shape.floats - 2 * turning
    return Goal(name, kind, floats, kv_heads, turning, exact if shape.dim is None else min(exact, shape.dim), how)


def _planned(text: str, method: Auto, shape: Shape) -> Goal:
    """The goal of a plan; whether it can be reached is seen from the layers' specs (`planner.check_plan`)."""
    share = _read(text, shape) / shape.floats
    if method.target != "cache" and "%" not in text:
        raise BudgetError(f"a budget of target={method.target} is a share of the source's, such as 50%, not {text}")
    if not 0 < share < 1:
        raise BudgetError(f"a budget of {text} leaves nothing to shrink" if share else "a budget of nothing")
    number = text.replace("%", "").strip() if "%" in text else f"{int(share * shape.floats)}f"
    name = f"auto-{number}" if method.target == "cache" else f"auto-{method.target}-{number}"
    floats = int(share * shape.floats) if method.target == "cache" else shape.floats // 2
    turning = _turning(max(floats, SMALLEST_LATENT), shape, Latent())
    return Goal(name, "auto", floats, 0, turning, None, str(method), share=share, shape=shape)


def _smallest(method: Method, shape: Shape) -> int:
    """The smallest cache that a method can make."""
    if method.move == "share":
        return -(-shape.floats // shape.layers)
    if method.move == "retrieval":
        return 0
    if method.move in ("gqa", "dha"):
        return shape.head
    if method.move == "qkv-sharing":
        return shape.qk_width
    if method.move == "mfa":
        return 2 * _stored(method)
    return _least(method if isinstance(method, Latent) else Latent(), shape)


def _stored(method: Method) -> int:
    """Rows of one width that a wide head caches for each token."""
    return 1 if isinstance(method, Wide) and method.key_reuse else 2


def _least(how: Latent, shape: Shape) -> int:
    """The smallest cache of a latent: the rotary channels that it must have, and six more."""
    heads = shape.kv_heads if how.slots == "heads" else 1
    return SMALLEST_LATENT + heads * (how.rotary or 2) - 2


def _turning(floats: int, shape: Shape, how: Latent) -> int:
    """Rotary pairs in all. Of the shared key: five eighths of a head's frequencies, and at most 5/12 of the cache.

    Fewer lose the slow pairs, by which far keys are told apart: a converted model then fails beyond its calibration's
    windows. A latent as wide as the input leaves more. Of each head's own: a quarter of its channels, and at most half
    of the cache.
    """
    width = shape.qk_width // 2
    heads = shape.kv_heads if how.slots == "heads" else 1
    every = width * (shape.kv_heads if how.keep == "damage" else heads)
    if how.rotary is not None:
        turning = heads * how.rotary // 2
        if turning > every:
            raise OptionError(f"rotary={how.rotary} is more than turns; at most {2 * every // heads}")
        if how.keep == "uniform" and width % (how.rotary // 2):
            fits = [2 * n for n in range(1, width + 1) if width % n == 0]
            raise OptionError(f"keep=uniform takes every n-th of {width} pairs; rotary may be {fits}")
        return turning
    spare = 0 if shape.dim is None else (floats - shape.dim) // 2
    if floats >= shape.floats:
        pairs = every
    elif how.slots == "heads":
        pairs = heads * max(1, min(width // 4, floats // (4 * heads)))
    else:
        pairs = min(max(1, min(shape.qk_width * 5 // 16, floats * 5 // 24), spare), every)
    if how.keep == "uniform":
        pairs = heads * max(n for n in range(1, pairs // heads + 1) if width % n == 0)
    return pairs


def shape_of(source: Layers | ManyheadsConfig) -> Shape:
    """The shape that budgets are judged by, from the config alone; layers that cannot be converted are refused here."""
    config = source if isinstance(source, ManyheadsConfig) else source.config
    if config.base is None:
        raise OptionError("conversions start from an adopted model; this one is our own decoder")
    if family_of(config.base).embeds_positions:
        raise OptionError(
            f"a {config.base.model_type} adds positions to its embeddings, which conversions, layer by layer, do not "
            "follow; they take models whose attention rotates by position"
        )
    for index, shared in enumerate(zip(config.kv_source, config.attn_source, strict=True)):
        if shared != (None, None):
            raise OptionError(f"layer {index} reads from another layer; conversions start from layers of their own")
    shapes, specs = [], []
    for index, (line, heads) in enumerate(zip(config.specs, config.heads, strict=True)):
        spec, site = Spec.parse(line), Site(index, len(config.specs))
        project = spec.by_stage["project"]
        if [part.name for part in project] != ["gqa"]:
            raise OptionError(f"layer {index} is {spec}; conversions start from gqa")
        _, _, layout = spec.resolve(site).layouts(config.hidden_size, heads, site)[0]
        specs.append(spec)
        width = config.hidden_size + ("v" in project[0].bias)  # type: ignore[attr-defined]
        shapes.append(Shape(layout.kv, layout.qk_width, layout.v_width, width, len(config.specs)))
    return check_uniform(specs, shapes)


def check_uniform(specs: Sequence[Spec], shapes: Sequence[Shape]) -> Shape:
    """The one shape of all layers; conversions start from layers that are alike."""
    if len(set(shapes)) != 1:
        raise OptionError(f"layers differ in shape ({', '.join(dict.fromkeys(map(str, specs)))})")
    return shapes[0]
