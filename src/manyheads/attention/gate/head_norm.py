"""RMS normalisation of each head's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.depth import differential_lambda
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class HeadNorm(Part):
    """o_h ← c · g ∘ o_h / rms(o_h) over the channels of a head; the gain g is shared by the heads.

    Options: eps. scale: the constant c, `one`, or `differential`: 1 - λ_init of the layer, which keeps the gradients of
    differential attention at the size of plain attention's. offset: see `differential_lambda`. gain: without it g = 1,
    as in RetNet.

    Source: Ye et al. 2024, arXiv 2410.05258.
    """

    name: ClassVar[str] = "head_norm"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2410.05258"
    examples: ClassVar = ({}, {"scale": "differential"}, {"gain": False})

    eps: float = 1e-5
    scale: Literal["one", "differential"] = "one"
    offset: int = 0
    gain: bool = True

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"head sizes"})

    def build(self, before: Heads, after: Heads, site: Site) -> HeadNormGate:
        scale = 1.0 if self.scale == "one" else 1 - differential_lambda(site.layer, self.offset)
        return HeadNormGate(before.out_width if self.gain else None, self.eps, scale)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(before.out_width if self.gain else 0)


class HeadNormGate(Gate):
    def __init__(self, width: int | None, eps: float, scale: float) -> None:
        super().__init__()
        self.eps, self.scale = eps, scale
        self.gain = None if width is None else nn.Parameter(torch.ones(width))

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(o.dtype, torch.float32)
        normed = F.rms_norm(o.to(wide), o.shape[-1:], eps=self.eps)
        normed = normed if self.gain is None else normed * self.gain
        return (normed * self.scale).to(o.dtype)
