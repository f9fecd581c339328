"""Multi-scale heads: sliding windows of several radii, more small ones in lower layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyheads.attention.windows import Near, keep_newest
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Rule, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MultiScaleHeads(Part):
    """Head h sees the tokens at most w_h away: |s - t| <= w_h (causal: those of them that are not later).

    How many of the H heads get the k-th of K radii, small to large, depends on the layer l = 1 … L: shares are
    softmax(z_l) with z_l[K] = 0, z_l[k] = z_l[k+1] + alpha / l for l < L, and z_L = 0; H times a share is rounded by
    largest remainders, so that counts sum to H. alpha > 0 gives lower layers small radii, alpha = 0 is uniform, and so
    is the top layer always. Nothing is learned. A causal cache keeps what the widest head can see.

    Options: scales, radii in tokens, or shares (below 1) of `length`, rounded up. length: of the sequences, by default
    the site's max_len. alpha. radius: one for each head by hand, in place of scales. class_token: position 0 of a
    document sees and is seen by every token.

    Choices: the paper's recursion, default radii and alpha are known from its abstract's properties and second hand;
    a radius of 1 is one neighbour on each side; small radii come first among the heads.

    Source: Guo et al. 2019, arXiv 1912.00544.
    """

    name: ClassVar[str] = "multi-scale-heads"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 1912.00544"
    examples: ClassVar = (
        {"length": 12, "alpha": -0.5},
        {"radius": (0, 2, 1, 4)},
        {"scales": (1, 0.3), "length": 9, "class_token": True},
    )

    scales: tuple[int | float, ...] = (1, 3, 0.0625, 0.125, 0.25)
    length: int | None = None
    alpha: float = 0.5
    radius: tuple[int, ...] | None = None
    class_token: bool = False

    def __post_init__(self) -> None:
        radii = self.scales if self.radius is None else self.radius
        if not radii or min(radii) < 0:
            raise OptionError(f"radii {[*radii]}; give some, of 0 (the token itself) or more")

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads"})

    def radii(self, heads: int, site: Site) -> tuple[int, ...]:
        """w of each head."""
        if self.radius is not None:
            if len(self.radius) != heads:
                raise OptionError(f"multi-scale-heads: {len(self.radius)} radii for {heads} heads; give one for each")
            return self.radius
        length = self.length or site.max_len
        if length is None and any(0 < scale < 1 for scale in self.scales):
            raise OptionError(
                f"multi-scale-heads: scales {[*self.scales]} are shares of an unknown length; give length, or radii of "
                "1 and more"
            )
        sizes = sorted(math.ceil(scale * (length or 0)) if 0 < scale < 1 else int(scale) for scale in self.scales)
        counts = apportion(heads, shares(len(sizes), self.alpha, site.layer % site.layers + 1, site.layers))
        return tuple(size for size, count in zip(sizes, counts, strict=True) for _ in range(count))

    def layout(self, heads: Heads, site: Site) -> Heads:
        radii = self.radii(heads.q, site)
        return heads if self.class_token else keep_newest(heads, site, max(radii) + 1)

    def build(self, before: Heads, after: Heads, site: Site) -> MultiScaleSelect:
        return MultiScaleSelect(self.radii(before.q, site), self.class_token)


class MultiScaleSelect(Piece):
    def __init__(self, radii: tuple[int, ...], class_token: bool) -> None:
        super().__init__()
        self.radii, self.class_token = radii, class_token
        self.near = Near(tuple(radius + 1 for radius in radii))

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (self._near_or_class if self.class_token else self.near,)

    def _near_or_class(self, q: Axis, k: Axis) -> Tensor:
        return self.near(q, k) | (cols_of(k.position) == 0) | (rows_of(q.position) == 0)


def shares(scales: int, alpha: float, layer: int, layers: int) -> list[float]:
    """softmax(z) of a layer (1 to `layers`), from the smallest scale to the largest."""
    step = 0.0 if layer == layers else alpha / layer
    z = [step * (scales - 1 - k) for k in range(scales)]
    top = max(z)
    each = [math.exp(value - top) for value in z]
    return [value / sum(each) for value in each]


def apportion(heads: int, shares: Sequence[float]) -> list[int]:
    """`heads` split by shares into whole counts, by largest remainder (the smaller scale where they are equal)."""
    wanted = [heads * share for share in shares]
    counts = [math.floor(each + 1e-9) for each in wanted]
    by_rest = sorted(range(len(shares)), key=lambda k: (round(counts[k] - wanted[k], 9), k))
    for k in by_rest[: heads - sum(counts)]:
        counts[k] += 1
    return counts
