"""Plain softmax attention; what a spec without an attend part does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Softmax(Part):
    """weights = softmax(cap · tanh(score / cap)) over visible keys; without a cap, softmax of the scores.

    Source: Vaswani et al. 2017, arXiv 1706.03762; the cap as in Gemma 2, arXiv 2408.00118.
    """

    name: ClassVar[str] = "softmax"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 1706.03762"
    slot: ClassVar[str | None] = "normalise"
    examples: ClassVar = ({}, {"cap": 2.0})

    cap: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap <= 0:
            raise OptionError(f"softmax: a cap of {self.cap} bounds nothing; it must be positive")

    def build(self, before: Heads, after: Heads, site: Site) -> SoftmaxAttend:
        return SoftmaxAttend(self.cap)


class SoftmaxAttend(Piece):
    def __init__(self, cap: float | None) -> None:
        super().__init__()
        self.cap = cap

    def split(self, call: Call, flow: Flow) -> list[Call]:
        return [call if self.cap is None else replace(call, softcap=self.cap)]
