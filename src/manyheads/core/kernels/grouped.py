"""Decode: the queries that share a key head become rows of one matmul, so that the cache is read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import masked_lse, masked_softmax, refuse

NARROW = 10
"""Query rows of a key head up to which the keys are the better left factor (measured on CPU)."""
THIN = 4
"""Rows of weights that cost no more than fewer do against wide values (measured on CPU)."""


def grouped(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    refuse("grouped", call, program, bias=True)
    batch, heads, t, width = call.q.shape
    groups, s = call.k.shape[1:3]
    each = heads // groups
    q = (call.q * call.scale).reshape(batch, groups, each * t, width)
    if each * t <= NARROW:
        scores = (call.k @ q.transpose(-1, -2)).transpose(-1, -2).contiguous()
    else:
        scores = q @ call.k.transpose(-1, -2)
    visible = None
    if call.bias is not None or not call.mask.is_full:
        scores = scores.view(batch, heads, t, s)
        if call.bias is not None:
            scores = scores + call.bias(slice(None), slice(None))
        if not call.mask.is_full:
            visible = call.mask.tile()
    lse = masked_lse(scores, visible).view(batch, heads, t) if need_lse else None
    weights = masked_softmax(scores, visible)
    if dropout:
        weights = F.dropout(weights, dropout)
    weights = weights.view(batch, groups, each * t, s)
    if each * t < THIN and call.v.shape[-1] > 64:
        weights = F.pad(weights, (0, 0, 0, THIN - each * t))
    o = (weights @ call.v)[:, :, : each * t]
    return Out(o.reshape(batch, heads, t, -1), lse)
