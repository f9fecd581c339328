"""ViT, and image encoders with its attention module."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import Encoder


@dataclass(frozen=True)
class ViT(Encoder):
    """Biases on q, k and v are an option, the output has one always."""

    def bias(self, config: PreTrainedConfig) -> str:
        return "qkvo" if config.qkv_bias else "o"


VIT = ViT(("vit", "deit", "vit_msn"), "layers.{}.attention")
