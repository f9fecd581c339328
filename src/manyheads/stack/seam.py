"""Where our attention meets a transformers model: its calling convention, its masks, its caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.core.mask import Axis
from manyheads.core.prefix import PrefixCache
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank
from manyheads.stack.sources import sites


class SeamAttention(Attention):
    """An `Attention` that a layer of a transformers model can call in place of its own.

    Takes hidden states, a 4-D mask (bool, or added to the scores) or None, position ids and a cache; where it attends
    to a context, `key_value_states` are that. Returns `(y, None)`. `links` is shared by the layers of a pass (see
    `share_links`); without it each layer describes its tokens anew.

    output_dropout: probability of dropping a channel of y in training, where the block around it does not.
    """

    output_dropout = 0.0

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: transformers.Cache | None = None,
        position_ids: Tensor | None = None,
        links: Links | None = None,
        past_key_values: transformers.Cache | None = None,
        key_value_states: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        cache = past_key_values if cache is None else cache
        links = Links() if links is None else links
        if attention_mask is not None and attention_mask.ndim != 4:
            raise ValueError(f"the mask has {attention_mask.ndim} dimensions; set the model's attention to 'sdpa'")
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            attention_mask = attention_mask >= 0
        axis, mask = None, attention_mask
        if not self.site.cross:
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            if "axis" not in links.memo:
                links.memo["axis"] = describe(hidden_states, attention_mask, position_ids, cache, self.site.layer)
            axis = links.memo["axis"]
            mask = None if merging(self) or isinstance(cache, PrefixCache) else attention_mask
        y = super().forward(
            hidden_states, positions=axis, mask=mask, cache=cache, context=key_value_states, links=links
        )
        return F.dropout(y, self.output_dropout, self.training), None


def merging(attention: Attention) -> bool:
    """Whether its keys are slots of several tokens, which masks over tokens do not describe."""
    return any("token keys" in part.breaks for part in attention.spec.parts)


def describe(
    x: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: transformers.Cache | None, layer: int = 0
) -> Axis:
    """The new tokens of a pass.

    They count on from the cache. In a 4-D mask, a token that may not see itself is padding; without a cache, position
    ids that start again, at a token that sees no earlier one, begin another document.
    """
    t = x.shape[1]
    if isinstance(cache, Cache):
        axis = cache.coming(t, cache.length(), None, x.device)
        if axis is not None:
            return axis if position_ids is None else replace(axis, given_position=position_ids)
    past: int | Tensor = 0
    first: int | Tensor = 0  # the time of the mask's first key: sliding caches have dropped older ones
    if isinstance(cache, Cache):
        past = cache.length()
    elif cache is not None:
        past, (_, first) = cache.get_seq_length(layer), cache.get_mask_sizes(t, layer)
    new = torch.arange(t, device=x.device)[None]
    valid = segment = None
    if mask is not None:
        own = (past - first) + new
        valid = mask[:, 0].expand(-1, t, -1).gather(-1, own[..., None].expand(len(mask), -1, -1))[..., 0]
        if cache is None and position_ids is not None:
            again = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
            segment = (again & ~mask[:, 0].tril(-1).any(-1)).cumsum(-1)
    time = past + new if isinstance(past, Tensor) else None
    start = None if isinstance(past, Tensor) else past
    return Axis(t, start, position_ids, time, segment, valid, device=x.device)


def share_links(inner: nn.Module) -> None:
    """Give every pass of a module that runs layers in a row one `Links`, which all reach; a caller may pass its own."""
    if getattr(inner, "_shares_links", False):
        return

    def inject(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        links = kwargs["links"] = Links() if kwargs.get("links") is None else kwargs["links"]
        links.memo.pop("axis", None)  # of an earlier pass
        return args, kwargs

    inner.register_forward_pre_hook(inject, with_kwargs=True)
    inner._shares_links = True  # type: ignore[assignment]


def ask_for_masks(model: PreTrainedModel) -> None:
    """Have a model make bool masks, or none where causal order says it all, whichever kernels its own attention has."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = "sdpa"


def attention_layers(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, attention module) of each layer, by a path such as `model.layers.{}.self_attn`."""
    before, after = path.split(".{}.")
    *middle, name = after.split(".")
    for layer in model.get_submodule(before).children():
        parent = layer.get_submodule(".".join(middle)) if middle else layer
        yield parent, name, getattr(parent, name)


def put_attention(model: nn.Module, path: str, made: Sequence[nn.Module]) -> None:
    """Put modules in the place of a model's own attention, first to last layer."""
    for (parent, name, _), new in zip(list(attention_layers(model, path)), made, strict=True):
        setattr(parent, name, new)


def swap_attention(
    model: nn.Module, path: str, specs: Sequence[str | Spec], dim: int, heads: Sequence[int],
    kv_source: Sequence[int | None], attn_source: Sequence[int | None], dropouts: tuple[float, float] = (0.0, 0.0),
) -> list[SeamAttention]:  # fmt: skip
    """Replace every attention module by one of ours with the layer's spec; weights are new. Returns the new modules.

    dropouts: of attention weights and of outputs. What the layers share is owned by the model, as `model.bank`.
    """
    olds = [old for _, _, old in attention_layers(model, path)]
    if not len(olds) == len(specs) == len(heads) == len(kv_source) == len(attn_source):
        raise ValueError(
            f"{len(olds)} layers, but {len(specs)} specs, {len(heads)} head counts and {len(kv_source)} sources"
        )
    made = []
    model.bank = bank = Bank()
    for index, (old, site) in enumerate(zip(olds, sites(kv_source, attn_source, bank=bank), strict=True)):
        weight = next(old.parameters())
        with torch.device(weight.device):
            new = SeamAttention(specs[index], dim, heads[index], site=site, dropout=dropouts[0]).to(weight.dtype)
        new.output_dropout = dropouts[1]
        made.append(new.train(old.training))
        bank.to(weight.dtype)
    put_attention(model, path, made)
    return made
