"""A model as a stock checkpoint of the family that it came from: a merge of key heads changes one number of it.

Weights that layers share (`directshare`, `masa`) are written out in full. What the family's own config says of a layer
is compared with the layer's spec, so that anything else in it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from manyheads.convert import masa
from manyheads.convert.adopt import AdoptError, adopted_config, family_of
from manyheads.convert.directshare import as_gqa
from manyheads.convert.export.atomic import new_folder
from manyheads.convert.export.reload import compare_reloaded
from manyheads.convert.export.report import ExportError, ExportReport
from manyheads.convert.export.shards import write_shards
from manyheads.core.part import Site
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention


@torch.no_grad()
def to_family(
    model: ManyheadsForCausalLM, folder: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> ExportReport:
    """Write a model as the stock class it was adopted from, such as `LlamaForCausalLM`, reload it and compare.

    Args:
        model: is left as it is. All its layers have one number of key heads, and nothing that its family has not.
        folder: must not exist.

    Raises:
        ExportError: the family's class cannot hold the model (said before anything is written), or the file reads back
            as another model.
        FileExistsError: `folder` exists.
        OSError: the disk is full.
    """
    layers = [masa.as_gqa(as_gqa(layer)) for layer in model.attentions]  # type: ignore[arg-type]
    config = _config(model, layers)
    tensors = dict(_tensors(model, layers, config))
    with new_folder(folder, needed=sum(t.nbytes for t in tensors.values())) as work:
        config.save_pretrained(work)
        size = write_shards(tensors.items(), work)
        model.generation_config.save_pretrained(work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        found = compare_reloaded(model, work, model.dtype)
    layout, whole = layers[0].layout, layers == model.attentions
    return ExportReport(
        folder=Path(folder), format="family", loads_as=type(model.model).__name__,
        dtype=str(model.dtype).removeprefix("torch."), bytes=size,
        cache_floats=layout.kv * (layout.qk_width + layout.v_width), difference=found.difference, kl=found.kl,
        lossless=("every tensor, as it is in the model",),
        notes=() if whole else ("shared weights are written out wherever they are used",),
    )  # fmt: skip


def _config(model: ManyheadsForCausalLM, layers: list[SeamAttention]) -> PreTrainedConfig:
    """The family's config with the model's numbers of heads; refuses what it does not describe."""
    base = model.config.base
    if base is None:
        raise ExportError("this is our own decoder and of no family; use the format 'manyheads'")
    config: Any = copy.deepcopy(base)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = layers[0].layout.kv
    if layers[0].heads != config.num_attention_heads:  # heads keep their width when there are fewer or more
        config.num_attention_heads, config.head_dim = layers[0].heads, layers[0].layout.qk_width
        try:
            getattr(config, "validate_architecture", bool)()
        except ValueError as error:
            raise ExportError(f"no {config.model_type} model has such heads: {error}") from None
    config.architectures = [type(model.model).__name__]
    config.dtype = model.dtype
    try:
        expected = adopted_config(config).specs
    except AdoptError as error:  # of a config that was changed since
        raise ExportError(str(error)) from None
    for index, (layer, line) in enumerate(zip(layers, expected, strict=True)):
        own = str(layer.spec.resolve(Site()))
        if own != str(Spec.parse(line).resolve(Site())):
            raise ExportError(
                f"layer {index} is {own}; a {config.model_type} model has {line} in each layer; use the format "
                "'manyheads', or 'deepseek' for latent layers"
            )
        if layer.site.kv_source is not None or layer.heads != config.num_attention_heads:
            raise ExportError(f"layer {index} shares rows, or has {layer.heads} heads; a {config.model_type} has not")
    return config


def _tensors(
    model: ManyheadsForCausalLM, layers: list[SeamAttention], config: PreTrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """The family's names; a tied head is left out."""
    family, path = family_of(config), model.config.attention_path
    tied = getattr(model.model, "_tied_weights_keys", None) or {} if config.tie_word_embeddings else {}
    places = tuple(path.format(index) + "." for index in range(len(layers)))
    for name, tensor in model.model.state_dict().items():
        if name not in tied and not name.startswith((*places, "bank.")):
            yield name, tensor.detach().contiguous()
    for place, layer in zip(places, layers, strict=True):
        for name, tensor in family.tensors(layer.state_dict()).items():
            yield place + name, tensor.detach().contiguous()
