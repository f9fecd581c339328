"""Slots: what may change in a layer with RoPE without changing its scores.

A pair of key channels is a complex number that turns by e^{iθΔ}. Numbers of one frequency may be mixed over key heads
by any complex matrix, which commutes with the turning, if queries take the inverse. The slots found here are the
principal components of each frequency's numbers over the key heads: weighed by how much queries feel each head, or
plain, with complex or real matrices. Folded, numbers of neighbouring frequencies are mixed too, as if they turned
alike; that is exact only for what does not go on turning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQAProject
from manyheads.convert.methods import Slots
from manyheads.convert.moves.common import linear_rows
from manyheads.convert.stats import AttentionStats, Pairs
from manyheads.core.part import OptionError
from manyheads.stack.seam import SeamAttention


@dataclass(frozen=True)
class Gauge:
    """Slots of each frequency: k_g = Σ_s mix[p, g, s] slot_s and slot = inverse[p] k, complex `[P, G, G]`.

    damage: `[P, G]`, what it costs to stop a slot from turning. mean: `[G, P]`, complex m of the content keys: the mean
    of their rotation, and the factor that the position puts on their scores. With f frequencies folded, f·G numbers
    (frequency first) make f·G slots: mix is `[P/f, f·G, f·G]`, damage `[P/f, f·G]`.
    """

    mix: Tensor
    inverse: Tensor
    damage: Tensor
    mean: Tensor

    @property
    def fold(self) -> int:
        """How many frequencies share their slots."""
        return self.mix.shape[1] // len(self.mean)


def gauge(
    attention: SeamAttention,
    stats: AttentionStats,
    heads: slice = slice(None),
    slots: Slots = "fitted",
    fold: int = 1,
    moment: Tensor | None = None,
) -> Gauge:
    """The slots of a layer's key heads, or of some of them.

    moment: of the inputs; by default weighed by what queries feel for fitted slots, plain for others.
    """
    project, layout, pairs = cast(GQAProject, attention.project), attention.layout, Pairs.of(attention)
    turning = int((pairs.index >= 0).sum())
    if turning % fold or len(pairs.re) % fold:
        fits = [f for f in range(1, turning + 1) if turning % f == 0 == len(pairs.re) % f]
        raise OptionError(f"{turning} frequencies do not fold by {fold}; fold may be {fits}")
    each = layout.q // layout.kv
    k = pairs.join(linear_rows(project.k_proj).view(layout.kv, layout.qk_width, -1)[heads])
    diagonal = stats.query.double().diagonal(dim1=1, dim2=2)
    felt = (diagonal[:, pairs.re] + diagonal[:, pairs.im]).view(layout.kv, each, -1)[heads]  # [G, H/G, P]
    group = felt.sum(1) + 1e-3 * felt.mean()
    root = group.sqrt() if slots == "fitted" and felt.any() else torch.ones_like(group)
    root = _folded(root, fold)  # [P, G]
    rows = _folded(k, fold)
    if moment is None:
        moment = stats.keys if slots == "fitted" else stats.plain
    spread = torch.einsum("pgd,de,phe->pgh", rows, moment.to(k.dtype), rows.conj())
    values, vectors = _principal(root[:, :, None] * spread * root[:, None, :], slots)
    distances = torch.arange(stats.distance.shape[1], dtype=torch.float64, device=pairs.theta.device)
    angle = distances[:, None] * pairs.theta
    turn = torch.polar(torch.ones_like(angle), -angle)
    mean = (stats.distance.to(turn.dtype) @ turn).view(layout.kv, each, -1)[heads]
    turns = torch.where(pairs.index < 0, 0.0, pairs.gain**2)
    lost = _folded((felt * (1 - mean.abs() ** 2)).sum(1) * turns, fold)
    damage = torch.einsum("pgs,pg,ps->ps", vectors.abs() ** 2, lost / root**2, values)
    return Gauge(
        vectors / root[:, :, None],
        vectors.conj().transpose(1, 2) * root[:, None, :],
        damage,
        pairs.gain * (mean * felt).sum(1) / felt.sum(1).clamp_min(1e-30),
    )


def _folded(x: Tensor, fold: int) -> Tensor:
    """`[G, P, …]` to `[P/f, f·G, …]`, frequency first."""
    return x.transpose(0, 1).unflatten(0, (-1, fold)).flatten(1, 2)


def _principal(spread: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Sizes and directions, largest first; heads by themselves are no directions to look for."""
    if slots == "heads":
        one = torch.eye(spread.shape[1], dtype=spread.dtype, device=spread.device)
        return spread.diagonal(dim1=1, dim2=2).real, one.expand_as(spread)
    values, vectors = torch.linalg.eigh(spread.real if slots == "rorope" else spread)
    return values.flip(-1), vectors.flip(-1).to(spread.dtype)
