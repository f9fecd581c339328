"""One layer of a stack: attention and a feed-forward, each behind its own norm."""

from __future__ import annotations

import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from manyheads.attention import Attention
from manyheads.core.flow import Links
from manyheads.core.mask import Axis, Mask


class Block(GradientCheckpointingLayer):
    """x + attention(norm x), then + cross(norm x) over a context, then + ffn(norm x); cross and ffn may be missing.

    With `gradient_checkpointing` set, a training pass keeps only x and computes the block again in backward.
    """

    def __init__(
        self, attention: Attention, ffn: nn.Module | None, *, cross: Attention | None = None, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(attention.dim, eps)
        self.attention = attention
        self.cross_norm = nn.RMSNorm(attention.dim, eps) if cross is not None else None
        self.cross = cross
        self.ffn_norm = nn.RMSNorm(attention.dim, eps) if ffn is not None else None
        self.ffn = ffn

    def forward(
        self,
        x: Tensor,
        *,
        positions: Axis,
        mask: Tensor | Mask | None = None,
        cache: transformers.Cache | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        links: Links | None = None,
    ) -> Tensor:
        """x `[B, T, D]`; context_mask bool `[B or 1, 1, T, S]`; the rest as in `Attention`."""
        links = Links() if links is None else links
        links.residual = x
        x = x + self.attention(self.attention_norm(x), positions=positions, mask=mask, cache=cache, links=links)
        links.residual = None
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(
                self.cross_norm(x), positions=positions, mask=context_mask, cache=cache, context=context, links=links
            )
        if self.ffn is not None and self.ffn_norm is not None:
            x = x + self.ffn(self.ffn_norm(x))
        return x
