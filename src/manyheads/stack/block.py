"""One layer of a stack: attention and a feed-forward, each behind its own norm."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from manyheads.attention import Attention
from manyheads.core.feed import FeedPiece, feed_flow
from manyheads.core.flow import Links
from manyheads.core.mask import Axis, Mask
from manyheads.stack.melt import Gate, Turn
from manyheads.stack.residual import Residual, Sum

SUM = Sum()


class Block(GradientCheckpointingLayer):
    """x + attention(norm x), then + cross(norm x) over a context, then + ffn(norm x); cross and ffn may be missing.

    (With another residual than the sum, "+" and what is read are its own.) With `gradient_checkpointing` set, a
    training pass keeps only its input and computes the block again in backward.
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
        self.gate: Gate | None = None  # of a melted stack, in a layer with rows of its own
        self.later: list[tuple[Attention, Attention | None]] = []  # attention and cross of later loops, no submodules

    @property
    def turns(self) -> list[tuple[Attention, Attention | None]]:
        """Attention and cross of each loop; the first owns the weights."""
        return [(self.attention, self.cross), *self.later]

    @property
    def sublayers(self) -> int:
        return 1 + (self.cross is not None) + (self.ffn is not None)

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
        residual: Residual = SUM,
        stream: Any = None,
        site: int = 0,
        loop: int = 0,
        turn: Turn | None = None,
    ) -> tuple[Tensor, Any]:
        """What the next layer reads `[B, T, D]`, and the residual's stream.

        x `[B, T, D]`; context_mask bool `[B or 1, 1, T, S]`; stream: where x was read (default: x itself), the first
        sublayer being at `site`; turn: of a melted stack, which it is; the rest as in `Attention`.
        """
        links = Links() if links is None else links
        stream = residual.start(x) if stream is None else stream
        attention, cross = self.turns[loop]
        cache = cache if turn is None else turn.cache  # there also where a pass is computed again
        links.residual, x = x, self.attention_norm(x)
        links.source = None if turn is None or self.gate is None else turn.source(attention.site.layer, self.gate, x)
        y = attention(x, positions=positions, mask=mask, cache=cache, links=links)
        links.residual = links.source = None
        x, stream = residual.step(site, stream, y)
        if cross is not None and self.cross_norm is not None:
            y = cross(
                self.cross_norm(x), positions=positions, mask=context_mask, cache=cache, context=context, links=links
            )
            x, stream = residual.step(site + 1, stream, y)
        if self.ffn is not None and self.ffn_norm is not None:
            y = self._fed(self.ffn, self.ffn_norm(x), positions, links, attention.site.layer)
            x, stream = residual.step(site + self.sublayers - 1, stream, y)
        return x, stream

    def _fed(self, ffn: nn.Module, x: Tensor, axis: Axis, links: Links, layer: int) -> Tensor:
        """Only a `FeedPiece` asks what its rows are."""
        if not isinstance(ffn, FeedPiece):
            return ffn(x)
        return ffn(x, feed_flow(x, axis, links, layer, self.training))

    def train(self, mode: bool = True) -> Block:
        for turn in self.later:
            for attention in filter(None, turn):
                attention.train(mode)
        return super().train(mode)

    def on_step(self, progress: float) -> None:
        """Pass training progress in [0, 1] to every part with a schedule, in every loop."""
        for turn in self.turns:
            for attention in filter(None, turn):
                attention.on_step(progress)
