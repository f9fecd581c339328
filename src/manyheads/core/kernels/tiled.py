"""The explicit path: scores in tiles of query rows, so that no [B, H, T, S] tensor exists, not even for the gradient.

This is where score programs run. With more than one tile under autograd, each tile is recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import masked_lse, masked_softmax

TILE_BYTES = 64 * 2**20
"""Upper bound on one tile of scores."""


def tiled(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    batch, heads, t, _ = call.q.shape
    s = call.k.shape[2]
    rows = max(1, min(t, TILE_BYTES // max(1, batch * heads * s * call.q.element_size())))
    each = heads // call.k.shape[1]
    k, v = (x if each == 1 else x.repeat_interleave(each, 1) for x in (call.k, call.v))
    halo = max([0, *(p.halo for p in program)])
    tiles = []
    for first in range(0, t, rows):
        cut = slice(first, min(first + rows, t))
        args = (call, program, k, v, cut, halo, need_lse, dropout)
        if rows < t and torch.is_grad_enabled():
            tiles.append(checkpoint(_tile, *args, use_reentrant=False))
        else:
            tiles.append(_tile(*args))
    o = torch.cat([o for o, _ in tiles], 2)
    return Out(o, torch.cat([lse for _, lse in tiles], 2) if need_lse else None)


def _tile(
    call: Call, program: Sequence[ScoreProgram], k: Tensor, v: Tensor, cut: slice, halo: int, need_lse: bool,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    rows = slice(max(0, cut.start - halo), cut.stop)
    own = slice(cut.start - rows.start, None)
    q = call.q[:, :, rows]
    scores = next((x for p in program if (x := p.scores(q, k, call.scale)) is not None), None)
    if scores is None:
        scores = (q * call.scale) @ k.transpose(-1, -2)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    visible = call.mask.tile(rows)
    for p in program:
        scores = p.before(scores, visible, rows)
    if call.bias is not None:
        scores = scores + call.bias(rows, slice(None))
    weights = next((x for p in program if (x := p.normalise(scores, visible)) is not None), None)
    if weights is None:
        weights = masked_softmax(scores, visible)
    for p in program:
        weights = p.after(weights, visible, rows)
    if dropout:
        weights = F.dropout(weights, dropout)
    lse = masked_lse(scores, visible)[:, :, own] if need_lse else None
    return weights[:, :, own] @ v, lse
