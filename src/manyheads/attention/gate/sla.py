"""Softmax linear attention, its read gate: the heads compete, by a softmax over heads, for being heard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyheads.attention.head_softmax import HeadSoftmax
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Gate, Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class SLA(Part):
    """o_h ← c · g_h · o_h, g = softmax over the heads of x W_r + b_r, W_r `[D, H]`; all zero at the start.

    Linear attention has lost the competition between tokens that a softmax makes; this is one between heads. It acts
    behind the norm of each head, which would cancel it (`head_norm` behind it is refused), and before an output gate.
    Softmax heads are weighed by it as well. What heads write is weighed by `sla_write`.

    Options: scale c: `heads`, c = H, where equal shares are the layer without it; `one`, the softmax as it is.

    Choices the source leaves open: the place behind the norm, c, and zero weights at the start. Not sparse-linear
    attention (arXiv 2509.24006), which has the same three letters.

    Source: Softmax Linear Attention 2026, arXiv 2602.01744.
    """

    name: ClassVar[str] = "sla"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2602.01744"
    slot: ClassVar[str | None] = "sla"
    examples: ClassVar = ({}, {"scale": "one"})

    scale: Literal["heads", "one"] = "heads"

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"head sizes"})

    @property
    def hint(self) -> dict[str, str]:
        return {"head sizes": "head_norm before sla"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if heads.out < 2:
            raise OptionError("sla: one head has none to compete with; at least 2")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> SLAGate:
        return SLAGate(before, self.scale)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        weights = before.dim * before.out
        return Cost(weights + before.out, token_flops=2 * weights)


class SLAGate(Gate):
    def __init__(self, heads: Heads, scale: str) -> None:
        super().__init__()
        self.shares = HeadSoftmax(heads.dim, heads.out, heads.out if scale == "heads" else 1)

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(o.dtype, torch.float32)
        return (o.to(wide) * self.shares(flow.x)).to(o.dtype)
