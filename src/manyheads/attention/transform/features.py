"""Feature maps: queries and keys through a function of each channel, as kernels of linear attention are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from manyheads.core.flow import Flow
from manyheads.core.part import NONE, Heads, Part, Site, Transform
from manyheads.core.registry import register

MAPS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": F.relu,
    "softmax": lambda x: x.softmax(-1),
    "silu": F.silu,
}


@register
@dataclass(frozen=True)
class Features(Part):
    """q_h ← φ(q_h), k_g ← φ(k_g) on the content channels of a head, before rotation; the kernel is φ(q)·φ(k).

    Options: map, the φ: `elu` (elu(x) + 1), `relu`, `softmax` over the channels of a head, and `silu`, which alone of
    them can be negative: it is what DeltaNet has in front of its norm. It is not linear: a latent projection serves it
    in the expanded view only.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236.
    """

    name: ClassVar[str] = "features"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2006.16236"
    slot: ClassVar[str | None] = "features"
    at: ClassVar = "either"
    examples: ClassVar = ({}, {"map": "softmax"})

    map: Literal["elu", "relu", "softmax", "silu"] = "elu"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def gives(self) -> frozenset[str]:
        return NONE if self.map == "silu" else frozenset({"positive"})

    def build(self, before: Heads, after: Heads, site: Site) -> FeaturesTransform:
        return FeaturesTransform(self.map)


class FeaturesTransform(Transform):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.map = MAPS[name]

    def on_q(self, q: Tensor, flow: Flow) -> Tensor:
        return self.map(q)

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return self.map(k)
