"""RMS normalisation of all heads' outputs together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class OutputNorm(Part):
    """o ← g ∘ o / rms(o) over the channels of all heads side by side `[B, T, H·v]`, with a gain for each channel.

    Behind `output_gate(activation=silu)` it is the gated norm of Mamba-2.

    Options: groups: equal shares of the heads, each normalised by itself. eps.

    Source: Dao and Gu 2024, arXiv 2405.21060.
    """

    name: ClassVar[str] = "output_norm"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2405.21060"
    examples: ClassVar = ({}, {"groups": 2})

    groups: int = 1
    eps: float = 1e-5

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.groups < 1 or heads.out % self.groups:
            fits = [each for each in range(1, heads.out + 1) if heads.out % each == 0]
            raise OptionError(f"output_norm: groups={self.groups} of {heads.out} heads; groups may be {fits}")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> OutputNormGate:
        return OutputNormGate(before, self.groups, self.eps)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(before.out * before.out_width)


class OutputNormGate(Gate):
    def __init__(self, heads: Heads, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.gain = nn.Parameter(torch.ones(heads.out, 1, heads.out_width))

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        wide = o.to(torch.promote_types(o.dtype, torch.float32)).unflatten(1, (self.groups, -1))
        rms = wide.square().mean((2, 4), keepdim=True).add(self.eps).rsqrt()
        return ((wide * rms).flatten(1, 2) * self.gain).to(o.dtype)
