"""Complex vector attention: each head reads phases at a rate of its own, positions turn them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from manyheads.core.cost import Cost
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Position, Site
from manyheads.core.position import angles, inverse_frequencies
from manyheads.core.registry import register

TINY = 1e-9
"""Added to squared magnitudes, as in the authors' code; below it a phase means nothing and passes no gradient."""


@register
@dataclass(frozen=True)
class ComplexFormer(Part):
    """s_mn = Σ_c a^q_c a^k_c cos(δ_c (φ^q_c - φ^k_c) + b_c + (m - n) g_c): phase differences, stretched and shifted.

    A head of width 2h is h complex numbers, real parts first: a = √(re² + im² + 1e-9) and φ = atan2(im, re) `[.., h]`
    of query and key; g_c = base^(-c/h); δ, b learned for each head, δ ~ N(0, 1/h) and b = 0 at the start. What depends
    on the query and what depends on the key part ways: with q̂ = a^q e^(i(δφ^q + b + m g)) and
    k̂ = a^k e^(i(δφ^k + n g)) the score is Re(q̂ · conj k̂), so this is plain fused attention on turned queries and keys,
    and k̂ is what is cached. δ = 1, b = 0 is RoPE.

    Options: base. scale of the scores: 1 as in the authors' code, `none` for the projection's own (with δ = 1 that is
    the RoPE model, for conversion).

    Choices: δ acts on both sides, so the query heads that share a key head share it, while each has its own b. Phase
    differences are not wrapped, as in the code; unless δ is an integer the score jumps where a phase passes ±π. Phases
    and positions are computed in float32 or wider (the code casts the frequencies to bfloat16, which blurs distances).

    Source: ComplexFormer 2025, arXiv 2505.10222.
    """

    name: ClassVar[str] = "complexformer"
    stage: ClassVar = "position"
    paper: ClassVar[str] = "arXiv 2505.10222"
    slot: ClassVar[str | None] = "position"
    examples: ClassVar = ({}, {"scale": None, "base": 100.0})

    base: float = 10000.0
    scale: float | None = 1.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"still values"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads", "one rotation"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        turning = 0 if heads.rotary is None else len(range(heads.qk_width)[heads.rotary])
        if turning < heads.qk_width:
            raise OptionError(
                f"complexformer: {turning} of the {heads.qk_width} key channels rotate, but a head is read as complex "
                "numbers as a whole; gqa and mfa rotate all of it"
            )
        if turning % 2:
            raise OptionError(
                f"complexformer: a head of width {turning} is not made of pairs; use {turning - 1} or {turning + 1}"
            )
        return heads if self.scale is None else heads._replace(scale=self.scale)

    def build(self, before: Heads, after: Heads, site: Site) -> ComplexPosition:
        return ComplexPosition(before, self.base)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost((before.q + before.kv) * before.qk_width // 2)


class ComplexPosition(Position):
    alike = False

    def __init__(self, heads: Heads, base: float) -> None:
        super().__init__()
        pairs, self.base, self.each = heads.qk_width // 2, base, heads.q // heads.kv
        self.rate = nn.Parameter(torch.randn(heads.kv, 1, pairs) * pairs**-0.5)
        self.shift = nn.Parameter(torch.zeros(heads.q, 1, pairs))

    def turn(self, x: Tensor, axis: Axis) -> Tensor:
        return self._turn(x, axis, self.rate)

    def turn_q(self, q: Tensor, axis: Axis) -> Tensor:
        return self._turn(q, axis, self.rate.repeat_interleave(self.each, 0), self.shift)

    def _turn(self, x: Tensor, axis: Axis, rate: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        wide, width = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
        re, im = x.to(wide).chunk(2, -1)
        square = re * re + im * im
        phase = _Phase.apply(re, im, square) * rate + shift
        size = (square + TINY).sqrt()
        re, im = size * phase.cos(), size * phase.sin()

        def make() -> tuple[Tensor, Tensor]:
            return angles(axis.position, inverse_frequencies(width, self.base, x.device), wide)

        cos, sin = axis.once((self.base, width, wide), make)
        return torch.cat([re * cos - im * sin, im * cos + re * sin], -1).to(x.dtype)


class _Phase(torch.autograd.Function):
    """atan2(im, re), without a gradient where re² + im² is below `TINY`."""

    @staticmethod
    def forward(ctx: Any, re: Tensor, im: Tensor, square: Tensor) -> Tensor:
        ctx.save_for_backward(re, im, square)
        return torch.atan2(im, re)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        re, im, square = ctx.saved_tensors
        turn = grad * (square >= TINY) / square.clamp_min(TINY)
        return -turn * im, turn * re, None
