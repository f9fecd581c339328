"""The two models that attention layers can live in: a family's own, and our decoder.

Either is a transformers causal language model whose attention modules are found by `config.attention_path`.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.output_capturing import capture_outputs

from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.stack.block import Block
from manyheads.stack.config import ManyheadsConfig
from manyheads.stack.decoder import Decoder
from manyheads.stack.initialise import initialise, mark_started
from manyheads.stack.melt import Gate
from manyheads.stack.residual import Residual, Route
from manyheads.stack.seam import ask_for_masks, describe, share_links, swap_attention


def build_body(config: ManyheadsConfig) -> PreTrainedModel:
    """The model that a config describes, with new weights."""
    return OwnBody(config) if config.base is None else wrapped(config)


def wrapped(config: ManyheadsConfig) -> PreTrainedModel:
    """A family's model with our attention; norms, feed-forwards and everything else stay the family's."""
    base = config.base
    assert base is not None
    body = AutoModelForCausalLM.from_config(base, attn_implementation="eager", dtype=config.dtype)
    made = swap_attention(
        body, config.attention_path, config.specs, config.hidden_size, config.heads, config.kv_source,
        config.attn_source, config.dropouts,
    )  # fmt: skip
    for module in (*made, body.bank):
        initialise(module, config.num_hidden_layers, getattr(base, "initializer_range", 0.02))
        mark_started(module)
    share_links(body.base_model)
    ask_for_masks(body)
    return body


class OwnBody(PreTrainedModel):
    """Our `Decoder` with the calling convention of a transformers model."""

    config_class = ManyheadsConfig
    base_model_prefix = "decoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012

    def __init__(self, config: ManyheadsConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(
            config.vocab_size, config.specs, config.hidden_size, config.heads, config.num_hidden_layers,
            ffn=config.ffn, hidden=config.intermediate_size, kv_source=config.kv_source,
            attn_source=config.attn_source, residual=config.residual, loops=config.loops,
            looped=config.looped, melt=config.melt, max_len=config.max_position_embeddings,
            tied=config.tie_word_embeddings, eps=config.rms_norm_eps, dropout=config.attention_dropout,
            std=config.initializer_range,
        )  # fmt: skip
        mark_started(self.decoder)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Residual, Route, Gate)):  # so that a plain checkpoint loads under another residual
            module.reset_parameters()

    def on_step(self, progress: float) -> None:
        self.decoder.stack.on_step(progress)

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.decoder.head = value  # type: ignore[assignment]

    @capture_outputs(tie_last_hidden_states=False)
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        x = self.decoder.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, cache=cache, position_ids=position_ids
        )
        axis = describe(x, mask, position_ids, cache)
        told = cache is None or isinstance(cache, Cache)  # the axes of rows and queries say it all
        if told and (attention_mask is None or attention_mask.ndim == 2):
            mask = None
        states = kwargs.get("output_hidden_states") or self.config.output_hidden_states
        if states and self.config.melt is not None:
            raise ValueError(
                "a melted model runs chunk by chunk, so its layers have no one output of a pass: output_hidden_states "
                "is for models without melt"
            )
        few = isinstance(logits_to_keep, int) and logits_to_keep > 0 and not states
        newest = logits_to_keep if few else None
        hidden = self.decoder.hidden(embeds=x, positions=axis, mask=mask, cache=cache, links=links, newest=newest)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)  # type: ignore[call-arg]
