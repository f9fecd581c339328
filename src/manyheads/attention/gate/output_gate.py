"""A gate on every channel of every head's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class OutputGate(Part):
    """o ← a(x W_g) ∘ o before the output projection, W_g `[D, H·v]`, o all heads' outputs `[B, T, H·v]`.

    Options: activation a: `sigmoid`, or `silu` (swish), which layers with a state in place of keys have behind the norm
    of their heads.

    Sparse query attention and multi-head low-rank attention are reported with and without it.

    Options: activation, `silu` in place of σ as in layers with a scan.

    Source: Qiu et al. 2025, arXiv 2505.06708 (the elementwise form); with those two, arXiv 2603.02188 and the code of
    arXiv 2510.01817.
    """

    name: ClassVar[str] = "output_gate"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2505.06708"
    examples: ClassVar = ({}, {"activation": "silu"})

    activation: Literal["sigmoid", "silu"] = "sigmoid"

    def build(self, before: Heads, after: Heads, site: Site) -> ElementwiseGate:
        return ElementwiseGate(before, self.activation)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        weights = before.dim * before.out * before.out_width
        return Cost(weights, token_flops=2 * weights)


class ElementwiseGate(Gate):
    def __init__(self, heads: Heads, activation: str) -> None:
        super().__init__()
        self.heads, self.activation = heads.out, {"sigmoid": torch.sigmoid, "silu": F.silu}[activation]
        self.g_proj = nn.Linear(heads.dim, heads.out * heads.out_width, bias=False)

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        return o * self.activation(self.g_proj(flow.x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
