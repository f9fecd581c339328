"""What lets tokens look at each other before they are pooled: self-attention, and gated mixing along an axis."""

from __future__ import annotations

from torch import Tensor, nn

from manyheads.aggregate.aggregator import attend


def split(x: Tensor, heads: int) -> Tensor:
    """`[B, N, heads·d]` as `[B, heads, N, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """x + MHA(LN x), then x + MLP(LN x), pre-norm, GELU, hidden four times as wide. No positions.

    x `[B, N, D]`, mask bool `[B, N]`; a token of size s counts as s of it.
    """

    def __init__(self, width: int, heads: int, hidden: int | None = None) -> None:
        super().__init__()
        self.heads, hidden = heads, hidden or 4 * width
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, mask: Tensor, size: Tensor | None = None) -> Tensor:
        q, k, v = (split(each, self.heads) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.o(attend(q, k, v, mask, size)[0].transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gating(nn.Module):
    """a ∘ (W LN(b) + c), [a; b] = u `[…, width]`, W `[length, length]` along the axis; at first W ≈ 0, c = 1: a alone.

    Source: gMLP's spatial gating unit (arXiv 2105.08050).
    """

    def __init__(self, width: int, length: int, axis: int) -> None:
        super().__init__()
        self.norm, self.axis = nn.LayerNorm(width // 2), axis
        self.mix = nn.Linear(length, length)
        nn.init.normal_(self.mix.weight, std=1e-6)
        nn.init.ones_(self.mix.bias)

    def forward(self, u: Tensor) -> Tensor:
        a, b = u.chunk(2, -1)
        return a * self.mix(self.norm(b).transpose(self.axis, -1)).transpose(self.axis, -1)
