"""The explicit path: scores in tiles of query rows, so that no large [B, H, T, S] tensor exists, nor for the gradient.

This is where score programs run. A tile holds the keys that its rows can reach, half of them on average where a mask is
causal. Where all tiles together are large, each is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import masked_lse, masked_softmax

TILE_BYTES = 64 * 2**20
"""Upper bound on one tile of scores."""
KEPT_BYTES = 4 * TILE_BYTES
"""Scores of a call up to which tiles are kept for the backward pass."""
FEWEST_ROWS = 64
"""Rows of a tile below which a causal call is cut no finer (an eighth of the queries otherwise)."""


def tiled(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    batch, heads, t, _ = call.q.shape
    s = call.k.shape[2]
    maps = heads * max([1, *(p.maps for p in program)])
    row_bytes = max(1, batch * maps * s * call.q.element_size())
    rows = max(1, min(t, TILE_BYTES // row_bytes))
    if call.mask.reach(slice(0, 1)) != slice(0, s):
        rows = min(rows, max(FEWEST_ROWS, -(-t // 8)))
    recompute = t * row_bytes > KEPT_BYTES and rows < t and torch.is_grad_enabled()
    halo = max([0, *(p.halo for p in program)])
    tiles = []
    for first in range(0, t, rows):
        cut = slice(first, min(first + rows, t))
        args = (call, program, cut, halo, need_lse, dropout)
        if recompute:
            tiles.append(checkpoint(_tile, *args, use_reentrant=False))
        else:
            tiles.append(_tile(*args))
    o = torch.cat([o for o, _ in tiles], 2)
    return Out(o, torch.cat([lse for _, lse in tiles], 2) if need_lse else None)


def _tile(
    call: Call, program: Sequence[ScoreProgram], cut: slice, halo: int, need_lse: bool, dropout: float
) -> tuple[Tensor, Tensor | None]:
    maps = maps_of(call, program, cut, halo)
    weights = F.dropout(maps.weights, dropout) if dropout else maps.weights
    lse = masked_lse(maps.scores, maps.visible) if need_lse else None
    near = replace(call, k=call.k[:, :, maps.keys], v=call.v[:, :, maps.keys])
    near = replace(near, mask=replace(call.mask, k=call.mask.k[maps.keys]))
    o = next((x for p in program if (x := p.read(weights, near, cut)) is not None), None)
    return (_each(weights, near.v) if o is None else o), lse


class Maps(NamedTuple):
    """Of a tile of query rows, `[B, H, t, s]` each: scores as the softmax takes them, weights as values are read with,
    and what is visible `[B or 1, H or 1, t, s]`; all of them over the keys of a slice, beyond which nothing is seen."""

    scores: Tensor
    weights: Tensor
    visible: Tensor
    keys: slice


def maps_of(call: Call, program: Sequence[ScoreProgram], cut: slice, halo: int) -> Maps:
    """The maps of query rows `cut`. halo: how many rows before them the program reads."""
    rows = slice(max(0, cut.start - halo), cut.stop)
    own = slice(cut.start - rows.start, None)
    reach = call.mask.reach(cut)
    keys = slice(0, reach.stop) if program else reach  # programs may keep maps from the first key on
    mask = replace(call.mask, k=call.mask.k[keys])
    q, k = call.q[:, :, rows], call.k[:, :, keys]
    scores = next((x for p in program if (x := p.scores(q, k, call.scale)) is not None), None)
    if scores is None:
        scores = _each(q * call.scale, k.transpose(-1, -2))
    if call.level is not None:
        scores = scores + call.level(rows, keys)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    visible = mask.tile(rows)
    for p in program:
        scores = p.before(scores, visible, rows)
    if call.bias is not None:
        scores = scores + call.bias(rows, keys)
    weights = next((x for p in program if (x := p.normalise(scores, visible)) is not None), None)
    if weights is None:
        weights = masked_softmax(scores, visible, sees_some=call.mask.sees_some)
    for p in program:
        weights = p.after(weights, visible, rows)
    return Maps(scores[:, :, own], weights[:, :, own], visible[:, :, own], keys)


def _each(x: Tensor, y: Tensor) -> Tensor:
    """x `[B, H, t, a]` times y `[B, G, a, b]`: the query heads that share a key head are rows of one product."""
    rows = x.unflatten(1, (y.shape[1], -1)).flatten(2, 3)
    return (rows @ y).unflatten(2, (-1, x.shape[2])).flatten(1, 2)
