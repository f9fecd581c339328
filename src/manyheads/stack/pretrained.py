"""Our models as transformers models: they save, load through the Auto classes, and generate."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.core.linear import quicken
from manyheads.core.spec import Spec
from manyheads.stack.bodies import OwnBody, build_body
from manyheads.stack.config import ManyheadsConfig
from manyheads.stack.initialise import start_missing
from manyheads.stack.seam import attention_layers, merging, share_links


class ManyheadsForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model whose attention layers are ours, inside a family's model or our own decoder.

    The cache it makes for itself is a `manyheads.Cache`; stock caches work as well. `links` (see `Links`) collects
    auxiliary losses of a pass; with labels their mean is added to the loss, times `config.aux_weight`.
    """

    config_class = ManyheadsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: ManyheadsConfig) -> None:
        config.get_text_config()._attn_implementation = "sdpa"
        super().__init__(config)
        self._wrap(build_body(config))
        self.post_init()

    @classmethod
    def around(cls, model: PreTrainedModel, config: ManyheadsConfig) -> ManyheadsForCausalLM:
        """Wrap a model whose attention is ours already; shares all its tensors."""
        wrapper = cls.__new__(cls)
        config.get_text_config()._attn_implementation = "sdpa"
        config.dtype = model.dtype
        PreTrainedModel.__init__(wrapper, config)
        share_links(model.base_model)
        wrapper._wrap(model)
        wrapper.all_tied_weights_keys = wrapper.get_expanded_tied_weights_keys()
        wrapper.generation_config = model.generation_config
        wrapper.train(model.training)
        return wrapper

    def _wrap(self, model: PreTrainedModel) -> None:
        self.model = model
        tied = getattr(model, "_tied_weights_keys", None) or {}
        self._tied_weights_keys = {f"model.{key}": f"model.{value}" for key, value in dict(tied).items()}
        self._no_split_modules = model._no_split_modules
        quicken(self)

    @property
    def attentions(self) -> list[Attention]:
        """The attention layers, first to last."""
        return [module for _, _, module in attention_layers(self.model, self.config.attention_path)]  # type: ignore[misc]

    @property
    def specs(self) -> list[Spec]:
        return [layer.spec for layer in self.attentions]

    def _merger(self) -> Attention | None:
        """The first layer whose keys are slots of several tokens, or that keeps a state in place of keys."""
        return next((layer for layer in self.attentions if merging(layer)), None)

    def on_step(self, progress: float) -> None:
        """Pass training progress in [0, 1] to every part with a schedule."""
        for each in [self.model] if isinstance(self.model, OwnBody) else self.attentions:
            each.on_step(progress)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[return-value]

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.set_output_embeddings(value)

    def initialize_weights(self) -> None:
        """Draw what has no value yet; attention weights that a loaded checkpoint lacks start as their parts say."""
        loaded = [layer for layer in self.attentions if not getattr(layer, "_is_hf_initialized", False)]
        super().initialize_weights()
        for layer in loaded:
            start_missing(layer, self.config.num_hidden_layers, self.config.initializer_range)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = torch.utils.checkpoint.checkpoint, **kwargs: Any
    ) -> None:
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True):
            raise ValueError("reentrant checkpointing loses gradients between layers; use use_reentrant=False")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        links: Links | None = None,
        past_key_values: transformers.Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As of any transformers causal language model.

        attention_mask: `[B, S]`, 0 on padding, or bool `[B, 1, T, S]`, which is the whole truth. Without position_ids
        our own decoder counts the tokens that are not padding; a family counts all. Packed documents are told apart by
        position_ids that start again, in passes without a cache (with labels, none is made unless asked for).
        """
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training and labels is None)
        if use_cache and cache is None:
            cache = Cache()
        links = Links() if links is None else links
        merger = self._merger()
        whole = attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2)
        if merger is not None:
            slots = f"layer {merger.site.layer} ({merger.spec}) merges tokens into slots or a state"
            if cache is not None and not isinstance(cache, Cache):
                raise ValueError(f"{slots}, which a {type(cache).__name__} cannot hold; use manyheads.Cache")
            if whole:
                raise ValueError(f"{slots}: no 4-D mask fits")
        rows = self.config.base is None and self.config.loops > 1 and self.config.melt is None
        if rows and not isinstance(cache, Cache | None):
            looped = self.config.looped or self.config.num_hidden_layers
            raise ValueError(
                f"{self.config.loops} loops of {looped} layers each keep rows of their own, for "
                f"which a {type(cache).__name__} is not made; use manyheads.Cache"
            )
        if (
            attention_mask is not None
            and not whole
            and position_ids is None
            and (merger is not None or self.config.base is None)
        ):
            new = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]  # type: ignore[union-attr]
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -new:]
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            inputs_embeds=inputs_embeds, labels=labels, use_cache=use_cache, logits_to_keep=logits_to_keep,
            links=links, **kwargs,
        )  # fmt: skip
        if labels is not None and links.aux:
            out.loss = out.loss + self.config.aux_weight * torch.stack(list(links.aux.values())).mean()
        return out

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        merger = self._merger()
        if merger is not None and generation_mode == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                f"drafts cannot be taken back: layer {merger.site.layer} ({merger.spec}) merges tokens into slots or a "
                "state"
            )
        wanted = generation_config.cache_implementation is None and generation_config.use_cache is not False
        if wanted and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = Cache()
            return None
        prepare: Any = super()._prepare_cache_for_generation  # type: ignore[reportAttributeAccessIssue]
        return prepare(generation_config, model_kwargs, generation_mode, *args, **kwargs)


AutoConfig.register("manyheads", ManyheadsConfig)
AutoModelForCausalLM.register(ManyheadsConfig, ManyheadsForCausalLM)

__all__ = ["ManyheadsConfig", "ManyheadsForCausalLM"]
