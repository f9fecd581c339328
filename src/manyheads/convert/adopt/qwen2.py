"""Qwen2: biases on q, k and v; some layers may slide."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from manyheads.convert.adopt.mistral import Mistral


@dataclass(frozen=True)
class Qwen2(Mistral):
    """Biases on q, k and v, always."""

    def bias(self, config: PreTrainedConfig) -> str:
        return "qkv"


QWEN2 = Qwen2(("qwen2",))
