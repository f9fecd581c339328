"""Recurrences whose every channel fades at its own rate: the selective scan of state spaces, and means by log-weights.

Nothing is divided by what is left of an earlier state, so that any step is as exact as a loop. The steps of a chunk are
in memory together, and backward computes the states of a chunk again from the one before it: memory is linear in the
length, and a chunk's states fit a processor's cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.core.scan import Stream

CHUNK = 32
"""Steps a chunk."""


def selective_scan(
    q: Tensor, k: Tensor, x: Tensor, step: Tensor, rate: Tensor, stream: Stream
) -> tuple[Tensor, Tensor]:
    """S_t = e^{step_t ∘ rate} ∘ S_{t-1} + k_t x_tᵀ, y_t = S_tᵀ q_t, with a step for each channel.

    Args:
        q, k: `[B, T, N]`; x: `[B, T, I]`; step: `[B, T, I]`, not negative.
        rate: `[N, I]`, or `[B, N, I]`, not positive.

    Returns:
        y `[B, T, I]` and the state `[B, N, I]`, both in float32 at least.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    q, k, x, step, rate = (t.to(wide) for t in (q, k, x, step, rate))
    k, x, step = (stream.tokens(t[:, None])[:, 0] for t in (k, x, step))
    state = k.new_zeros(len(k), k.shape[-1], x.shape[-1]) if stream.state is None else stream.state
    same = None if stream.document is None else stream.document[:, 1:] == stream.document[:, :-1]
    if x.shape[1] == 1:
        left = (step * rate).exp()
        left = left if same is None else left * same[..., None]
        state = left * state + k.transpose(1, 2) * x
        return q @ state, state
    # time first: what a step reads and writes lies together
    q, k, x, step = (t.transpose(0, 1).contiguous() for t in (q, k, x, step))
    y, state, _ = _scan(q, k, x, step, rate.contiguous(), state.contiguous(), None if same is None else same.T)
    return y.transpose(0, 1), state


def _left(step: Tensor, rate: Tensor, same: Tensor | None) -> Tensor:
    """What each step leaves of the state, `[c, B, N, I]`."""
    left = (step[:, :, None] * rate).exp_()
    return left if same is None else left.mul_(same[..., None, None])


def _states(left: Tensor, k: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """The state after each step, `[c, B, N, I]`."""
    states = k[..., None] * x[:, :, None]
    for a, s in zip(left.unbind(0), states.unbind(0), strict=True):
        state = torch.addcmul(s, a, state, out=s)
    return states


def _cuts(t: int) -> list[slice]:
    return [slice(first, min(first + CHUNK, t)) for first in range(0, t, CHUNK)]


@torch.library.custom_op("manyheads::selective_scan", mutates_args=())
def _scan(
    q: Tensor, k: Tensor, x: Tensor, step: Tensor, rate: Tensor, state: Tensor, same: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[T, B, I]`, the last state, and the states before each chunk `[n, B, N, I]`."""
    y, before = torch.empty_like(x), []
    for cut in _cuts(len(x)):
        before.append(state)
        left = _left(step[cut], rate, None if same is None else same[cut])
        states = _states(left, k[cut], x[cut], state)
        state = states[-1].clone()
        y[cut] = (q[cut][:, :, None] @ states)[:, :, 0]
    return y, state, torch.stack(before)


@_scan.register_fake
def _(q, k, x, step, rate, state, same):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), torch.empty_like(state), state.new_empty(len(_cuts(len(x))), *state.shape)


@torch.library.custom_op("manyheads::selective_scan_backward", mutates_args=())
def _scan_backward(
    q: Tensor, k: Tensor, x: Tensor, step: Tensor, rate: Tensor, before: Tensor, same: Tensor | None, dy: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dx, dstep, drate = (torch.empty_like(t) for t in (q, k, x, step, rate))
    drate.zero_()
    carried = dstate
    for cut, state in zip(reversed(_cuts(len(x))), before.flip(0).unbind(0), strict=True):
        left = _left(step[cut], rate, None if same is None else same[cut])
        states = _states(left, k[cut], x[cut], state)
        dq[cut] = (states @ dy[cut][..., None])[..., 0]
        grads = q[cut][..., None] * dy[cut][:, :, None]
        later = grads[-1].add_(carried)
        for g, a in zip(reversed(grads[:-1].unbind(0)), reversed(left[1:].unbind(0)), strict=True):
            later = torch.addcmul(g, a, later, out=g)
        carried = left[0] * later
        dk[cut] = (grads @ x[cut][..., None])[..., 0]
        dx[cut] = (k[cut][:, :, None] @ grads)[:, :, 0]
        grads.mul_(left)
        grads[0].mul_(state)
        grads[1:].mul_(states[:-1])  # now of log left
        dstep[cut] = torch.mul(grads, rate, out=states).sum(2)
        drate += grads.mul_(step[cut][:, :, None]).sum(0).sum_to_size(rate.shape)
    return dq, dk, dx, dstep, drate, carried


@_scan_backward.register_fake
def _(q, k, x, step, rate, before, same, dy, dstate):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(t) for t in (q, k, x, step, rate, dstate))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, x, step, rate, _, same = inputs
    ctx.save_for_backward(q, k, x, step, rate, output[2], same)


def _backward(ctx, dy, dstate, dbefore):  # type: ignore[no-untyped-def]
    return *_scan_backward(*ctx.saved_tensors, dy.contiguous(), dstate.contiguous()), None


_scan.register_autograd(_backward, setup_context=_keep)


class Mean(NamedTuple):
    """Values averaged by weights, each channel by itself, and the logarithm of the weights' sum (of nothing: 0, -inf).

    Maxima are taken off before any exponential.
    """

    log: Tensor
    value: Tensor

    @classmethod
    def over(cls, above: Tensor, below: Tensor, top: Tensor) -> Mean:
        """Of weighted values' and weights' sums, e^top times as small as they are."""
        some = below > 0
        below = below.where(some, 1)
        return cls((top + below.log()).where(some, -torch.inf), above / below)

    @classmethod
    def of(cls, k: Tensor, v: Tensor, dim: int) -> Mean:
        """Of values with log-weights k, along a dimension."""
        top = k.detach().amax(dim, keepdim=True).clamp_min(lowest(k.dtype))
        weight = (k - top).exp()
        return cls.over((weight * v).sum(dim), weight.sum(dim), top.squeeze(dim))

    def join(self, other: Mean) -> Mean:
        """Of both, which have no token in common."""
        return Mean.of(torch.stack([self.log, other.log]), torch.stack([self.value, other.value]), 0)


def running_mean(k: Tensor, v: Tensor, stream: Stream) -> tuple[Mean, Tensor]:
    """Σ_{s≤t} e^{k_s} v_s / Σ_{s≤t} e^{k_s} for each channel.

    k: log-weights `[B, G, T, V]`, -inf where there is nothing; v alike. The running maximum is taken off; what is
    carried on are the mean and its logarithm, which need no third number for the maximum.

    Returns:
        the means of `[B, G, T, V]`, and the state `[B, 2, G, V]` (logarithm, value), in float32 at least.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    k, v = stream.tokens(k.to(wide), -torch.inf), stream.tokens(v.to(wide))
    if stream.state is None:
        log, value = torch.full_like(k[:, :, 0], -torch.inf), torch.zeros_like(v[:, :, 0])
    else:
        log, value = stream.state.unbind(1)
    with torch.no_grad():
        top = _running_max(torch.cat([log[:, :, None], k], 2), stream.document).clamp_min(lowest(wide))
        step = top.diff(dim=2)
        if stream.document is not None:
            step = step * (stream.document[:, 1:] == stream.document[:, :-1])[:, None, :, None]
    first, weight = (log - top[:, :, 0]).exp(), (k - top[:, :, 1:]).exp()

    def rows(t: Tensor) -> Tensor:
        return t.transpose(1, 2).flatten(2)

    one = k.new_ones(len(k), k.shape[2], 1)
    x, steps = torch.cat([rows(weight * v), rows(weight)], -1), rows(step).repeat(1, 1, 2)
    state = torch.cat([(first * value).flatten(1), first.flatten(1)], -1)[:, None]
    sums, _ = selective_scan(one, one, x, steps, -one.new_ones(1, x.shape[-1]), stream._replace(state=state))
    above, below = (t.unflatten(-1, (k.shape[1], -1)).transpose(1, 2) for t in sums.chunk(2, -1))
    mean = Mean.over(above, below, top[:, :, 1:])
    return mean, torch.stack([each[:, :, -1] for each in mean], 1)


def lowest(dtype: torch.dtype) -> float:
    """A logarithm below all others, from which others can still be taken."""
    return torch.finfo(dtype).min / 4


def _running_max(x: Tensor, document: Tensor | None) -> Tensor:
    """Over dimension 2 of `[B, G, T, V]`, anew for each document."""
    if document is None:
        return x.cummax(2).values
    shift = 1
    while shift < x.shape[2]:
        same = (document[:, shift:] == document[:, :-shift])[:, None, :, None]
        x = torch.cat([x[:, :, :shift], x[:, :, shift:].maximum(x[:, :, :-shift].where(same, x[:, :, shift:]))], 2)
        shift *= 2
    return x
