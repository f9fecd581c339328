"""The feed-forward of a block, by its line."""

from __future__ import annotations

from torch import nn

from manyheads.core.feed import Feed
from manyheads.core.part import Site

ALONE = Site()


def make_ffn(line: str | Feed, dim: int, hidden: int | None = None, site: Site = ALONE) -> nn.Module | None:
    """A feed-forward, `[B, T, dim]` to the same, such as `swiglu` or `moe(experts=8, top=2)`; "none" is None.

    hidden: its width inside, or that of an expert, where the line does not say.
    """
    feed = Feed.parse(line)
    feed.check(dim, hidden, site)
    return feed.build(dim, hidden, site)
