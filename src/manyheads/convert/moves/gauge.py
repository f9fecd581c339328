"""Slots: what may change in a layer with RoPE without changing its scores.

A pair of key channels is a complex number that turns by e^{iθΔ}. Numbers of one frequency may be mixed over key heads
by any complex matrix, which commutes with the turning, if queries take the inverse. The slots found here are the
principal components of each frequency's numbers over the key heads, weighed by how much queries feel each head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.moves.common import linear_rows
from manyheads.convert.stats import AttentionStats, Pairs
from manyheads.stack.seam import SeamAttention


@dataclass(frozen=True)
class Gauge:
    """Slots of each frequency: k_g = Σ_s mix[p, g, s] slot_s and slot = inverse[p] k, complex `[P, G, G]`.

    damage: `[P, G]`, what it costs to stop a slot from turning. mean: `[G, P]`, complex m of the content keys: the mean
    of their rotation, and the factor that the position puts on their scores.
    """

    mix: Tensor
    inverse: Tensor
    damage: Tensor
    mean: Tensor


def gauge(attention: SeamAttention, stats: AttentionStats, heads: slice = slice(None)) -> Gauge:
    """The slots of a layer's key heads, or of some of them."""
    project, layout, pairs = cast(GQAProject, attention.project), attention.layout, Pairs.of(attention)
    each = layout.q // layout.kv
    k = pairs.join(linear_rows(project.k_proj).view(layout.kv, layout.qk_width, -1)[heads])
    moment = stats.keys.to(k.dtype)
    spread = torch.einsum("gpd,de,hpe->pgh", k, moment, k.conj())
    diagonal = stats.query.double().diagonal(dim1=1, dim2=2)
    felt = (diagonal[:, pairs.re] + diagonal[:, pairs.im]).view(layout.kv, each, -1)[heads]  # [G, H/G, P]
    group = felt.sum(1) + 1e-3 * felt.mean()
    root = group.T.sqrt()  # [P, G]
    values, vectors = torch.linalg.eigh(root[:, :, None] * spread * root[:, None, :])
    values, vectors = values.flip(-1), vectors.flip(-1)
    angle = torch.arange(stats.distance.shape[1], dtype=torch.float64)[:, None] * pairs.theta
    turn = torch.polar(torch.ones_like(angle), -angle)
    mean = (stats.distance.to(turn.dtype) @ turn).view(layout.kv, each, -1)[heads]
    turns = torch.where(pairs.index < 0, 0.0, pairs.gain**2)
    lost = (felt * (1 - mean.abs() ** 2)).sum(1) / group * turns
    damage = torch.einsum("pgs,gp,ps->ps", vectors.abs() ** 2, lost, values)
    return Gauge(
        vectors / root[:, :, None],
        vectors.conj().transpose(1, 2) * root[:, None, :],
        damage,
        pairs.gain * (mean * felt).sum(1) / felt.sum(1).clamp_min(1e-30),
    )
