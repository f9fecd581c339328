"""Selective state spaces (Mamba): what parts that run one share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.convolution import Depthwise, lag_state, lagged
from manyheads.attention.steps import first_steps
from manyheads.core.check import check_top
from manyheads.core.cost import Cost
from manyheads.core.dispatch import group
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import OptionError
from manyheads.core.router import Router
from manyheads.core.scan import Stream
from manyheads.core.selective import selective_scan


class SelectiveSSM(nn.Module):
    """From inner channels x W_u `[B, T, I]`: u = silu(conv(x W_u)), and with [d; B; C] = u W, Δ = softplus(d W_Δ + b):

        S_t = e^{Δ_t ∘ A} ∘ S_{t-1} + B_t (Δ_t ∘ u_t)ᵀ `[N, I]`, y_t = S_tᵀ C_t + δ ∘ u_t.

    A = -exp(A_log) `[N, I]`, at first -n in row n. W `[I, R + 2N]` is a mixture of `experts`, weighted by a router's
    gates of the `top` for a token (which sum to one). With `apart` each expert has a state, A, b and δ of its own: it
    takes in a token and speaks only where it is chosen, weighted by its gate. normed: RMS norms of d, B and C.

    name: of its state in the cache, `[N, I]`, or `[E, N, I]` of experts apart.
    """

    def __init__(
        self, name: str, dim: int, inner: int, *, state: int, taps: int, rank: int, experts: int = 1, top: int = 1,
        apart: bool = False, normed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.inner, self.lags, self.widths = name, inner, taps - 1, (rank, state, state)
        self.experts, self.top, self.apart = experts, top, apart and experts > 1
        owners = (experts,) if self.apart else ()
        self.conv = Depthwise(taps, 1, inner)
        bound = inner**-0.5
        self.from_inner = nn.Parameter(torch.empty(experts, inner, sum(self.widths)).uniform_(-bound, bound))
        self.to_step = nn.Parameter(torch.empty(rank, inner).uniform_(-(rank**-0.5), rank**-0.5))
        self.dt_bias = nn.Parameter(first_steps(inner, 0.001, 0.1).repeat(*owners, 1))
        rate = torch.arange(1, state + 1, dtype=torch.float32).log()[:, None]
        self.A_log = nn.Parameter(rate.repeat(*owners, 1, inner))
        self.skip = nn.Parameter(torch.ones(*owners, inner))
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6) for width in self.widths if normed])
        self.router = Router(dim, experts, top) if experts > 1 else None
        self.states = lag_state(f"{name}.conv", 1, inner, taps - 1) | {name: State((*owners, state, inner))}

    def forward(self, inner: Tensor, flow: Flow) -> Tensor:
        """y `[B, T, I]` of inner channels before the convolution."""
        u = F.silu(self.conv(lagged(inner[:, None], flow.q, flow, f"{self.name}.conv", self.lags)))[:, 0]
        gates = self._gates(flow)
        stream = Stream.of(flow, self.name)
        y = self._apart(u, gates, stream, flow) if self.apart else self._mixed(u, gates, stream, flow)
        return y.to(inner.dtype)

    def _gates(self, flow: Flow) -> tuple[Tensor, Tensor] | None:
        """The chosen experts of each token and their gates, `[B, T, k]` each."""
        if self.router is None:
            return None
        routing = self.router(flow.x)
        if flow.training:
            flow.add_loss(f"{self.name}.experts", routing.balance(flow.q.validity) / self.top)
        return routing.chosen, routing.gates("full")

    def _parts(self, rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C, B and Δ from u W."""
        low, k, q = rows.split(self.widths, -1)
        if len(self.norms):
            low, k, q = (norm(each) for norm, each in zip(self.norms, (low, k, q), strict=True))
        wide = torch.promote_types(rows.dtype, torch.float32)
        return q, k, F.softplus((low @ self.to_step).to(wide) + bias)

    def _mixed(self, u: Tensor, gates: tuple[Tensor, Tensor] | None, stream: Stream, flow: Flow) -> Tensor:
        if gates is None:
            rows = u @ self.from_inner[0]
        else:
            chosen, gate = (each.flatten(0, 1) for each in gates)
            groups = group(chosen, self.experts, size=self.from_inner[0].numel())
            rows = groups.sum(u.flatten(0, 1)[:, None], gate, torch.matmul, self.from_inner).unflatten(0, u.shape[:2])
        q, k, step = self._parts(rows, self.dt_bias)
        y, flow.new_state[self.name] = selective_scan(q, k, step * u, step, self._rate(step), stream)
        return y + self.skip * u

    def _apart(self, u: Tensor, gates: tuple[Tensor, Tensor] | None, stream: Stream, flow: Flow) -> Tensor:
        assert gates is not None
        batch, each = len(u), self.experts
        gate = u.new_zeros(*u.shape[:2], each).scatter(-1, gates[0], gates[1].to(u.dtype)).transpose(1, 2)[..., None]
        rows = torch.einsum("bti,eif->betf", u, self.from_inner)
        q, k, step = self._parts(rows, self.dt_bias[:, None])
        step = step * (gate > 0)
        rate, x = self._rate(step).repeat(batch, 1, 1), step * u[:, None]
        q, k, x, step = (t.flatten(0, 1) for t in (q, k, x, step))
        y, state = selective_scan(q, k, x, step, rate, self._each(stream, batch))
        flow.new_state[self.name] = state.unflatten(0, (batch, each))
        return (gate * (y.unflatten(0, (batch, each)) + self.skip[:, None] * u[:, None])).sum(1)

    def _rate(self, step: Tensor) -> Tensor:
        return -self.A_log.to(step.dtype).exp()

    def _each(self, stream: Stream, batch: int) -> Stream:
        """The stream of every expert, the experts of a sequence side by side in the batch."""

        def repeat(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.expand(batch, -1).repeat_interleave(self.experts, 0)

        state = None if stream.state is None else stream.state.flatten(0, 1)
        return Stream(state, repeat(stream.valid), repeat(stream.document))


def check_ssm(part: str, state: int, taps: int, rank: int, experts: int = 1, top: int = 1) -> None:
    """Refuse numbers of which there is no state space."""
    if min(state, taps, rank) < 1:
        raise OptionError(f"{part}: state={state}, taps={taps}, dt_rank={rank}; at least 1")
    check_top(top, experts)


def ssm_cost(
    dim: int, inner: int, state: int, taps: int, rank: int, experts: int = 1, top: int = 1, *, apart: bool = False,
    normed: bool = False,
) -> Cost:  # fmt: skip
    """Of a `SelectiveSSM`, without the maps to and from its inner channels."""
    owners, columns, routed = experts if apart else 1, rank + 2 * state, dim * experts if experts > 1 else 0
    parameters = inner * (taps + 1 + experts * columns + rank + owners * (state + 2)) + routed + columns * normed
    served = experts if apart else top
    flops = 2 * inner * (taps + served * columns + owners * (rank + 3 * state)) + 2 * routed
    return Cost(parameters, state_floats=inner * (taps - 1 + owners * state), token_flops=flops)
