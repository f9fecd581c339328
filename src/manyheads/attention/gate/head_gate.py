"""A gate on each head's output that the output itself opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class HeadGate(Part):
    """o_h ← o_h · σ(o_h · w + b): one number a head and token, w `[d]` and b shared by the heads.

    Multi-token attention has it behind `head_norm`. The source starts w from a truncated normal without its width: here
    0.02, cut at two of it; b starts at zero.

    Source: Golovneva et al. 2025, arXiv 2504.00927.
    """

    name: ClassVar[str] = "head_gate"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2504.00927"

    def build(self, before: Heads, after: Heads, site: Site) -> HeadGateGate:
        return HeadGateGate(before.out_width)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(before.out_width + 1, token_flops=4 * before.out * before.out_width)


class HeadGateGate(Gate):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.trunc_normal_(self.weight, std=0.02, a=-0.04, b=0.04)

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        return o * (o @ self.weight + self.bias).sigmoid()[..., None]
