"""The hidden attention of layers that read a state in place of keys: the map that would read the same values.

A scan is linear in its values, so that there are weights α with o_t = Σ_{s≤t} α_ts v_s. They are signed and do not add
up to 1. Source: Ali et al. 2024, arXiv 2403.01590. (Their code for one row leaves out the decay at that row itself:
here it is as the equation has it.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.attention.ssm import SelectiveSSM
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.scan import Stream
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Inputs, run
from manyheads.inspect.layers import Layer, attach_all, chosen
from manyheads.inspect.look import CaptureError
from manyheads.inspect.measures.maps import shares

BLOCK = 2**24
"""Numbers of maps by channel that are in memory at once."""


def selective_map(
    q: Tensor, k: Tensor, step: Tensor, rate: Tensor, rows: Sequence[int] | None = None,
    channels: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """α^c_ij = Σ_n C_in B_jn Δ_jc exp(A_nc (P_ic - P_jc)) of j ≤ i, P the running sum of Δ: `[B, c, t, T]`.

    A decay is computed of a difference that is not positive, so that nothing overflows.

    Args:
        q, k: C and B, `[B, T, N]`. step: Δ `[B, T, I]`. rate: A `[N, I]`, negative. rows, channels: some; default all.
    """
    length = q.shape[1]
    some = list(range(length) if rows is None else rows)
    picked = list(range(step.shape[2]) if channels is None else channels)
    step, rate = step[..., picked], rate[:, picked]
    since = step.cumsum(1)
    apart = (since[:, some, None] - since[:, None]).movedim(-1, 1)  # [B, c, t, T]
    later = torch.tensor(some, device=q.device)[:, None] < torch.arange(length, device=q.device)
    apart = apart.masked_fill(later, torch.inf)
    total: Tensor | float = 0.0
    for n in range(rate.shape[0]):
        decay = (rate[n, :, None, None] * apart).exp() if bool((rate[n] < 0).all()) else _kept(rate[n], apart, later)
        total = total + q[:, some][:, None, :, n, None] * k[:, None, None, :, n] * decay
    return torch.as_tensor(total) * step.mT[:, :, None]


def _kept(rate: Tensor, apart: Tensor, later: Tensor) -> Tensor:
    """Where a channel does not fade at all: 0 · ∞ is nothing."""
    return (rate[:, None, None] * apart.masked_fill(later, 0.0)).exp().masked_fill(later, 0.0)


def headwise_map(q: Tensor, k: Tensor, step: Tensor, rate: Tensor) -> Tensor:
    """α_ij = (C_iᵀ B_j) Δ_j exp(A Σ_{j<u≤i} Δ_u) of one rate a head, `[B, H, T, T]`: linear attention that fades.

    q, k `[B, H, T, N]`, step `[B, H, T]`, rate `[H]`.
    """
    since = step.cumsum(-1)
    apart = since[..., :, None] - since[..., None, :]
    later = torch.ones(apart.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    decay = (rate[:, None, None] * apart.masked_fill(later, 0.0)).exp().masked_fill(later, 0.0)
    return (q @ k.mT) * decay * step[..., None, :]


def both_ways(forward: Tensor, backward: Tensor) -> Tensor:
    """The map of a scan each way: that of the reversed text is turned back in both axes."""
    return forward + backward.flip(-1, -2)


@dataclass(frozen=True, eq=False)
class Hidden:
    """One layer's maps. weights `[B, H, t, T]`: of each head, signed; of a selective state space the mean over the
    channels of a head. view, alike: |α| from 0, its lowest, to 1, its highest, of each channel, and then the mean,
    which `rollout` reads. rows: which queries. channels `[B, C, t, T]`: of the channels that were asked for."""

    layer: int
    weights: Tensor
    view: Tensor
    rows: tuple[int, ...]
    channels: Tensor | None = None

    @property
    def sums(self) -> Tensor:
        """Σ_s α_ts `[B, H, t]`, which a viewer shows beside a row."""
        return self.weights.sum(-1)

    @property
    def shares(self) -> Tensor:
        """|α| / Σ|α|, which has an entropy, a distance and a sink as weights have them."""
        return shares(self.weights)


def hidden_attention(
    model: nn.Module, inputs: Inputs, layers: int | Iterable[int] | None = None, *, rows: Sequence[int] | None = None,
    channels: Sequence[int] | None = None, full: bool = False,
) -> dict[int, Hidden]:  # fmt: skip
    """The maps of a model's scans, by layer; layers with keys are left out (`capture` has theirs).

    A scan with keys is read by unit values, so that its weights are what it does, decay, normaliser and skip included.
    A selective state space is read by its equation (`selective_map`), without the skip δ, the convolution and the gate;
    its values are u = silu(conv(x W_u)). Each map is checked against what the scan returned.

    Args:
        rows: queries; default all. channels: of selective state spaces, to have their own maps. full: from inputs of
            the convolution to gated outputs, diag(gate) (α + diag δ) conv, of `channels` too; the nonlinearity of the
            convolution counts as the factor σ that it was, and its bias is in no map.

    Raises:
        CaptureError: a scan whose values do not enter linearly, or a mixture of state spaces.
        ValueError: no layer with a scan among those asked for.
    """
    some = [layer for layer in chosen(model, layers) if layer.none]
    if not some:
        raise ValueError("no layer asked for reads a state in place of keys; capture shows the weights of others")
    found: dict[int, Hidden] = {}

    def make(layer: Layer) -> Tap:
        return _Reader(layer, found, rows, channels, full)

    detach = attach_all(some, make)
    try:
        with torch.no_grad():
            run(model, inputs)
    finally:
        detach()
    return {layer.number: found[layer.number] for layer in some}


class _Reader(Tap):
    def __init__(
        self,
        layer: Layer,
        found: dict[int, Hidden],
        rows: Sequence[int] | None,
        channels: Sequence[int] | None,
        full: bool,
    ) -> None:
        self.layer, self.found, self.rows, self.channels, self.full = layer, found, rows, channels, full

    def see(self, call: Call, read: Tensor, out: Tensor, flow: Flow | None, unlike: str | None = None) -> None:
        attention = self.layer.module
        assert isinstance(attention, Attention) and flow is not None
        if flow.state:
            raise CaptureError(f"{self.layer.name}: a map goes back to the first token; pass the text whole")
        length = read.shape[2]
        rows = [row % length for row in (range(length) if self.rows is None else self.rows)]
        ssm = getattr(attention.project, "ssm", None)
        with torch.no_grad():
            if isinstance(ssm, SelectiveSSM):
                self.found[self.layer.number] = self._selective(ssm, call, read, out, flow, rows)
            else:
                self.found[self.layer.number] = self._by_units(attention, call, read, flow, rows)

    def _by_units(self, attention: Attention, call: Call, read: Tensor, flow: Flow, rows: list[int]) -> Hidden:
        scan, (batch, groups, keys, width) = attention.scan, call.v.shape
        assert scan is not None
        many = attention.layout.values
        each, columns = width // many, []
        for first in range(0, keys, each):
            unit = call.v.new_zeros(keys, each)
            cut = range(first, min(first + each, keys))
            unit[list(cut), list(range(len(cut)))] = 1
            v = unit.repeat(1, many).expand(batch, groups, keys, width)
            aside = replace(flow, new_state={}, memo=dict(flow.memo))
            o = scan.scan(call.q * call.scale, call.k, v, aside)
            columns.append(o.unflatten(-1, (many, each))[..., : len(cut)])
        weights = torch.cat(columns, -1).transpose(2, 3).flatten(1, 2)  # [B, H · values, T, S]
        values = call.v.unflatten(-1, (many, each)).transpose(2, 3)
        values = values.repeat_interleave(read.shape[1] // groups, 1).flatten(1, 2)
        want = read.unflatten(-1, (many, each)).transpose(2, 3).flatten(1, 2)
        self._check(weights @ values, want)
        some = weights[:, :, rows]
        return Hidden(self.layer.number, some, minmax(some.abs(), (-1, -2)), (*rows,))

    def _check(self, got: Tensor, want: Tensor) -> None:
        if not torch.allclose(got, want, atol=1e-3 * float(want.abs().amax()) + 1e-6, rtol=1e-3):
            raise CaptureError(f"{self.layer.name}: what its scan returns is no weighted sum of values of each head")

    def _selective(
        self, ssm: SelectiveSSM, call: Call, read: Tensor, out: Tensor, flow: Flow, rows: list[int]
    ) -> Hidden:
        if ssm.experts > 1:
            raise CaptureError(f"{self.layer.name}: a mixture of {ssm.experts} state spaces has no one map")
        inner = call.q.transpose(1, 2).flatten(2)
        before, u = _convolved(ssm, inner, flow)
        q, k, step = ssm._parts(u @ ssm.from_inner[0], ssm.dt_bias)
        valid = Stream.of(replace(flow, new_state={}), ssm.name)
        if valid.document is not None:
            raise CaptureError(f"{self.layer.name}: several documents in a sequence have several maps")
        step = valid.tokens(step[:, None])[:, 0]
        rate = ssm._rate(step)
        if self.full and flow.q.valid is not None:
            raise CaptureError(f"{self.layer.name}: a convolution goes past padding; pass a text without it")
        count, heads = inner.shape[2], self.layer.heads
        width, total = count // heads, []
        gate = out.transpose(1, 2).flatten(2) / _away(read.transpose(1, 2).flatten(2)) if self.full else None
        block = max(1, BLOCK // max(1, len(inner) * len(rows) * inner.shape[1]))
        for head in range(heads):
            own = range(head * width, (head + 1) * width)
            summed = torch.zeros(2, len(inner), len(rows), inner.shape[1], dtype=step.dtype, device=step.device)
            for at in range(own.start, own.stop, block):
                cut = list(range(at, min(at + block, own.stop)))
                alpha = self._map(ssm, q, k, step, rate, rows, cut, before, u, inner, gate)
                summed += torch.stack([alpha.sum(1), minmax(alpha.abs(), (-1, -2)).sum(1)])
            total.append(summed / width)
        last = selective_map(q, k, step, rate, [inner.shape[1] - 1])
        want = read.transpose(1, 2).flatten(2)[:, -1] - ssm.skip * u[:, -1]
        self._check(torch.einsum("bcts,bsc->btc", last, u.to(last.dtype))[:, 0], want.to(last.dtype))
        picked = self.channels
        own_maps = (
            None if picked is None else self._map(ssm, q, k, step, rate, rows, list(picked), before, u, inner, gate)
        )
        weights, view = torch.stack(total, 2)
        return Hidden(self.layer.number, weights, view, (*rows,), own_maps)

    def _map(
        self, ssm: SelectiveSSM, q: Tensor, k: Tensor, step: Tensor, rate: Tensor, rows: list[int], cut: list[int],
        before: Tensor, u: Tensor, inner: Tensor, gate: Tensor | None,
    ) -> Tensor:  # fmt: skip
        alpha = selective_map(q, k, step, rate, rows, cut)
        if gate is None:
            return alpha
        at = torch.tensor(rows, device=alpha.device)
        skip = F.one_hot(at, alpha.shape[-1]).to(alpha)[None, None] * ssm.skip[cut, None, None]
        sigma = torch.sigmoid(before)[..., cut].mT[:, :, None]  # silu(a) = σ(a) a
        wide, banded = (alpha + skip) * sigma, torch.zeros_like(alpha)
        for lag, tap in enumerate(ssm.conv.weight[:, 0, 0, cut]):
            moved = wide * tap[:, None, None]
            banded[..., : alpha.shape[-1] - lag] += moved[..., lag:]
        return banded * gate[:, rows][..., cut].mT[..., None]


def _away(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


def _convolved(ssm: SelectiveSSM, inner: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
    """The convolution's output and u = silu of it, `[B, T, I]`."""
    seen: list[Any] = []
    hook = ssm.conv.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        ssm(inner, replace(flow, new_state={}, memo=dict(flow.memo)))
    finally:
        hook.remove()
    before = seen[0][:, 0]
    return before, F.silu(before)


def rollout(maps: Mapping[int, Tensor] | Sequence[Tensor], factors: Sequence[Tensor] | None = None) -> Tensor:
    """R = Π_l (α_l + I), rows made to add up to 1, `[B, T, T]`: the last layer's rows by the first one's tokens.

    Of maps `[B, T, T]` or `[B, H, T, T]` (the mean over heads), first layer first: weights, or `Hidden.view`; of signed
    ones |α|. factors `[B, T]`, one a layer: rows count by them (see `attributions`).
    """
    each = list(maps.values()) if isinstance(maps, Mapping) else list(maps)
    if not each or any(one.shape[-1] != one.shape[-2] for one in each):
        raise ValueError("rollout is of square maps, one a layer at least")
    whole: Tensor | None = None
    for at, one in enumerate(each):
        alpha = one.abs().mean(1) if one.ndim == 4 else one.abs()
        alpha = alpha if factors is None else alpha * factors[at][:, :, None]
        alpha = alpha + torch.eye(alpha.shape[-1], dtype=alpha.dtype, device=alpha.device)
        alpha = alpha / alpha.sum(-1, keepdim=True)
        whole = alpha if whole is None else alpha @ whole
    assert whole is not None
    return whole


def minmax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Scaled to 0 … 1 over some dimensions; all zero where everything is equal."""
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    return (x - low) / torch.where(high > low, high - low, torch.ones_like(high))


def attributions(model: nn.Module, inputs: Inputs, output: int, query: int = -1) -> list[Tensor]:
    """Factors for `rollout`: minmax over tokens of max_c relu(∂logit / ∂o) of each scan's outputs, `[B, T]` a layer."""
    some = [layer for layer in chosen(model, None) if layer.none]
    outs: dict[int, Tensor] = {}

    class Keep(Tap):
        def __init__(self, number: int) -> None:
            self.number = number

        def out(self, o: Tensor, flow: Flow | None) -> Tensor:
            outs[self.number] = o if o.requires_grad else o.requires_grad_()
            return o

    detach = attach_all(some, lambda layer: Keep(layer.number))
    try:
        with torch.enable_grad():
            found = run(model, inputs)
            logit = getattr(found, "logits", found)[:, query, output].sum()
            grads = torch.autograd.grad(logit, [outs[layer.number] for layer in some])
    finally:
        detach()
    return [minmax(grad.relu().amax((1, 3)), (-1,)) for grad in grads]


__all__ = [
    "Hidden", "attributions", "both_ways", "headwise_map", "hidden_attention", "minmax", "rollout", "selective_map",
]  # fmt: skip
