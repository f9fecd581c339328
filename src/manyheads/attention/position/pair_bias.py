"""A learned bias on scores from sinusoids of the two positions; it makes symmetric scores directed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Bias
from manyheads.core.mask import Mask
from manyheads.core.part import Heads, OptionError, Part, Position, Site
from manyheads.core.position import angles, inverse_frequencies
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class PairBias(Part):
    """score_h(i, j) += w_h · φ(i, j), φ of `channels` sinusoids, base 10⁴, w `[H, channels]` zero at the start.

    pair: φ = [φ(i) ; φ(j)], half the channels for the query's and half for the key's position. A softmax does not see
    what is the same for every key, so w on φ(i) is then inert and the bias is one on keys by their position.
    distance: φ = φ(i - j); the sines are what directs it, the cosines alone are symmetric.

    Options: of. channels. Nothing rotates.

    Choices the paper leaves open: it adds a matrix from a "2D positional encoding" to the scaled scores before the mask
    and does not say how the matrix is made; sinusoids, the linear map and its first values are choices. `pair` is the
    nearest reading, `distance` the one that loses nothing to the softmax.

    Source: Do Transformers Need Three Projections? 2026, arXiv 2606.04032.
    """

    name: ClassVar[str] = "pair-bias"
    stage: ClassVar = "position"
    paper: ClassVar[str] = "arXiv 2606.04032"
    slot: ClassVar[str | None] = "position"
    examples: ClassVar = ({}, {"of": "distance", "channels": 6})

    of: Literal["pair", "distance"] = "pair"
    channels: int = 10

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads", "bare scores"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.channels < 2 or self.channels % 2:
            raise OptionError(f"pair-bias: channels={self.channels}; an even number from 2 on")
        return heads._replace(rotary=None)

    def build(self, before: Heads, after: Heads, site: Site) -> PairBiasPosition:
        return PairBiasPosition(before.q, self)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        each = 2 * self.channels if self.of == "distance" else 1
        return Cost(before.q * self.channels, pair_flops=before.q * each)


class PairBiasPosition(Position):
    def __init__(self, heads: int, options: PairBias) -> None:
        super().__init__()
        self.of, self.channels = options.of, options.channels
        self.weight = nn.Parameter(torch.zeros(heads, options.channels))

    def bias(self, mask: Mask, flow: Flow) -> Bias:
        of = self._pair if self.of == "pair" else self._distance
        return lambda q, k: of(mask.q[q].position, mask.k[k].position)

    def _pair(self, q: Tensor, k: Tensor) -> Tensor:
        half = self.channels // 2

        def part(position: Tensor, weight: Tensor) -> Tensor:
            """`[B, H, N, 1]`"""
            cos, sin = angles(position, inverse_frequencies(half, 10000.0, position.device), weight.dtype)
            return torch.stack([sin, cos], -1).flatten(-2)[..., :half] @ weight[:, :, None]

        return part(q, self.weight[:, :half]) + part(k, self.weight[:, half:]).transpose(-1, -2)

    def _distance(self, q: Tensor, k: Tensor) -> Tensor:
        """Σ_p a_p sin(θ_p (i - j)) + b_p cos(θ_p (i - j)) as one matmul of functions of i and of j."""
        theta = inverse_frequencies(self.channels, 10000.0, q.device)
        (qcos, qsin), (kcos, ksin) = (angles(each, theta, self.weight.dtype) for each in (q, k))
        a, b = self.weight[:, None].chunk(2, -1)
        left = torch.cat([a * qsin + b * qcos, b * qsin - a * qcos], -1)
        return left @ torch.cat([kcos, ksin], -1).transpose(-1, -2)
