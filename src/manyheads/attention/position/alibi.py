"""ALiBi: a linear penalty on distance, another slope for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias
from manyheads.core.mask import Mask
from manyheads.core.part import Heads, Part, Position, Site
from manyheads.core.position import alibi_slopes, of_distance
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Alibi(Part):
    """score_h(i, j) += -m_h · |i - j|, m_h = 2^(-8h/H); positions only, nothing rotates and nothing is learned.

    Source: Press et al. 2021, arXiv 2108.12409. Bidirectional use takes the distance, as the authors suggest.
    """

    name: ClassVar[str] = "alibi"
    stage: ClassVar = "position"
    paper: ClassVar[str] = "arXiv 2108.12409"
    slot: ClassVar[str | None] = "position"

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads", "bare scores"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        return heads._replace(rotary=None)

    def build(self, before: Heads, after: Heads, site: Site) -> AlibiPosition:
        return AlibiPosition(before.q)


class AlibiPosition(Position):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def bias(self, mask: Mask, flow: Flow) -> Bias | None:
        slopes = alibi_slopes(self.heads, flow.x.device).to(flow.x.dtype)[None, :, None, None]
        return lambda q, k: of_distance(lambda distance: -slopes * distance.abs(), mask.q[q], mask.k[k])
