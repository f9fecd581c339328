"""Compressed convolutional attention: the whole of attention in a narrow space."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.convolution import Depthwise, Headwise, lag_state, lagged
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class CCA(Part):
    """Queries, keys and values are projected to narrow heads and never back up; convolutions give back expressiveness.

    H query heads and K key heads of width d, H·d = D/C₁, K·d = D/C₂; K < H is CCGQA. q⁰ = x W_q, k⁰ = x W_k.
    1. z = [q⁰ ; k⁰] `[B, H+K, T, d]` goes through two causal convolutions over tokens with nothing between them:
       depthwise, then mixing the channels of each head. Zeros stand in for tokens before the first, once, before both.
    2. The q-k mean is added: (q⁰_h + k⁰_g(h))/2 to query head h, and to a key head the mean of that over its queries.
    3. q ← √d q/‖q‖, k ← τ_g √d k/‖k‖, so that scores are √d τ cos(q, k); then rotation.
    4. v_t = [x_t W_v1 ; x_{t-1} W_v2] on the channels of all heads: half of them see the token before.
    y = concat(o) W_O. Caches 2·K·d numbers a token; for a sequence, the newest z rows and the newest x W_v2.

    Options: kv_heads (default all heads). head_dim d (default D/2H, C₁ = 2; the authors' 8B model has 8 and 2 heads of
    128 in D = 2048, and turns half of the channels: `rope(fraction=0.5)`). taps of the depthwise and the mixing
    convolution. mean, shift: steps 2 and 4. temperature: τ at the start; the public classes have 0, where scores vanish
    until τ moves. Its sign is free.

    Choices: a layer that reads another's rows has no keys of its own and adds q⁰ in step 2. Norms are taken in float32.
    The public docstring delays half of each value head; the code, and this, half of the channels of all heads together.

    Source: Compressed Convolutional Attention 2025, arXiv 2510.04476.
    """

    name: ClassVar[str] = "cca"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2510.04476"
    slot: ClassVar[str | None] = "qk-norm"
    examples: ClassVar = (
        {"kv_heads": 2, "head_dim": 4},
        {"kv_heads": 1, "head_dim": 6, "taps": (3, 1), "mean": False},
        {"head_dim": 4, "taps": (1, 3), "shift": False},
    )

    kv_heads: int | None = None
    head_dim: int | None = None
    taps: tuple[int, ...] = (2, 2)
    mean: bool = True
    shift: bool = True
    temperature: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self"})

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"token keys", "final rows"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.head_dim is None and heads.dim % (2 * heads.q):
            raise OptionError(f"cca: dim={heads.dim} is no multiple of 2·heads={2 * heads.q}; give head_dim")
        width = heads.dim // (2 * heads.q) if self.head_dim is None else self.head_dim
        kv = heads.q if self.kv_heads is None else self.kv_heads
        if width < 1 or kv < 1:
            raise OptionError(f"cca: head_dim={width} and kv_heads={kv} must be positive")
        if len(self.taps) != 2 or min(self.taps) < 1:
            raise OptionError(f"cca: taps={[*self.taps]}; two positive lengths, such as [2, 2]")
        if self.mean and heads.q % kv:
            fits = [n for n in range(1, heads.q + 1) if heads.q % n == 0]
            raise OptionError(f"cca: {heads.q} query heads have no mean with kv_heads={kv}; kv_heads may be {fits}")
        if self.shift and kv * width % 2:
            raise OptionError(f"cca: kv_heads={kv} of head_dim={width} have no half to shift; one of them must be even")
        return Heads(heads.dim, heads.q, kv, width, width, heads.q, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> CCAProject:
        return CCAProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        own, width, (depth, mix) = site.kv_source is None, after.qk_width, self.taps
        kv, convolved = after.kv * width * own, (after.q + after.kv * own) * width
        weights = after.dim * (after.q * width + 2 * kv + after.out * after.out_width)
        filters = convolved * (depth + mix * width)
        state = (depth + mix - 2) * convolved + kv // 2 * self.shift
        pair, cached = 4 * after.q * width, Fraction(2 * kv)
        return Cost(
            weights + filters + 2 * convolved + after.kv * own, cached, state, 2 * (weights + filters), pair,
            windows(after.keep, cached),
        )  # fmt: skip


class CCAProject(Project):
    def __init__(self, options: CCA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads.q, heads.kv, heads.qk_width
        self.taps, self.own, self.turns = options.taps, site.kv_source is None, heads.rotary
        self.mean, self.shift = options.mean, options.shift
        self.lags, convolved = sum(options.taps) - 2, heads.q + heads.kv * self.own
        self.q_proj = nn.Linear(heads.dim, heads.q * self.width, bias=False)
        self.depthwise = Depthwise(options.taps[0], convolved, self.width)
        self.headwise = Headwise(options.taps[1], convolved, self.width)
        self.states = lag_state("cca.qk", convolved, self.width, self.lags)
        if self.own:
            kv, late = heads.kv * self.width, heads.kv * self.width // 2 * self.shift
            self.k_proj = nn.Linear(heads.dim, kv, bias=False)
            self.v_proj = nn.Linear(heads.dim, kv - late, bias=False)
            self.v_shift_proj = nn.Linear(heads.dim, late, bias=False) if late else None
            self.temperature = nn.Parameter(torch.full((heads.kv, 1, 1), options.temperature))
            self.entries = {name: Entry(heads.kv, self.width, name) for name in ("k", "v")}
            self.states |= lag_state("cca.v", 1, late, 1 if late else 0)
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=False)

    def queries(self, flow: Flow) -> Tensor:
        flat = torch.cat([self.q_proj(flow.x), self.k_proj(flow.x)], -1) if self.own else self.q_proj(flow.x)
        z = flat.unflatten(-1, (-1, self.width)).transpose(1, 2)
        lags = lagged(z, flow.q, flow, "cca.qk", self.lags)
        depth, mix = self.taps
        y = self.headwise([self.depthwise(lags[back : back + depth]) for back in range(mix)])
        if self.mean:
            y = y + self._mean(z)
        q, flow.memo["cca.k"] = y[:, : self.heads], y[:, self.heads :]
        flow.memo["queries"] = q  # whose norms still differ: a router may ask
        return self._norm(q)

    def _mean(self, z: Tensor) -> Tensor:
        if not self.own:
            return z
        each = self.heads // self.kv_heads
        q, k = z[:, : self.heads].unflatten(1, (-1, each)), z[:, self.heads :]
        return torch.cat([((q + k[:, :, None]) / 2).flatten(1, 2), (q.mean(2) + k) / 2], 1)

    def _norm(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (F.normalize(wide, dim=-1, eps=torch.finfo(wide.dtype).eps) * self.width**0.5).to(x.dtype)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        k = self._norm(flow.memo.pop("cca.k"))
        v = self.v_proj(flow.source)
        if self.v_shift_proj is not None:
            v = torch.cat([v, lagged(self.v_shift_proj(flow.source)[:, None], flow.new, flow, "cca.v", 1)[1][:, 0]], -1)
        v = v.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        return {"k": k * self.temperature.to(k.dtype), "v": v}
