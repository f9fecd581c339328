"""Gemma 2: capped scores of a scale and head width of their own; every other layer slides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedConfig

from manyheads.convert.adopt.family import make
from manyheads.convert.adopt.mistral import Mistral
from manyheads.core.part import Part


@dataclass(frozen=True)
class Gemma2(Mistral):
    """A block has four norms, one of them behind attention."""

    norms_output: ClassVar[bool] = True

    def refusal(self, config: PreTrainedConfig) -> str | None:
        return "it looks both ways" if getattr(config, "use_bidirectional_attention", False) else None

    def scale(self, config: PreTrainedConfig, layer: int) -> float:
        return config.query_pre_attn_scalar**-0.5

    def extra(self, config: PreTrainedConfig, layer: int) -> tuple[Part, ...]:
        cap = config.attn_logit_softcapping
        capped = () if cap is None else (make("softmax", cap=float(cap)),)
        return (*super().extra(config, layer), *capped)


GEMMA2 = Gemma2(("gemma2",))
