"""Encoder-decoder models: what an encoder made of its input, and a decoder that writes as a causal model does."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from manyheads.attention import Attention
from manyheads.core.cache import Cache
from manyheads.stack.seam import SeamAttention


class Encoded:
    """An adopted encoder-decoder model that has heard its input, for the verifier: one batch, which may shrink.

    Args:
        model: with our attention in its decoder (`mh.adopt`).
        given: what its encoder takes, such as `input_features`.
    """

    def __init__(self, model: PreTrainedModel, given: Mapping[str, Tensor]) -> None:
        if not model.config.is_encoder_decoder:
            raise TypeError(f"a {type(model).__name__} has no encoder; leave encoder= out")
        layers = [each for each in cast(Any, model).get_decoder().modules() if isinstance(each, SeamAttention)]
        if not layers:
            raise TypeError(
                f"a {type(model).__name__} keeps no manyheads.Cache; adopt it first: manyheads.adopt(model)"
            )
        self.model = model
        self.attentions: list[Attention] = sorted(layers, key=lambda layer: layer.site.layer)
        self.limit: int | None = getattr(model.config, "max_target_positions", None)
        with torch.no_grad():
            self.memory: Tensor = cast(Any, model).get_encoder()(**given).last_hidden_state

    def __call__(
        self, input_ids: Tensor, *, cache: Cache, use_cache: bool, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, logits_to_keep: int = 0,
    ) -> SimpleNamespace:  # fmt: skip
        """Logits of the decoder. Candidates beyond its last position count as there: no text has room for them."""
        if len(self.memory) != len(input_ids):
            raise ValueError(
                f"{len(input_ids)} prompts for {len(self.memory)} inputs of the encoder; one each is needed"
            )
        if position_ids is not None and self.limit is not None:
            position_ids = position_ids.clamp_max(self.limit - 1)
        out = cast(Any, self.model)(
            encoder_outputs=BaseModelOutput(cast(Any, self.memory)), decoder_input_ids=input_ids, cache=cache,
            decoder_attention_mask=attention_mask, decoder_position_ids=position_ids, use_cache=use_cache,
        )  # fmt: skip
        return SimpleNamespace(logits=out.logits[:, -logits_to_keep:])

    def select(self, sequences: Tensor) -> None:
        self.memory = self.memory[sequences]

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()
