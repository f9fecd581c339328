"""BERT, and encoders with its layer (MiniLM and other sentence encoders among them)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import Encoder

OUTPUT = "output.dense"
"""The output projection, which sits beside the self-attention, in front of a norm that stays the model's own."""


@dataclass(frozen=True)
class Bert(Encoder):
    """Our attention takes the output projection with it; an identity is left in its place."""

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return "as a decoder it is not known" if config.is_decoder or config.add_cross_attention else None

    def bias(self, config: PreTrainedConfig) -> str:
        return "qkvo"

    def names(self) -> dict[str, str]:
        theirs = {"q": "query", "k": "key", "v": "value"}
        return {f"project.{n}_proj.{kind}": f"{theirs[n]}.{kind}" for n in theirs for kind in ("weight", "bias")}

    def weights(self, config: PreTrainedConfig, attention: nn.Module, parent: nn.Module) -> dict[str, nn.Parameter]:
        output = parent.get_submodule(OUTPUT).named_parameters()
        found = super().weights(config, attention, parent)
        return found | {f"project.o_proj.{name}": tensor for name, tensor in output}

    def settle(self, parent: nn.Module) -> None:
        *before, last = OUTPUT.split(".")
        setattr(parent.get_submodule(".".join(before)), last, nn.Identity())


BERT = Bert(("bert", "electra", "roberta", "xlm-roberta", "camembert"), "encoder.layer.{}.attention.self")
