"""Differential attention: a noise map subtracted from signal maps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.depth import differential_lambda
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Differential(Part):
    """o_j = softmax(q¹_j k¹ᵀ s) V - λ softmax(q²_m k²ᵀ s) V, `ratio` signal heads for each noise head, m = j // ratio.

    Query heads come in groups of [ratio signal heads, one noise head]; even key heads serve signal, odd ones noise;
    V_p = [v_2p ; v_2p+1] is twice as wide. H = H₁ + H₂ query heads give H₁ outputs of width 2d. Both maps are fused
    attention problems and each noise map is computed once. λ = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + λ_init, one for the
    layer, the vectors from N(0, 0.1) in float32, λ_init = 0.8 - 0.6 exp(-0.3 layer).

    Options: ratio (1 is the original differential attention). offset: see `differential_lambda`. Key heads need not
    divide query heads: half of them must divide the noise heads (the authors' large model has 40 and 16, ratio 4).
    The paper says group norm and the code has a per-head RMS norm behind it: that is the part `head_norm`, and `gda` is
    the preset of both.

    Source: Ye et al. 2024, arXiv 2410.05258; grouped: Grouped Differential Attention 2025, arXiv 2510.06949.
    """

    name: ClassVar[str] = "differential"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2510.06949"
    slot: ClassVar[str | None] = "maps"
    examples: ClassVar = ({}, {"ratio": 3})

    ratio: int = 1
    offset: int = 0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"head keys", "one map", "alike heads"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"softmax", "one map"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.ratio < 1:
            raise OptionError(f"differential: ratio={self.ratio} signal heads for a noise head; at least 1")
        if not _splits(self.ratio, heads.q, heads.kv):
            ratios = [each for each in range(1, heads.q) if _splits(each, heads.q, heads.kv)]
            keys = [each for each in range(2, heads.q + 1) if _splits(self.ratio, heads.q, each)]
            fits = [f"ratio may be {ratios}"] * bool(ratios) + [f"key heads {keys}"] * bool(keys)
            raise OptionError(
                f"differential(ratio={self.ratio}): {heads.q} query and {heads.kv} key heads do not split; query heads "
                f"must be a multiple of {self.ratio + 1}, key heads even, and half of them must divide the noise heads"
                + (f": {' or '.join(fits)}" if fits else "")
            )
        noise = heads.q // (self.ratio + 1)
        return heads._replace(out=noise * self.ratio, out_width=2 * heads.v_width, grouped=False)

    def build(self, before: Heads, after: Heads, site: Site) -> DifferentialAttend:
        return DifferentialAttend(self, before, site.layer)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(4 * before.qk_width, pair_flops=2 * before.q * before.v_width)


def _splits(ratio: int, q: int, kv: int) -> bool:
    """Whether query heads fall into groups of `ratio` and one, and key heads into pairs that divide the groups."""
    return q % (ratio + 1) == kv % 2 == 0 < kv and q // (ratio + 1) % (kv // 2) == 0


class DifferentialAttend(Piece):
    joins_by_lse = False

    def __init__(self, options: Differential, heads: Heads, layer: int) -> None:
        super().__init__()
        self.ratio = options.ratio
        self.start = differential_lambda(layer, options.offset)
        self.vectors = nn.Parameter(0.1 * torch.randn(4, heads.qk_width, dtype=torch.float32))

    def subtracted(self) -> Tensor:
        """λ, a scalar."""
        q1, k1, q2, k2 = self.vectors.float()
        return (q1 @ k1).exp() - (q2 @ k2).exp() + self.start

    def split(self, call: Call, flow: Flow) -> list[Call]:
        q = call.q.unflatten(1, (-1, self.ratio + 1))
        signal = replace(call, q=q[:, :, : self.ratio].flatten(1, 2), k=call.k[:, 0::2], beside=2)
        return [signal, replace(call, q=q[:, :, self.ratio], k=call.k[:, 1::2], beside=2)]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        signal, noise = outs
        weight = self.subtracted().to(signal.o.dtype)
        return Out(signal.o - weight * noise.o.repeat_interleave(self.ratio, 1))
