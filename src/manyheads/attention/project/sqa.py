"""Sparse query attention: fewer query heads."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from torch import Tensor

from manyheads.attention.grouped import Biases, GQAProject, grouped_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Site
from manyheads.core.registry import register

Kind = Literal["sqa", "ssqa", "xsqa", "xsmqa", "lsqa", "rsqa"]

SHARES: dict[Kind, tuple[Fraction, Fraction | None]] = {
    "sqa": (Fraction(1, 2), Fraction(1, 4)),
    "ssqa": (Fraction(1, 2), Fraction(1, 2)),
    "xsqa": (Fraction(1, 4), Fraction(1, 4)),
    "xsmqa": (Fraction(1, 4), None),
    "lsqa": (Fraction(3, 4), Fraction(1, 4)),
    "rsqa": (Fraction(1, 4), Fraction(1, 2)),
}
"""Query and key heads of each member as shares of H; None: one key head."""


@register
@dataclass(frozen=True)
class SQA(Part):
    """H_q < H query heads of the usual width d = D/H: score FLOPs fall to H_q/H of multi-head attention's.

    q = x W_Q `[B, H_q, T, d]`; k, v `[B, H_kv, S, d]`, each read by H_q/H_kv consecutive query heads as in `gqa`;
    y = concat(o) W_O, W_O `[H_q·d, D]`. With H_q < H_kv (reverse) the query heads repeat, score head i asks query head
    i mod H_q, there are H_kv head outputs, and the cost follows H_kv. Caches 2·H_kv·d numbers a token.

    Options:
        kind: which member of the family sets the default numbers of heads, as shares of H for queries and keys: `sqa`
            1/2 and 1/4, `ssqa` (symmetric) 1/2 and 1/2, `xsqa` (extreme) 1/4 and 1/4, `xsmqa` 1/4 and one key head,
            `lsqa` (light) 3/4 and 1/4, `rsqa` (reverse) 1/4 and 1/2; the key heads of the last two are a choice.
        q_heads, kv_heads: by hand, H at most; the larger must be a multiple of the smaller. head_dim: default D/H.
        bias: which projections have one. The authors' W_O has one by its framework's default.

    Source: Filipek 2025, arXiv 2510.01817.
    """

    name: ClassVar[str] = "sqa"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2510.01817"
    examples: ClassVar = ({}, {"kind": "rsqa", "bias": "o"}, {"q_heads": 3, "kv_heads": 1, "head_dim": 8})

    kind: Kind = "sqa"
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Biases = "none"

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys", "values alone"})

    def counts(self, heads: Heads) -> tuple[int, int]:
        """Query and key heads, checked."""
        share, kv_share = SHARES[self.kind]
        q = share * heads.q if self.q_heads is None else self.q_heads
        kv = (1 if kv_share is None else kv_share * heads.q) if self.kv_heads is None else self.kv_heads
        if int(q) != q or int(kv) != kv:
            raise OptionError(
                f"sqa({self.kind}): {heads.q} heads make {q} query and {kv} key heads; give q_heads and kv_heads, or a "
                f"number of heads such as {heads.q // 4 * 4 or 4}"
            )
        q, kv = int(q), int(kv)
        for name, given in (("q_heads", q), ("kv_heads", kv)):
            if not 1 <= given <= heads.q:
                raise OptionError(f"sqa: {name}={given} of {heads.q} heads; it may be 1 to {heads.q}")
        if max(q, kv) % min(q, kv):
            both = ((q, self.q_heads, "q_heads", kv), (kv, self.kv_heads, "kv_heads", q))
            said = [f"{name}={count}" + ("" if by else f" (by {self.kind})") for count, by, name, _ in both]
            fits = [f"{name} may be {_fits(other, heads.q)}" for *_, name, other in both]
            raise OptionError(f"sqa: {' and '.join(said)} do not divide each other; {' or '.join(fits)}")
        return q, kv

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        q, kv = self.counts(heads)
        score = max(q, kv)
        return Heads(heads.dim, score, kv, width, width, score, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> SQAProject:
        return SQAProject(after, site, self.bias, self.counts(before)[0])

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return grouped_cost(after, site, self.bias, self.counts(before)[0])


def _fits(count: int, most: int) -> list[int]:
    """The numbers of heads that divide this one, or are multiples of it."""
    return [each for each in range(1, most + 1) if not max(each, count) % min(each, count)]


class SQAProject(GQAProject):
    def __init__(self, heads: Heads, site: Site, bias: Biases, queries: int) -> None:
        super().__init__(heads._replace(q=queries), site, bias)
        self.times = heads.q // queries

    def queries(self, flow: Flow) -> Tensor:
        return super().queries(flow).repeat(1, self.times, 1, 1)
