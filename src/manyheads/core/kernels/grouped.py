"""Decode: the queries that share a key head become rows of one matmul, so that the cache is read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import masked_lse, masked_softmax, refuse

NARROW = 10
"""Query rows of a key head up to which the keys are the better left factor (measured on CPU)."""
THIN = 4
"""Rows of weights that cost no more than fewer do against wide values (measured on CPU)."""
SPREAD_BYTES = 4 * 2**20
"""Keys multiplied by a table at a time, few enough to stay in the processor's caches."""


def grouped(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    refuse("grouped", call, program, bias=True)
    scores = _scores(call)
    visible = None
    if call.bias is not None:
        scores = scores + call.bias(slice(None), slice(None))
    if not call.mask.is_full:
        visible = call.mask.tile()
    weights = masked_softmax(scores, visible)
    lse = masked_lse(scores, visible, weights) if need_lse else None
    if dropout:
        weights = F.dropout(weights, dropout)
    return Out(_read(weights, call), lse)


def _scores(call: Call) -> Tensor:
    """`[B, H, T, S]`."""
    (batch, heads, t, _), k, many = call.q.shape, _once(call.k, call.key_rows), call.key_rows
    tables = max(1, len(call.spread))
    rows = heads * many // k.shape[1] * t  # queries that read one row of k
    q = (call.q * call.scale).unflatten(-1, (tables, many, -1)).unflatten(1, (-1, heads * many // k.shape[1]))
    q = q.permute(4, 0, 1, 5, 2, 3, 6).contiguous().view(tables, batch, -1, rows, k.shape[-1])  # tables, B, G·m, …

    def against(k: Tensor, q: Tensor) -> Tensor:
        """`[B, G, rows, S]`."""
        wide = rows > NARROW
        found = _product(q, k.transpose(-1, -2)) if wide else _product(k, q.transpose(-1, -2))
        found = found if many == 1 else found.unflatten(1, (-1, many)).sum(2)
        return found if wide else found.transpose(-1, -2)

    if not call.spread:
        scores = against(k, q[0])
    else:
        pieces = max(1, -(-k.numel() * k.element_size() // SPREAD_BYTES))
        tiles = zip(k.chunk(pieces, 2), *(table.chunk(pieces, 2) for table in call.spread), strict=True)
        each = ([against(k * table, part) for table, part in zip(tables, q, strict=True)] for k, *tables in tiles)
        scores = torch.cat([torch.stack(found).sum(0) for found in each], -1)
    return scores.reshape(batch, heads, t, -1)


def _read(weights: Tensor, call: Call) -> Tensor:
    """Weighted sums `[B, H, T, V]`."""
    (batch, heads, t, s), v, beside = weights.shape, _once(call.v, call.beside), call.beside
    rows = heads * beside // v.shape[1] * t
    weights = weights.reshape(batch, -1, rows, s)
    if rows < THIN and v.shape[-1] > 64:
        weights = F.pad(weights, (0, 0, 0, THIN - rows))
    o = _product(weights.repeat_interleave(beside, 1) if beside > 1 else weights, v)[:, :, :rows]
    if beside > 1:
        o = o.unflatten(1, (-1, beside)).transpose(2, 3).flatten(3)
    return o.reshape(batch, heads, t, -1)


def _once(x: Tensor, rows: int) -> Tensor:
    """Heads that are one head, expanded, as the one."""
    return x[:, :1] if rows == 1 and x.shape[1] > 1 and x.stride(1) == 0 else x


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; `matmul` would copy rows whose sequences and heads it cannot count through in one stride."""
    if all(len(x) == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in (a, b)):
        return a @ b
    return torch.stack([x @ y for x, y in zip(a, b, strict=True)])
