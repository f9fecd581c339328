"""Phi-3: queries, keys and values of one matrix, a share of the channels that turn; all layers may slide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig

from manyheads.convert.adopt.mistral import Mistral


@dataclass(frozen=True)
class Phi3(Mistral):
    """Fused, and without biases."""

    fused: ClassVar[str | None] = "qkv_proj"

    def bias(self, config: PreTrainedConfig) -> str:
        return "none"


PHI3 = Phi3(("phi3",), partial=True)
