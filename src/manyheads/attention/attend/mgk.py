"""A mixture of Gaussian keys: several keys for each token, whose kernels add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Piece, Program, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MGK(Part):
    """w_ij = Σ_r π_r exp(-c_r ‖q_i - k_rj‖²), a_ij = w_ij / Σ_l w_il over visible keys, o_i = Σ_j a_ij v_j, r < M.

    The exponent is the product of [q, 1, ‖q‖²] and [2 c_r k_r, log π_r - c_r ‖k_r‖², -c_r], so each r is a fused
    attention problem over the same values, and log-sum-exp joins them exactly. Half as many heads do what heads of one
    key do, the authors find.

    Options: precisions, c_r over the layer's score scale (1/√d unless the projection says otherwise); as many as keys.
    learned: train log c_r. keys: `own`, M projections of x; `shifted`, one projection and a shift that each key head
    learns, k_r = k - μ_r, μ_0 = 0 and the others N(0, 0.5) at the start, with nothing more to cache. assign: `soft`, as
    above; `hard`, the nearest component alone, exp(max_r -c_r ‖q - k_r‖²) without π, on the explicit path. positions:
    π for each of so many key positions, later ones taking the last; 0 is one π for all.

    Choices: π = σ(a), 1/M at the start and not normalised, is of the key head and component; in the authors' code it is
    of the position too, where it ends with the table, and clamped to [0, 1], where it stops learning at the ends. Their
    precisions are fixed. RoPE turns each k_r, so the shifts too. The sum stays in the exponent, since exponentials of
    large distances all vanish.

    Source: Nguyen et al. 2022, arXiv 2110.08678. Not here: its EM updates of π and its linear-attention form.
    """

    name: ClassVar[str] = "mgk"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2110.08678"
    slot: ClassVar[str | None] = "scores"
    examples: ClassVar = ({}, {"keys": "shifted", "positions": 6}, {"assign": "hard", "learned": True})

    precisions: tuple[float, ...] = (0.5, 1.5)
    learned: bool = False
    keys: Literal["own", "shifted"] = "own"
    assign: Literal["soft", "hard"] = "soft"
    positions: int = 0

    @property
    def sums(self) -> bool:
        """Whether components add up, so that π counts and their problems are joined."""
        return self.assign == "soft" and len(self.precisions) > 1

    @property
    def needs(self) -> frozenset[str]:
        keys = "several keys" if self.keys == "own" else "head keys"
        return frozenset({keys, "one map", "one rotation", "plain scores"} | ({"softmax"} if self.sums else set()))

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"plain scores"} | ({"one map"} if self.sums else set()))

    @property
    def hint(self) -> dict[str, str]:
        return {"several keys": "mgk(keys=shifted)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if not self.precisions or min(self.precisions) <= 0:
            raise OptionError(f"mgk: precisions={[*self.precisions]}; one positive number or more")
        if self.positions < 0 or (self.positions and not self.sums):
            raise OptionError(f"mgk: positions={self.positions}; 0, or more where several components are summed")
        return heads._replace(keys=len(self.precisions)) if self.keys == "own" else heads

    def build(self, before: Heads, after: Heads, site: Site) -> Mixture:
        return HardMixture(self, before) if self.assign == "hard" else Mixture(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        m, kv, width = len(self.precisions), before.kv, before.qk_width
        shift, prior = m * kv * width * (self.keys == "shifted"), m * kv * max(1, self.positions) * self.sums
        products = (m - 1) * (width + before.v_width * self.sums) + 2 * m
        return Cost(shift + prior + m * self.learned, pair_flops=2 * before.q * products)


class Mixture(Piece):
    def __init__(self, options: MGK, heads: Heads) -> None:
        super().__init__()
        self.precisions = options.precisions
        m, shifts = len(options.precisions), options.keys == "shifted"
        self.log_precision = nn.Parameter(torch.tensor(options.precisions).log()) if options.learned else None
        self.shift = nn.Parameter(0.5 * torch.randn(m, heads.kv, 1, heads.qk_width)) if shifts else None
        if self.shift is not None:
            nn.init.zeros_(self.shift[0])
        places = (m, heads.kv, max(1, options.positions))
        self.prior = nn.Parameter(torch.full(places, -math.log(m - 1))) if options.sums else None

    def split(self, call: Call, flow: Flow) -> list[Call]:
        if flow.few and self.shift is None and self.prior is not None:  # else a level of each head would reach others
            return self._where_they_are(call)
        q, keys = self.components(call, flow)
        return [replace(call, q=q, k=k, scale=1.0) for k in keys.unbind(1)]

    def _where_they_are(self, call: Call) -> list[Call]:
        """Few queries: keys stay as they are cached, and what does not depend on both sides is their level."""
        keys, wide = call.k.unflatten(1, (len(self.precisions), -1)), torch.promote_types(call.q.dtype, torch.float32)
        each, c = call.q.shape[1] // keys.shape[2], self._precision(call)
        own = torch.linalg.vector_norm(call.q, dim=-1, keepdim=True, dtype=wide).square()

        def component(k: Tensor, c: Tensor, prior: Tensor) -> Call:
            norm = torch.linalg.vector_norm(k, dim=-1, dtype=wide).square()
            of_keys = (prior - c * norm).repeat_interleave(each, 1)[:, :, None]

            def level(rows: slice, at: slice) -> Tensor:
                return (of_keys[..., at] - c * own[:, :, rows]).to(k.dtype)

            return replace(call, k=k, scale=1.0, q=(2 * c * call.q).to(k.dtype), level=level)

        priors = self._prior(call.mask.k, wide)
        return [component(*each) for each in zip(keys.unbind(1), c, priors.unbind(1), strict=True)]

    def _precision(self, call: Call) -> Tensor:
        """c `[M]`."""
        c = call.q.new_tensor(self.precisions) if self.log_precision is None else self.log_precision.exp()
        return c * call.scale

    def _prior(self, axis: Axis, wide: torch.dtype) -> Tensor:
        """log π `[B or 1, M, G, S]`."""
        assert self.prior is not None
        place = axis.position.clamp(0, self.prior.shape[-1] - 1)
        return F.logsigmoid(self.prior[..., place].to(wide)).permute(2, 0, 1, 3)

    def components(self, call: Call, flow: Flow) -> tuple[Tensor, Tensor]:
        """[q, 1, ‖q‖²] `[B, H, T, E + 2]` and [2 c k, log π - c ‖k‖², -c] `[B, M, G, S, E + 2]`."""
        q, axis, m = call.q, call.mask.k, len(self.precisions)
        wide = torch.promote_types(q.dtype, torch.float32)
        c = self._precision(call)[:, None, None, None]
        if self.shift is None:
            k = call.k.unflatten(1, (m, -1))
        else:
            shifts = self.shift.flatten(0, 1).expand(len(call.k), -1, axis.length, -1)
            k = call.k[:, None] - flow.turn(shifts, "k", axis).unflatten(1, (m, -1))
        level = -c * k.to(wide).pow(2).sum(-1, keepdim=True)
        if self.prior is not None:
            level = level + self._prior(axis, wide)[..., None]
        norm = q.to(wide).pow(2).sum(-1, keepdim=True)
        sides = ((q, torch.ones_like(norm), norm), (2 * c * k, level, (-c).expand_as(level)))
        q, k = (torch.cat([channels.to(q.dtype) for channels in side], -1) for side in sides)
        return q, k


class HardMixture(Mixture, Program):
    """The components of a key side by side, for one problem whose scores are their maximum."""

    def split(self, call: Call, flow: Flow) -> list[Call]:
        q, keys = self.components(call, flow)
        return [replace(call, q=q, k=keys.permute(0, 2, 3, 1, 4).flatten(3), scale=1.0)]

    def scores(self, q: Tensor, k: Tensor, scale: float, flow: Flow) -> Tensor:
        rows, each = (
            q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) * scale,
            k.unflatten(-1, (-1, q.shape[-1])).unbind(-2),
        )
        best = torch.stack([rows @ component.transpose(-1, -2) for component in each]).amax(0)
        return best.unflatten(2, (-1, q.shape[2])).flatten(1, 2)
