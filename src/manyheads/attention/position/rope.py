"""Rotary position embedding, in every form that checkpoints use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Position, Site
from manyheads.core.position import (
    angles,
    inverse_frequencies,
    pairs,
    rotate,
    scale_llama3,
    scale_yarn,
    unpair,
    yarn_magnitude,
)
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Rope(Part):
    """Each pair p of rotary channels turns by position · θ_p, θ_p = base^(-2p/width), so scores see distances only.

    Options:
        pairing: which channels pair up, `half` (p with p + width/2) or `interleaved` (2p with 2p + 1); `none` leaves
            RoPE out.
        base: θ. fraction: share of the rotary channels that turn (the first ones).
        scaling, factor, original: extension of the context by `factor` from `original` positions; `linear` divides
            all frequencies, `llama3` (low, high: turns) and `yarn` (fast, slow: turns; magnitude of the rotated
            features, default 0.1 ln factor + 1) only the slow ones.
        pairs: which frequencies of the table the channels use, one index for each pair (repeats are legal: a
            converted latent layer keeps the pairs that matter). of: the table's width, default the rotary width.

    Source: Su et al. 2021, arXiv 2104.09864; scalings as in `manyheads.core.position`.
    """

    name: ClassVar[str] = "rope"
    stage: ClassVar = "position"
    paper: ClassVar[str] = "arXiv 2104.09864"
    slot: ClassVar[str | None] = "position"
    examples: ClassVar = ({}, {"pairing": "interleaved", "scaling": "yarn"}, {"fraction": 0.34}, {"pairing": "none"})

    pairing: Literal["half", "interleaved", "none"] = "half"
    base: float = 10000.0
    fraction: float = 1.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    magnitude: float | None = None
    pairs: tuple[int, ...] | None = None
    of: int | None = None

    @property
    def spares(self) -> frozenset[str]:
        return frozenset({"positive"} if self.pairing == "none" else ())

    def layout(self, heads: Heads, site: Site) -> Heads:
        if not (0 < self.base < math.inf and 0 < self.factor < math.inf):
            raise OptionError(f"rope: base={self.base} and factor={self.factor} must be positive numbers")
        if self.pairing == "none" or heads.rotary is None:
            return heads._replace(rotary=None)
        first, last, _ = heads.rotary.indices(heads.qk_width)
        width = int((last - first) * self.fraction)
        if self.pairs is not None:
            if 2 * len(self.pairs) != width:
                raise OptionError(
                    f"rope: {len(self.pairs)} pairs turn {2 * len(self.pairs)} channels, the projection has {width}"
                )
            if max(self.pairs) >= self.table(width) // 2:
                raise OptionError(
                    f"rope: pair {max(self.pairs)} is beyond a table of {self.table(width) // 2}; give of={{width}}"
                )
        if width % 2:
            raise OptionError(self._odd(heads, last - first, width))
        return heads._replace(rotary=slice(first, first + width) if width else None)

    def _odd(self, heads: Heads, rotary: int, width: int) -> str:
        """What would fit in place of an odd number of channels."""
        even = " or ".join(str(each) for each in (width - 1, width + 1) if each)
        if width != rotary:
            how = f"fraction={self.fraction} of {rotary}; {even} of them would do"
        elif width * heads.q == heads.dim:
            counts = [each for each in range(1, heads.dim + 1) if heads.dim % (2 * each) == 0]
            how = f"dim={heads.dim} over heads={heads.q}; " + (f"heads may be {counts}, or " if counts else "")
            how += f"head_dim {even}"
        else:
            how = f"the projection's head_dim, rope_dim or the like may give {even}"
        odd = f"{width} channel{'s' * (width > 1)} of a head cannot turn in pairs"
        return f"rope: {odd} ({how}); rope(none) leaves rotation out"

    def build(self, before: Heads, after: Heads, site: Site) -> RopePosition:
        return RopePosition(self)

    def table(self, width: int) -> int:
        """Channels that the table of frequencies is made for."""
        return self.of or width

    def frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """θ of each of the `width / 2` pairs, float32, scaled and chosen."""
        dim = self.table(width)
        theta = inverse_frequencies(dim, self.base, device)
        if self.scaling == "linear":
            theta = theta / self.factor
        elif self.scaling == "llama3":
            theta = scale_llama3(theta, factor=self.factor, low=self.low, high=self.high, original=self.original)
        elif self.scaling == "yarn":
            theta = scale_yarn(
                theta, dim=dim, base=self.base, factor=self.factor, original=self.original, fast=self.fast,
                slow=self.slow, truncate=self.truncate,
            )  # fmt: skip
        return theta if self.pairs is None else theta[list(self.pairs)]

    def growth(self) -> float:
        """The factor on rotated features."""
        if self.scaling != "yarn":
            return 1.0 if self.magnitude is None else self.magnitude
        return yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude


class RopePosition(Position):
    def __init__(self, options: Rope) -> None:
        super().__init__()
        self.options = options

    def turn(self, x: Tensor, axis: Axis) -> Tensor:
        return rotate(x, *self._angles(x, axis), self.options.pairing)

    def turn_back(self, x: Tensor, axis: Axis) -> Tensor:
        cos, sin = (table / self.options.growth() ** 2 for table in self._angles(x, axis))  # both have grown
        return rotate(x, cos, -sin, self.options.pairing)

    def apart(self, q: Tensor, axis: Axis) -> tuple[Tensor, tuple[Tensor, ...]]:
        pairing = self.options.pairing
        a, b = pairs(q, pairing)
        tables = axis.once(
            (self.options, q.shape[-1], q.dtype, "tables"),
            lambda: tuple(unpair(t, t, pairing) for t in self._angles(q, axis)),
        )
        return torch.cat([q, unpair(b, -a, pairing)], -1), tables

    def _angles(self, x: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        options, width = self.options, x.shape[-1]

        def make() -> tuple[Tensor, Tensor]:
            theta = options.frequencies(width, x.device)
            return angles(axis.position, theta, x.dtype, options.growth())

        return axis.once((options, width, x.dtype), make)
