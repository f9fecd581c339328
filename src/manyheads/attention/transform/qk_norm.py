"""RMS normalisation of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Part, Site, Transform
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class QKNorm(Part):
    """q_h ← g_q ∘ q_h / rms(q_h), k_g ← g_k ∘ k_g / rms(k_g) over a head's channels, before rotation.

    Gains are shared by the heads and start at one. Computed in float32 and returned in the input's dtype, so that q, k
    and v agree under autocast. It is not linear: a latent projection serves it in the expanded view only.

    Options: eps, added to the mean square. centred: what is learned is g - 1, which starts at zero (weight decay then
    draws gains to one, and half precision resolves them finer).

    Source: Henry et al. 2020, arXiv 2010.04245, in the RMS form of Qwen3; centred as in Gemma 3, arXiv 2503.19786.
    """

    name: ClassVar[str] = "qk-norm"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2010.04245"
    slot: ClassVar[str | None] = "qk-norm"
    at: ClassVar = "either"
    examples: ClassVar = ({}, {"centred": True})
    scores_only: ClassVar[bool] = True

    eps: float = 1e-6
    centred: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"key lengths"})

    def build(self, before: Heads, after: Heads, site: Site) -> QKNormTransform:
        return QKNormTransform(before.content_width, self.eps, before.read or site.kv_source is None, self.centred)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(before.content_width * (2 if before.read or site.kv_source is None else 1))


class QKNormTransform(Transform):
    def __init__(self, width: int, eps: float, own: bool, centred: bool = False) -> None:
        super().__init__()
        self.eps, self.centre = eps, float(centred)
        start = torch.full((width,), 1.0 - self.centre)
        self.q_gain = nn.Parameter(start)
        self.k_gain = nn.Parameter(start.clone()) if own else None

    def on_q(self, q: Tensor, flow: Flow) -> Tensor:
        return self._norm(q, self.q_gain)

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return k if self.k_gain is None else self._norm(k, self.k_gain)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gain = gain.to(wide) + self.centre if self.centre else gain
        return (F.rms_norm(x.to(wide), x.shape[-1:], eps=self.eps) * gain).to(x.dtype)
