"""Rotary frequencies and rotations, and the slopes of ALiBi: the arithmetic behind the position parts.

RoPE: Su et al. 2021, arXiv 2104.09864. Linear scaling: Chen et al. 2023, arXiv 2306.15595. YaRN: Peng et al. 2023,
arXiv 2309.00071. ALiBi: Press et al. 2021, arXiv 2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.core.mask import Axis, cols_of, rows_of


def inverse_frequencies(dim: int, base: float, device: torch.device | None = None) -> Tensor:
    """θ_p = base^(-2p/dim), p = 0 … dim/2 - 1, float32 radians per position `[dim/2]`."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def scale_llama3(theta: Tensor, *, factor: float, low: float, high: float, original: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a smooth ramp between.

    `low` and `high` are turns within the `original` context length: below `low` turns a pair is fully stretched.
    """
    turns = original * theta / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * theta + (1 - keep) * theta / factor


def scale_yarn(
    theta: Tensor, *, dim: int, base: float, factor: float, original: int, fast: float, slow: float, truncate: bool
) -> Tensor:
    """YaRN: a linear ramp over pair indices, from the pair with `fast` turns to the pair with `slow` turns."""

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(fast), pair_of(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, device=theta.device, dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0, 1)
    return stretched * theta / factor + (1 - stretched) * theta


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of the rotated features with the extension factor (1 when there is none)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def angles(position: Tensor, theta: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, `[B or 1, 1, N, pairs]`; computed in float32 or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = position[:, None, :, None].to(wide) * theta.to(wide)
    return (angle.cos() * magnitude).to(dtype), (angle.sin() * magnitude).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turn each pair of channels of x `[B, H, N, 2·pairs]`.

    `half` pairs channel p with p + pairs; `interleaved` pairs 2p with 2p + 1.
    """
    a, b = pairs(x, layout)
    turned = x * unpair(cos, cos, layout)  # a fused multiply-add would round by where a row lies in memory
    return turned.add_(unpair(b, a, layout) * unpair(-sin, sin, layout))


def pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second channel of each pair."""
    if layout != "half":
        return x[..., 0::2], x[..., 1::2]
    a, b = x.chunk(2, -1)
    return a, b


def unpair(a: Tensor, b: Tensor, layout: str) -> Tensor:
    """The inverse of `pairs`."""
    return torch.cat([a, b], -1) if layout == "half" else torch.stack([a, b], -1).flatten(-2)


def of_distance(values: Callable[[Tensor], Tensor], q: Axis, k: Axis) -> Tensor:
    """A tile `[B or 1, H or 1, t, s]` of a function of i - j, the distance of a query's position from a key's.

    Where positions count on, the function is asked once for each distance, and not for each pair.
    """
    if q.counted is None or k.counted is None or not q.length:
        return values(rows_of(q.position) - cols_of(k.position))
    nearest = q.counted - k.counted - k.length + 1
    each = torch.arange(nearest, nearest + k.length + q.length - 1, device=q.device)[None, None, None]
    return values(each).squeeze(-2).unfold(-1, k.length, 1).contiguous().flip(-1)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """2^(-8h/H) for H a power of two; other counts take every second slope of the next power, as the authors do."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return torch.tensor(slopes, device=device)
