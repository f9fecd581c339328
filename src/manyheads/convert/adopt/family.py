"""What the library needs to know of a model family to take over its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manyheads.core.part import Part
from manyheads.core.registry import find
from manyheads.core.spec import Spec


class AdoptError(ValueError):
    """A model that cannot be taken over, and why. Raised before any weight moves."""


def make(name: str, **options: Any) -> Part:
    """A part by name."""
    return find(name)(**options)


@dataclass(frozen=True)
class Family:
    """An adapter: which model types it serves, where attention sits, how a layer's spec reads, how weights are named.

    Subclass it for a family that differs from Llama; see the other files of this folder. partial: whether its code
    reads `partial_rotary_factor` (Llama's rotates every channel whatever the config says).
    """

    model_types: tuple[str, ...]
    path: str = "model.layers.{}.self_attn"
    partial: bool = False
    after_attention: str = "model.layers.{}.post_attention_layernorm"  # what reads the stream after attention

    def refusal(self, config: PreTrainedConfig) -> str | None:
        """Why this model cannot be adopted, or None."""
        return None

    def bias(self, config: PreTrainedConfig) -> str:
        """Which projections have a bias: none, qkv, qkvo or o."""
        return "qkvo" if getattr(config, "attention_bias", False) else "none"

    def extra(self, config: PreTrainedConfig, layer: int) -> tuple[Part, ...]:
        """Parts besides the projection and RoPE."""
        return ()

    def names(self) -> dict[str, str]:
        """The family's tensor names in an attention module, by ours."""
        return {}

    def spec(self, config: PreTrainedConfig, layer: int) -> Spec:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        derived = config.hidden_size / config.num_attention_heads
        kv_heads = config.num_key_value_heads
        project = make(
            "gqa",
            kv_heads=None if kv_heads == config.num_attention_heads else kv_heads,
            head_dim=None if width == derived else width,
            bias=self.bias(config),
        )
        return Spec((project, *self.extra(config, layer), rope_of(config, self.partial)))

    def weights(self, attention: nn.Module) -> dict[str, nn.Parameter]:
        """The module's tensors under our names; tensors stay the same objects."""
        ours = {theirs: own for own, theirs in self.names().items()}
        return {ours.get(name, f"project.{name}"): tensor for name, tensor in attention.named_parameters()}


def rope_of(config: PreTrainedConfig, partial: bool = False) -> Part:
    """The RoPE part of a config; scalings that change with the length of the input are refused."""
    options: dict[str, Any] = dict(config.rope_parameters)
    kind = options.get("rope_type", "default")
    given: dict[str, Any] = {"base": float(options["rope_theta"])}
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise AdoptError(f"rope type {kind!r} is not adopted (default, linear, llama3 and yarn are)")
    fraction = float(options.get("partial_rotary_factor") or 1.0)
    if partial:
        given["fraction"] = fraction
    elif fraction != 1.0 and kind != "default":
        raise AdoptError(f"partial_rotary_factor={fraction} with rope type {kind!r}: {config.model_type} cannot run it")
    if kind != "default":
        given |= {"scaling": kind, "factor": float(options["factor"])}
    if kind in ("llama3", "yarn"):
        original = options.get("original_max_position_embeddings") or config.max_position_embeddings
        given["original"] = int(original)
    if kind == "llama3":
        given |= {"low": float(options["low_freq_factor"]), "high": float(options["high_freq_factor"])}
    if kind == "yarn":
        given |= {
            "fast": float(options.get("beta_fast") or 32),
            "slow": float(options.get("beta_slow") or 1),
            "truncate": bool(options.get("truncate", True)),
            "magnitude": float(ROPE_INIT_FUNCTIONS["yarn"](config, None)[1]),
        }
    return make("rope", **given)
