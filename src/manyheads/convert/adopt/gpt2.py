"""GPT-2: one transposed matrix for queries, keys and values, positions that come with the embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import Family, make
from manyheads.core.part import Part


@dataclass(frozen=True)
class GPT2(Family):
    """Its attention module drops outputs itself; scores may be scaled by the layer's number."""

    fused: ClassVar[str | None] = "c_attn"
    transposed: ClassVar[bool] = True
    embeds_positions: ClassVar[bool] = True

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return "it has cross-attention (add_cross_attention)" if config.add_cross_attention else None

    def kv_heads(self, config: PreTrainedConfig) -> int:
        return self.heads(config)

    def bias(self, config: PreTrainedConfig) -> str:
        return "qkvo"

    def scale(self, config: PreTrainedConfig, layer: int) -> float:
        scale = (config.hidden_size // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
        return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale

    def position(self, config: PreTrainedConfig, layer: int) -> Part:
        return make("rope", pairing="none")

    def dropouts(self, config: PreTrainedConfig) -> tuple[float, float]:
        return config.attn_pdrop, config.resid_pdrop

    def names(self) -> dict[str, str]:
        return {f"project.o_proj.{kind}": f"c_proj.{kind}" for kind in ("weight", "bias")}


GPT2_LM = GPT2(("gpt2",), "transformer.h.{}.attn", after_attention="transformer.h.{}.ln_2")
