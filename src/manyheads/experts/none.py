"""No feed-forward at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyheads.core.cost import Cost
from manyheads.core.feed import Feed
from manyheads.core.part import Site
from manyheads.core.registry import register_feed


@register_feed
@dataclass(frozen=True)
class NoFeed(Feed):
    """A block of attention alone."""

    name: ClassVar[str] = "none"

    def width(self, dim: int, hidden: int | None = None) -> None:
        return None

    def build(self, dim: int, hidden: int | None, site: Site) -> None:
        return None

    def cost(self, dim: int, hidden: int | None, site: Site) -> Cost:
        return Cost()
