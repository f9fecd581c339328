"""A class for every token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyheads.multi.head import register_head
from manyheads.multi.heads.classification import Classification


@register_head("tokens")
@dataclass(frozen=True)
class Tokens(Classification):
    """Logits `[B, T, classes]`; labels `[B, T]`, missing on padding; a place is a token: long rows weigh more."""

    reads = "tokens"

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return tuple(features.shape[:2])
