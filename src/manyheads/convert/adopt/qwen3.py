"""Qwen3: RMS-normalised queries and keys, free head width; some layers may slide."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import QK_NORMS, make
from manyheads.convert.adopt.mistral import Mistral
from manyheads.core.part import Part


@dataclass(frozen=True)
class Qwen3(Mistral):
    """qk-norm comes first among the transforms."""

    def extra(self, config: PreTrainedConfig, layer: int) -> tuple[Part, ...]:
        return (make("qk-norm", eps=config.rms_norm_eps), *super().extra(config, layer))

    def names(self) -> dict[str, str]:
        return QK_NORMS


QWEN3 = Qwen3(("qwen3",))
