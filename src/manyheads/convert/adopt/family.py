"""What the library needs to know of a model family to take over its attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from manyheads.core.part import Part, Site
from manyheads.core.registry import find
from manyheads.core.spec import Spec


class AdoptError(ValueError):
    """A model that cannot be taken over, and why. Raised before any weight moves."""


def make(name: str, **options: Any) -> Part:
    """A part by name."""
    return find(name)(**options)


QK_NORMS = {"transforms.0.q_gain": "q_norm.weight", "transforms.0.k_gain": "k_norm.weight"}
"""Where a family keeps the gains of qk-norm, by our names."""


@dataclass(frozen=True)
class Family:
    """An adapter: which model types it serves, where attention sits, how a layer's spec reads, how weights are named.

    Subclass it for a family that differs from Llama; see the other files of this folder. partial: whether its code
    reads `partial_rotary_factor` (Llama's rotates every channel whatever the config says). fused: the one linear map
    that makes queries, keys and values, in this order. transposed: its linear maps are `[in, out]`. norms_output: what
    attention returns is normed before it is added to the stream; `after_attention` is then that norm. embeds_positions:
    positions are added to its embeddings. keeps_class: the model is no `ManyheadsForCausalLM` once it is adopted, but
    what it was; `path` then counts from the base model.
    """

    model_types: tuple[str, ...]
    path: str = "model.layers.{}.self_attn"
    partial: bool = False
    after_attention: str = "model.layers.{}.post_attention_layernorm"  # what reads the stream after attention
    fused: ClassVar[str | None] = None
    transposed: ClassVar[bool] = False
    norms_output: ClassVar[bool] = False
    embeds_positions: ClassVar[bool] = False
    keeps_class: ClassVar[bool] = False

    def refusal(self, config: PreTrainedConfig) -> str | None:
        """Why this model cannot be adopted, or None."""
        return None

    def layers(self, config: PreTrainedConfig) -> int:
        return config.num_hidden_layers

    def heads(self, config: PreTrainedConfig) -> int:
        return config.num_attention_heads

    def kv_heads(self, config: PreTrainedConfig) -> int:
        return config.num_key_value_heads

    def site(self, config: PreTrainedConfig, layer: int) -> Site:
        return Site(layer, self.layers(config))

    def bias(self, config: PreTrainedConfig) -> str:
        """Which projections have a bias: none, qkv, qkvo, o or qvo."""
        return "qkvo" if getattr(config, "attention_bias", False) else "none"

    def scale(self, config: PreTrainedConfig, layer: int) -> float | None:
        """What multiplies the scores, where it is not the head width^-1/2."""
        return None

    def extra(self, config: PreTrainedConfig, layer: int) -> tuple[Part, ...]:
        """Parts besides the projection and RoPE."""
        return ()

    def position(self, config: PreTrainedConfig, layer: int) -> Part | None:
        """The part by which positions enter (None: by none, in a layer that has none unless asked)."""
        return rope_of(config, layer, self.partial)

    def dropouts(self, config: PreTrainedConfig) -> tuple[float, float]:
        """Probabilities of dropping attention weights, and outputs where the attention module itself does it."""
        return getattr(config, "attention_dropout", 0.0), 0.0

    def names(self) -> dict[str, str]:
        """The family's tensor names in an attention module, by ours."""
        return {}

    def spec(self, config: PreTrainedConfig, layer: int) -> Spec:
        heads = self.heads(config)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads, scale = self.kv_heads(config), self.scale(config, layer)
        project = make(
            "gqa",
            kv_heads=None if kv_heads == heads else kv_heads,
            head_dim=None if width == config.hidden_size / heads else width,
            bias=self.bias(config),
            scale=None if scale == width**-0.5 else scale,
        )
        position = self.position(config, layer)
        return Spec((project, *self.extra(config, layer), *([] if position is None else [position])))

    def weights(self, config: PreTrainedConfig, attention: nn.Module, parent: nn.Module) -> dict[str, nn.Parameter]:
        """The module's tensors under our names; tensors stay the same objects, what is fused is cut.

        parent: the module that holds the attention module.
        """
        ours = {theirs: own for own, theirs in self.names().items()}
        found: dict[str, nn.Parameter] = {}
        for name, tensor in attention.named_parameters():
            module, _, kind = name.rpartition(".")
            if self.transposed and tensor.ndim == 2:
                tensor = nn.Parameter(tensor.detach().T.contiguous(), tensor.requires_grad)
            if self.fused is not None and module == self.fused:
                found |= {f"project.{each}_proj.{kind}": rows for each, rows in self._cut(config, tensor).items()}
            else:
                found[ours.get(name, f"project.{name}")] = tensor
        return found

    def _cut(self, config: PreTrainedConfig, fused: nn.Parameter) -> dict[str, nn.Parameter]:
        """The rows of queries, keys and values, which stay in the memory that they are in."""
        q, kv = self.heads(config), self.kv_heads(config)
        width = len(fused) // (q + 2 * kv)
        if width * (q + 2 * kv) != len(fused):
            raise AdoptError(f"{self.fused} has {len(fused)} rows, which are not {q} + 2 x {kv} heads")
        rows = fused.detach().split([q * width, kv * width, kv * width])
        return {name: nn.Parameter(part, fused.requires_grad) for name, part in zip("qkv", rows, strict=True)}

    def settle(self, parent: nn.Module) -> None:
        """What else changes around an attention module that is ours now."""

    def tensors(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `weights`: tensors of our attention as the family keeps them."""
        names, found = self.names(), {}
        fused: dict[str, list[Tensor]] = {}
        for name, tensor in ours.items():
            module, _, kind = name.rpartition(".")
            if self.fused is not None and module in ("project.q_proj", "project.k_proj", "project.v_proj"):
                fused.setdefault(f"{self.fused}.{kind}", []).append(tensor)
            else:
                found[names.get(name, name.removeprefix("project."))] = tensor
        found |= {name: torch.cat(rows) for name, rows in fused.items()}
        return {name: t.T if self.transposed and t.ndim == 2 else t for name, t in found.items()}


@dataclass(frozen=True)
class Encoder(Family):
    """Layers that look both ways, in a model that keeps its class; positions are added to the embeddings."""

    embeds_positions: ClassVar[bool] = True
    keeps_class: ClassVar[bool] = True

    def kv_heads(self, config: PreTrainedConfig) -> int:
        return self.heads(config)

    def site(self, config: PreTrainedConfig, layer: int) -> Site:
        return Site(layer, self.layers(config), causal=False)

    def position(self, config: PreTrainedConfig, layer: int) -> Part | None:
        return None

    def dropouts(self, config: PreTrainedConfig) -> tuple[float, float]:
        return config.attention_probs_dropout_prob, 0.0


def rope_of(config: PreTrainedConfig, layer: int = 0, partial: bool = False) -> Part:
    """The RoPE part of a layer, from the config; scalings that change with the length of the input are refused."""
    options: dict[str, Any] = dict(config.rope_parameters)
    kinds: dict[str, Any] = {}
    if "rope_theta" not in options:  # a table for each kind of layer
        kinds["layer_type"] = config.layer_types[layer]
        options = dict(options[config.layer_types[layer]])
    kind = options.get("rope_type", "default")
    given: dict[str, Any] = {"base": float(options["rope_theta"])}
    if kind not in ("default", "linear", "llama3", "yarn"):
        why = ": its frequencies change with the length of the input" if kind in ("dynamic", "longrope") else ""
        raise AdoptError(f"rope type {kind!r} is not adopted{why} (default, linear, llama3 and yarn are)")
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
            "magnitude": float(ROPE_INIT_FUNCTIONS["yarn"](config, None, **kinds)[1]),
        }
    return make("rope", **given)
