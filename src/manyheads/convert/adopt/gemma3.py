"""Gemma 3 (text): RMS-normalised queries and keys, windows, and a base of rotation for each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import QK_NORMS, make
from manyheads.convert.adopt.gemma2 import Gemma2
from manyheads.convert.adopt.mistral import Mistral
from manyheads.core.part import Part


@dataclass(frozen=True)
class Gemma3(Gemma2):
    """Its code reads no cap of scores, whatever the config says."""

    def extra(self, config: PreTrainedConfig, layer: int) -> tuple[Part, ...]:
        return (make("qk-norm", eps=config.rms_norm_eps, centred=True), *Mistral.extra(self, config, layer))

    def names(self) -> dict[str, str]:
        return QK_NORMS


GEMMA3 = Gemma3(("gemma3_text",))
