"""Adopt a pretrained model: its attention becomes ours with the spec it already has, and nothing else changes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from manyheads.convert.adopt.family import AdoptError, Family
from manyheads.convert.adopt.llama import LLAMA
from manyheads.convert.adopt.mistral import MISTRAL
from manyheads.convert.adopt.qwen2 import QWEN2
from manyheads.convert.adopt.qwen3 import QWEN3
from manyheads.core.part import Site
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention, attention_layers, put_attention

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3)


def family_of(config: PreTrainedConfig) -> Family:
    """The adapter of a config; raises `AdoptError` with what is known."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            why = family.refusal(config)
            if why is not None:
                raise AdoptError(f"this {config.model_type} model cannot be adopted: {why}")
            return family
    known = ", ".join(sorted(kind for family in FAMILIES for kind in family.model_types))
    raise AdoptError(f"models of type {config.model_type!r} are not adopted (families known: {known})")


def adopted_config(config: PreTrainedConfig) -> ManyheadsConfig:
    """The wrapper config of a family's config: the specs that its layers already have."""
    family = family_of(config)
    specs = [str(family.spec(config, layer).resolve(Site())) for layer in range(config.num_hidden_layers)]
    return ManyheadsConfig(base=config, specs=specs, attention_path=family.path)


def adopt(model: PreTrainedModel) -> ManyheadsForCausalLM:
    """Take over a model's attention, in place: its weights move (no copy), its logits stay (fp32 within 1e-5).

    Everything that is not attention stays the model's own. A family, or a feature of one, that cannot be adopted
    raises `AdoptError` before anything is touched; a model that is adopted already comes back as it is.
    """
    if isinstance(model, ManyheadsForCausalLM):
        return model
    if not isinstance(model, PreTrainedModel):
        raise AdoptError(
            f"a {type(model).__name__} is not a transformers model; such as AutoModelForCausalLM.from_pretrained(…) is"
        )
    config = adopted_config(model.config)
    olds = [old for _, _, old in attention_layers(model, config.attention_path)]
    put_attention(model, config.attention_path, [adopt_attention(old, config, i) for i, old in enumerate(olds)])
    model.set_attn_implementation("sdpa")
    return ManyheadsForCausalLM.around(model, config)


def adopt_attention(old: nn.Module, config: ManyheadsConfig, index: int) -> SeamAttention:
    """Our attention with the very parameters of a family's attention module, which stays as it is."""
    base, site = config.get_text_config(), Site(index, len(config.specs))
    dropout = getattr(base, "attention_dropout", 0.0)
    with torch.device("meta"):
        new = SeamAttention(config.specs[index], base.hidden_size, config.heads[index], site=site, dropout=dropout)
    _place(new, family_of(base).weights(old))
    return new.train(old.training)


def _place(attention: SeamAttention, tensors: dict[str, nn.Parameter]) -> None:
    """Put the very parameters in place; a weight of another name or shape (an unknown variant) is refused."""
    wanted = {name: parameter.shape for name, parameter in attention.named_parameters()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if wanted != given:
        wrong = sorted(set(wanted.items()) ^ set(given.items()))
        raise AdoptError(f"attention weights do not fit the spec {attention.spec}: {wrong}")
    for name, tensor in tensors.items():
        *parents, last = name.split(".")
        setattr(attention.get_submodule(".".join(parents)), last, tensor)


__all__ = ["FAMILIES", "AdoptError", "Family", "adopt", "adopt_attention", "adopted_config", "family_of"]
