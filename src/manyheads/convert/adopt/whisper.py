"""Whisper: an encoder's self-attention, a decoder's, and the decoder's attention to what the encoder made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import Encoder, make
from manyheads.core.part import Part, Site


@dataclass(frozen=True)
class Whisper(Encoder):
    """One of the three; keys have no bias. The decoder's masks are causal, and its positions in its embeddings too."""

    side: Literal["encoder", "decoder"] = "encoder"
    cross: bool = False

    def layers(self, config: PreTrainedConfig) -> int:
        return getattr(config, f"{self.side}_layers")

    def heads(self, config: PreTrainedConfig) -> int:
        return getattr(config, f"{self.side}_attention_heads")

    def site(self, config: PreTrainedConfig, layer: int) -> Site:
        count = self.layers(config)
        if self.cross:
            return Site(count + layer, count, causal=False, cross=True, context_dim=config.d_model)
        return Site(layer, count, causal=self.side == "decoder")

    def bias(self, config: PreTrainedConfig) -> str:
        return "qvo"

    def position(self, config: PreTrainedConfig, layer: int) -> Part | None:
        return make("rope", pairing="none") if self.site(config, layer).causal else None

    def dropouts(self, config: PreTrainedConfig) -> tuple[float, float]:
        return config.attention_dropout, 0.0

    def names(self) -> dict[str, str]:
        return {f"project.o_proj.{kind}": f"out_proj.{kind}" for kind in ("weight", "bias")}


WHISPER = (
    Whisper(("whisper",), "encoder.layers.{}.self_attn"),
    Whisper(("whisper",), "decoder.layers.{}.self_attn", side="decoder"),
    Whisper(("whisper",), "decoder.layers.{}.encoder_attn", side="decoder", cross=True),
)
