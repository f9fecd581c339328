"""The contract of a feed-forward: options (a frozen dataclass), the module it builds, what it costs.

It is named by one line in the grammar of specs, such as `swiglu` or `moe(experts=8, top=2)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow, Links
from manyheads.core.mask import Axis
from manyheads.core.part import Site
from manyheads.core.registry import find_feed
from manyheads.core.spec import printed, read_one


@dataclass(frozen=True)
class Feed:
    """Options of a feed-forward. Subclass it as a frozen dataclass, `register_feed` it, and give it `build` and `cost`.

    hidden, of the methods, is the width that the stack gives, None for the feed-forward's own. steady: training
    computes what evaluation computes. examples: options that fit a layer of dim 24, for `manyheads.testing`; each
    should be another way through the code.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    @classmethod
    def parse(cls, line: str | Feed) -> Feed:
        """Read a line; an error points at the token."""
        return line if isinstance(line, Feed) else read_one(line, find_feed, "ffn")

    def __str__(self) -> str:
        return printed(self)

    @property
    def steady(self) -> bool:
        return True

    def check(self, dim: int, hidden: int | None, site: Site) -> None:
        """Raise `OptionError` for numbers that do not fit."""
        if hidden is not None:
            check_whole(hidden=hidden)

    def width(self, dim: int, hidden: int | None = None) -> int | None:
        """What `hidden` counts (channels inside, or of an expert) with the default filled in; None of nothing."""
        return hidden

    def build(self, dim: int, hidden: int | None, site: Site) -> nn.Module | None:
        """The module, x `[B, T, D]` to y `[B, T, D]`: a `FeedPiece` where it asks what the tokens are."""
        raise NotImplementedError

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        """Parameters, those idle for a token, and FLOPs a token."""
        raise NotImplementedError


class FeedPiece(nn.Module):
    """A feed-forward that asks what its rows are: `flow` tells tokens from padding and takes losses."""

    def forward(self, x: Tensor, flow: Flow | None = None) -> Tensor:
        """x `[B, T, D]` to y `[B, T, D]`; without a flow every row is a token, and losses are dropped."""
        return self.feed(x, feed_flow(x, training=self.training) if flow is None else flow)

    def feed(self, x: Tensor, flow: Flow) -> Tensor:
        raise NotImplementedError


def feed_flow(
    x: Tensor, axis: Axis | None = None, links: Links | None = None, layer: int = 0, training: bool = False
) -> Flow:
    """The flow of a feed-forward's pass over x `[B, T, D]`, whose rows `axis` describes."""
    axis = Axis(x.shape[1], 0, device=x.device) if axis is None else axis
    return Flow(x, x, axis, axis, Links() if links is None else links, layer, training=training)
