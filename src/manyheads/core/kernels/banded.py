"""Fused attention on blocks of query rows, each with the keys within its reach.

No mask or bias of all queries and keys is made, and keys that no row of a block can see cost nothing. Heads that see
much farther than others are solved apart from them, in a band of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.core.kernel import Bias, Call, Out, ScoreProgram
from manyheads.core.kernels.common import equal_widths, refuse
from manyheads.core.kernels.flash_cpu import flash_cpu
from manyheads.core.kernels.sdpa import sdpa
from manyheads.core.kernels.tiled import KEPT_BYTES, TILE_BYTES
from manyheads.core.mask import Mask

ROWS = 256
"""Query rows of a block; this and the next two were measured on CPU."""
FEWEST_ROWS = 64
"""Rows of a block in a narrow window; in a wider one they are a quarter of it, up to `ROWS`."""
NARROW = 128
"""A window within which heads are not told apart; beyond it, heads of the same power of two are in one band."""


def bands(mask: Mask, heads: int, groups: int) -> list[tuple[int, int]]:
    """Of neighbouring key heads that see about equally far: how many they are, and how many rows a block has."""
    spans, each = mask.spans * (heads // len(mask.spans)), heads // groups

    def width(group: int) -> float:
        of = spans[group * each : (group + 1) * each]
        wide = max(span.last for span in of) - min(span.first for span in of)
        return wide if wide == torch.inf else 2 ** (max(NARROW, int(wide)) - 1).bit_length()

    widths = [width(group) for group in range(groups)]
    firsts = [group for group in range(groups) if group == 0 or widths[group] != widths[group - 1]]
    counts = [last - first for first, last in zip(firsts, [*firsts[1:], groups], strict=True)]
    rows = [int(min(ROWS, max(FEWEST_ROWS, widths[first] / 4))) for first in firsts]
    return [*zip(counts, rows, strict=True)]


def share(mask: Mask, heads: int, groups: int) -> float:
    """Of all pairs of queries and keys, those that `banded` computes; known without looking at data."""
    t, s, pairs, first = mask.q.length, mask.k.length, 0, 0
    for count, rows in bands(mask, heads, groups):
        last = first + count * heads // groups
        of, first = mask.of(slice(first, last)), last
        cuts = [slice(at, min(at + rows, t)) for at in range(0, t, rows)]
        pairs += count * sum((cut.stop - cut.start) * len(range(s)[of.reach(cut)]) for cut in cuts)
    return pairs / max(1, groups * t * s)


def banded(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    refuse("banded", call, program, bias=True)
    written = call.bias is not None and not dropout  # PyTorch has no fused gradient of a bias on the CPU
    fused = flash_cpu if call.q.device.type == "cpu" and (need_lse or written) else sdpa
    solve = partial(fused, need_lse=need_lse, dropout=dropout)
    sizes, rows = zip(*bands(call.mask, call.q.shape[1], call.k.shape[1]), strict=True)
    outs = [_in_blocks(part, n, solve) for part, n in zip(_by_heads(call, sizes), rows, strict=True)]
    out = _cat(outs, 1)
    return Out(out.o[..., : call.v.shape[-1]], out.lse)


def _cat(outs: Sequence[Out], dim: int) -> Out:
    if len(outs) == 1:
        return outs[0]
    lses = [out.lse for out in outs if out.lse is not None]
    return Out(torch.cat([out.o for out in outs], dim), torch.cat(lses, dim) if len(lses) == len(outs) else None)


def _by_heads(call: Call, sizes: Sequence[int]) -> Iterator[Call]:
    """The calls of some key heads after the other."""
    q, k, v = equal_widths(call)
    each, first = q.shape[1] // k.shape[1], 0
    if len(sizes) == 1:
        yield replace(call, q=q, k=k, v=v)
        return
    for of in zip(q.split([size * each for size in sizes], 1), k.split(sizes, 1), v.split(sizes, 1), strict=True):
        heads = slice(first, first + of[0].shape[1])
        bias, first = None if call.bias is None else _of_heads(call.bias, heads), heads.stop
        yield replace(call, q=of[0], k=of[1], v=of[2], mask=call.mask.of(heads), bias=bias)


def _of_heads(bias: Bias, heads: slice) -> Bias:
    return lambda q, k: tile if (tile := bias(q, k)).shape[-3] == 1 else tile[..., heads, :, :]


def _in_blocks(call: Call, rows: int, solve: Callable[[Call], Out]) -> Out:
    if call.bias is None and (call.mask.is_causal or call.mask.is_full):
        return solve(call)
    (batch, heads, t, _), s = call.q.shape, call.k.shape[2]
    pair_bytes = batch * (1 if call.bias is None else heads) * call.q.element_size()
    rows = max(1, min(rows, TILE_BYTES // (pair_bytes * s)))
    step = max(rows, FEWEST_ROWS)
    k, v = _Chunks(call.k, step), _Chunks(call.v, step)

    cuts = [slice(at, min(at + rows, t)) for at in range(0, t, rows)]
    reaches = [call.mask.reach(cut) for cut in cuts]
    if all(reach.start == reach.stop for reach in reaches):
        reaches = [slice(0, 1)] * len(cuts)  # a graph for the gradients, which are zero

    def block(q: Tensor, cut: slice, reach: slice) -> Out:
        if reach.start == reach.stop:
            o, wide = q.new_zeros(*q.shape[:3], call.v.shape[-1]), torch.promote_types(q.dtype, torch.float32)
            return Out(o, o.new_full(q.shape[:3], -torch.inf, dtype=wide))
        keys = k.around(reach)
        bias = None if call.bias is None else _tile_of(call.bias, cut, keys)
        mask = replace(call.mask, q=call.mask.q[cut], k=call.mask.k[keys])
        return solve(replace(call, q=q, k=k[keys], v=v[keys], mask=mask, bias=bias))

    if torch.is_grad_enabled() and share(call.mask, heads, call.k.shape[1]) * t * s * pair_bytes > KEPT_BYTES:
        block = partial(checkpoint, block, use_reentrant=False)
    return _cat([block(*each) for each in zip(call.q.split(rows, 2), cuts, reaches, strict=True)], 2)


def _tile_of(bias: Bias, rows: slice, keys: slice) -> Bias:
    return lambda q, k: bias(rows, keys)[..., q, k]


class _Chunks:
    """Keys or values `[B, G, S, ·]`, of which blocks take overlapping slices along whole chunks.

    Each slice of a tensor has a gradient as large as the tensor; here gradients are added up chunk by chunk.
    """

    def __init__(self, x: Tensor, step: int) -> None:
        self.x, self.step, self.chunks = x.detach(), step, x.split(step, 2)

    def around(self, keys: slice) -> slice:
        """The fewest chunks that hold these keys."""
        return slice(keys.start // self.step * self.step, min(-(-keys.stop // self.step) * self.step, self.x.shape[2]))

    def __getitem__(self, keys: slice) -> Tensor:
        chunks = self.chunks[keys.start // self.step : -(-keys.stop // self.step)]
        return torch.cat(chunks, 2) if torch.compiler.is_compiling() else _Slice.apply(self.x, keys, *chunks)


class _Slice(torch.autograd.Function):
    """`x[:, :, keys]`, which is the chunks one after the other; the gradient goes to them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: slice, *chunks: Tensor) -> Tensor:
        ctx.sizes = [chunk.shape[2] for chunk in chunks]
        return x[:, :, keys]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grads[0].split(ctx.sizes, 2)
