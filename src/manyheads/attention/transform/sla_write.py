"""Softmax linear attention, its write gate: the heads compete for what a token leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyheads.attention.head_softmax import HeadSoftmax
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Site, Transform
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class SLAWrite(Part):
    """k_g ← G · κ_g · k_g, κ = softmax over the key heads of x W_w + b_w, W_w `[D, G]`; all zero at the start.

    In linear attention a state takes in G · κ_g · k_g v_gᵀ, and its normaliser G · κ_g · k_g: it stands behind
    `features`. It survives the norm of a head, since κ changes from token to token; scans and norms that take the
    length of a key out of it are refused behind it. In softmax attention it is a temperature of each key.

    Choices the source leaves open: whether there is a write gate at all, its form, and zero weights at the start.

    Source: Softmax Linear Attention 2026, arXiv 2602.01744.
    """

    name: ClassVar[str] = "sla_write"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2602.01744"
    slot: ClassVar[str | None] = "sla_write"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"cached heads", "own rows"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"several keys"})

    @property
    def spares(self) -> frozenset[str]:
        return frozenset({"positive"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"key lengths"})

    @property
    def hint(self) -> dict[str, str]:
        return {"cached heads": "gqa, whose keys are cached as they are", "key lengths": "qk-norm before sla_write"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if heads.kv < 2:
            raise OptionError("sla_write: one key head has none to compete with; kv_heads of at least 2")
        if heads.content_width < heads.qk_width:
            raise OptionError(
                f"sla_write: weighs whole keys, and {heads.qk_width - heads.content_width} of their {heads.qk_width} "
                "channels are not a transform's to touch; gqa leaves it all of them"
            )
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> SLAWriteTransform:
        return SLAWriteTransform(site.context_dim or before.dim, before.kv)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        weights = (site.context_dim or before.dim) * before.kv
        return Cost(weights + before.kv, token_flops=2 * weights)


class SLAWriteTransform(Transform):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.shares = HeadSoftmax(dim, heads, heads)

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        wide = torch.promote_types(k.dtype, torch.float32)
        return (k.to(wide) * self.shares(flow.source)).to(k.dtype)
