"""Recurrent heads with a decay for each token and no step (discrete Mamba-2): what parts that have some share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.convolution import Depthwise, lag_state, lagged
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import OptionError
from manyheads.core.scan import Stream, decayed_sum, fading


class DiscreteHeads(nn.Module):
    """Heads n of x `[B, T, D]`, each with a state S `[N, d]` of its own:

        S_t = α_t S_{t-1} + B_t v_tᵀ,  o_t = (S_tᵀ C_t + δ v_t) ∘ silu(z_t + b_z),  α_t = sigmoid(-a_t).

    C, B `[N]`, v, z `[d]` and the number a are linear in x, by one projection. C, B and v pass a causal convolution of
    each channel, without an activation. α = e^{-softplus(a)}, and what enters is not multiplied by a step. At first
    δ = 1, b_z = 0 and the rest is random.

    name: of the state in the cache.
    """

    def __init__(self, name: str, dim: int, heads: int, state: int, width: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.name, self.heads, self.state, self.width, self.lags = name, heads, state, width, taps - 1
        self.in_proj = nn.Linear(dim, heads * (2 * state + 2 * width + 1), bias=bias)
        self.conv = Depthwise(taps, heads, 2 * state + width)
        self.skip = nn.Parameter(torch.ones(heads, 1, 1))
        self.z_bias = nn.Parameter(torch.zeros(heads, 1, width))
        self.states = lag_state(f"{name}.conv", heads, 2 * state + width, taps - 1)
        self.states |= {name: State((heads, state, width))}

    def rows(self, x: Tensor) -> Tensor:
        """[C; B; v; z; a] of each head before the convolution, `[B, n, T, 2N + 2d + 1]`."""
        return self.in_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, rows: Tensor, flow: Flow) -> Tensor:
        """o `[B, n, T, d]` of `rows`."""
        mixed, z, a = rows.split([2 * self.state + self.width, self.width, 1], -1)
        c, b, v = self._mixed(lagged(mixed, flow.q, flow, f"{self.name}.conv", self.lags))
        decay = self._decay(a)
        o, flow.new_state[self.name] = decayed_sum(c, b, v, decay, Stream.of(flow, self.name))
        return (o + self.skip * v) * F.silu(z + self.z_bias)

    def matrix(self, x: Tensor) -> Tensor:
        """What each head multiplies convolved v with, `[B, n, T, T]`, for whole sequences x without padding.

        M_ts = C_t · B_s α_{s+1} … α_t for s ≤ t, and δ more where s = t.
        """
        mixed, _, a = self.rows(x).split([2 * self.state + self.width, self.width, 1], -1)
        length = x.shape[1]
        padded = F.pad(mixed, (0, 0, self.lags, 0))
        c, b, _ = self._mixed([padded[:, :, self.lags - lag :][:, :, :length] for lag in range(self.lags + 1)])
        scores = (c @ b.mT).to(torch.promote_types(c.dtype, torch.float32))
        one = torch.eye(length, dtype=scores.dtype, device=x.device)
        return scores * fading(self._decay(a)[..., None])[0] + self.skip * one

    def _mixed(self, lags: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        c, b, v = self.conv(lags).split([self.state, self.state, self.width], -1)
        return c, b, v

    def _decay(self, a: Tensor) -> Tensor:
        """log α `[B, n, T]`."""
        return -F.softplus(a[..., 0].to(torch.promote_types(a.dtype, torch.float32)))


def check_discrete(part: str, **least_one: int) -> None:
    """Refuse numbers of which there are no heads."""
    if min(least_one.values()) < 1:
        raise OptionError(f"{part}: {', '.join(f'{name}={value}' for name, value in least_one.items())}; at least 1")


def discrete_cost(dim: int, heads: int, state: int, width: int, taps: int, bias: bool) -> Cost:
    """Of `DiscreteHeads`."""
    rows, mixed = 2 * state + 2 * width + 1, 2 * state + width
    parameters = heads * ((dim + bias) * rows + (taps + 1) * mixed + 1 + width)
    flops = 2 * heads * (dim * rows + taps * mixed + 2 * state * width)
    return Cost(parameters, state_floats=heads * (state * width + (taps - 1) * mixed), token_flops=flops)
