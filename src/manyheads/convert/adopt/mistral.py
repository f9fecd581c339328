"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import Family, make
from manyheads.core.part import Part


@dataclass(frozen=True)
class Mistral(Family):
    """A layer slides when its layer type says so; families without layer types slide everywhere or nowhere."""

    def extra(self, config: PreTrainedConfig, layer: int) -> tuple[Part, ...]:
        size = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if size is None or (kinds is not None and kinds[layer] != "sliding_attention"):
            return ()
        return (make("window", size=size),)


MISTRAL = Mistral(("mistral",))
