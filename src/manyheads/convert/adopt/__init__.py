"""Adopt a pretrained model: its attention becomes ours with the spec it already has, and nothing else changes."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from manyheads.convert.adopt.bert import BERT
from manyheads.convert.adopt.family import AdoptError, Family
from manyheads.convert.adopt.gemma2 import GEMMA2
from manyheads.convert.adopt.gemma3 import GEMMA3
from manyheads.convert.adopt.gpt2 import GPT2_LM
from manyheads.convert.adopt.llama import LLAMA
from manyheads.convert.adopt.mistral import MISTRAL
from manyheads.convert.adopt.phi3 import PHI3
from manyheads.convert.adopt.qwen2 import QWEN2
from manyheads.convert.adopt.qwen3 import QWEN3
from manyheads.convert.adopt.vit import VIT
from manyheads.convert.adopt.whisper import WHISPER
from manyheads.core.part import Site
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention, ask_for_masks, attention_layers, put_attention, share_links

FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, GPT2_LM, BERT, VIT, *WHISPER,
)  # fmt: skip


def families_of(config: PreTrainedConfig) -> list[Family]:
    """The adapters of a config, one for each kind of attention layer; raises `AdoptError` with what is known."""
    found = [family for family in FAMILIES if config.model_type in family.model_types]
    if not found:
        known = ", ".join(sorted({kind for family in FAMILIES for kind in family.model_types}))
        raise AdoptError(f"models of type {config.model_type!r} are not adopted (families known: {known})")
    for family in found:
        why = family.refusal(config)
        if why is not None:
            raise AdoptError(f"this {config.model_type} model cannot be adopted: {why}")
    return found


def family_of(config: PreTrainedConfig) -> Family:
    """The adapter of a config whose model becomes a `ManyheadsForCausalLM`; raises `AdoptError` for others."""
    family = families_of(config)[0]
    if family.keeps_class:
        raise AdoptError(
            f"a {config.model_type} is no causal language model: `mh.adopt` takes over its attention inside its own "
            "class, and it is not converted, exported or saved"
        )
    return family


def adopted_config(config: PreTrainedConfig) -> ManyheadsConfig:
    """The wrapper config of a family's config: the specs that its layers already have."""
    family = family_of(config)
    specs = [str(family.spec(config, layer).resolve(Site())) for layer in range(config.num_hidden_layers)]
    weights, output = family.dropouts(config)
    same = weights == getattr(config, "attention_dropout", 0.0)
    return ManyheadsConfig(
        base=config, specs=specs, attention_path=family.path, weight_dropout=None if same else weights,
        output_dropout=output,
    )  # fmt: skip


def adopt(model: PreTrainedModel) -> Any:
    """Take over a model's attention, in place: its weights move, its outputs stay (fp32 within 1e-5).

    Everything that is not attention stays the model's own. A causal language model comes back as a
    `ManyheadsForCausalLM`; encoders and encoder-decoder models (BERT, ViT, Whisper) keep their class, and what comes
    back is the model itself, which then refuses `save_pretrained`. Weights are not copied, except where a family keeps
    them transposed (GPT-2). A family, or a feature of one, that cannot be adopted raises `AdoptError` before anything
    is touched; a model that is adopted already comes back as it is.
    """
    if isinstance(model, ManyheadsForCausalLM):
        return model
    if not isinstance(model, PreTrainedModel):
        raise AdoptError(
            f"a {type(model).__name__} is not a transformers model; such as AutoModelForCausalLM.from_pretrained(…) is"
        )
    families = families_of(model.config)
    if families[0].keeps_class:
        return _adopt_inside(model, families)
    config = adopted_config(model.config)
    if not _has(model, families[0]):
        raise AdoptError(f"a {type(model).__name__} is no causal language model; AutoModelForCausalLM loads one")
    _take_over(model, model.config, *families)
    ask_for_masks(model)
    return ManyheadsForCausalLM.around(model, config)


def adopt_attention(old: nn.Module, config: ManyheadsConfig, index: int) -> SeamAttention:
    """Our attention with the very parameters of a family's attention module, which stays as it is."""
    base = config.get_text_config()
    return _ours(family_of(base), base, index, old, old)


def _adopt_inside(model: PreTrainedModel, families: list[Family]) -> PreTrainedModel:
    """Every kind of attention layer that the model has becomes ours; the model stays of its class."""
    if any(isinstance(module, SeamAttention) for module in model.modules()):
        return model
    name = type(model).__name__
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise AdoptError(f"a {name} makes a decoder of a {model.config.model_type}, which is not adopted")
    base = model.base_model
    has = [family for family in families if _has(base, family)]
    if not has:
        raise AdoptError(f"a {name} has no attention at {families[0].path}")
    _take_over(base, model.config, *has)
    for family in has:
        share_links(base.get_submodule(family.path.split(".{}.")[0].rpartition(".")[0]))
    ask_for_masks(model)
    model.save_pretrained = partial(_no_saving, name)  # type: ignore[method-assign]
    return model


def _no_saving(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise AdoptError(
        f"a {name} whose attention is adopted has no config that says so, and would be read back with random weights; "
        "save it before `mh.adopt`, or save its state_dict()"
    )


def _has(model: nn.Module, family: Family) -> bool:
    """Whether a model keeps attention layers where a family does."""
    try:
        return bool(list(attention_layers(model, family.path)))
    except AttributeError:
        return False


def _take_over(model: nn.Module, config: PreTrainedConfig, *families: Family) -> None:
    """Make all of our modules, then put them in place."""
    made: list[tuple[Family, list[nn.Module], list[SeamAttention]]] = []
    for family in families:
        there = list(attention_layers(model, family.path))
        ours = [_ours(family, config, i, old, parent) for i, (parent, _, old) in enumerate(there)]
        made.append((family, [parent for parent, _, _ in there], ours))
    for family, parents, ours in made:
        put_attention(model, family.path, ours)
        for parent in parents:
            family.settle(parent)


def _ours(family: Family, config: PreTrainedConfig, index: int, old: nn.Module, parent: nn.Module) -> SeamAttention:
    site, (dropout, output) = family.site(config, index), family.dropouts(config)
    spec, heads = family.spec(config, index), family.heads(config)
    with torch.device("meta"):
        new = SeamAttention(spec, config.hidden_size, heads, site=site, dropout=dropout)
    new.output_dropout = output
    _place(new, family.weights(config, old, parent))
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


__all__ = [
    "FAMILIES", "AdoptError", "Family", "adopt", "adopt_attention", "adopted_config", "families_of", "family_of",
]  # fmt: skip
