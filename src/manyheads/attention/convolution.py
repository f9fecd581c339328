"""Causal convolutions over the tokens of a sequence, whose newest inputs are kept from pass to pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis


def lagged(x: Tensor, axis: Axis, flow: Flow, name: str, lags: int) -> list[Tensor]:
    """x_t, x_{t-1}, …, x_{t-lags}, each `[B, heads, T, width]`; zero where a token's document has no such token.

    Padding is no token: a lag goes past it. The newest `lags` tokens are kept in the state `name`, which the piece that
    calls this declares with `lag_state`.
    """
    if not lags:
        return [x]
    length, past = x.shape[2], flow.state.get(name)
    rows = F.pad(x, (0, 0, lags, 0)) if past is None else torch.cat([past, x], 2)
    if axis.whole and f"{name}.segment" not in flow.state:
        flow.new_state[name] = rows[:, :, length:].clone()  # a view would keep the whole pass in memory
        return [rows[:, :, lags - lag : lags - lag + length] for lag in range(lags + 1)]
    index = _previous(axis, len(x), lags)
    seen = _same_document(axis, index, flow, name)
    lag = [
        rows.gather(2, at[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])) * same[:, None, :, None]
        for at, same in zip(index, seen, strict=True)
    ]
    flow.new_state[name] = torch.stack([each[:, :, length] for each in reversed(lag)], 2)
    return [x, *(each[:, :, :length] for each in lag)]


def lag_state(name: str, heads: int, width: int, lags: int) -> dict[str, State]:
    """The state that `lagged` keeps, if any."""
    return {name: State((heads, lags, width))} if lags else {}


def _previous(axis: Axis, batch: int, lags: int) -> list[Tensor]:
    """Where the token 1, 2, …, `lags` before each row is, among `lags` past rows and those of the axis.

    `[B, T + 1]` each; the last column is of the row that will come next, whose lags are the new state.
    """
    valid = F.pad(axis.validity.expand(batch, -1), (lags, 0), value=True)
    at = torch.arange(valid.shape[1], device=valid.device)
    before = F.pad(torch.where(valid, at, 0).cummax(-1).values, (1, 0))
    index = [before[:, lags:]]
    for _ in range(lags - 1):
        index.append(before.gather(1, index[-1]))
    return index


def _same_document(axis: Axis, index: list[Tensor], flow: Flow, name: str) -> list[Tensor]:
    """Whether the token at `index` belongs to the row's own document, bool `[B, T + 1]` each.

    Past rows all belong to the newest document, the rest of them being zero; the next row is taken to go on with it.
    """
    past, lags = flow.state.get(f"{name}.segment"), len(index)
    if axis.segment is None and past is None:
        return [torch.ones_like(at, dtype=torch.bool) for at in index]
    new = (torch.zeros_like(axis.time) if axis.segment is None else axis.segment).expand(len(index[0]), -1)
    old = torch.zeros_like(new[:, :1]) if past is None else past
    segment = torch.cat([old.expand(-1, lags), new], 1)
    newest = segment.gather(1, index[0][:, -1:])
    flow.new_state[f"{name}.segment"] = newest
    own = torch.cat([new, newest], 1)
    return [segment.gather(1, at) == own for at in index]


class Depthwise(nn.Module):
    """y_t = b + Σ_s f_s ∘ x_{t-s}, a filter for each channel; `heads` = 1 shares the filters between heads."""

    def __init__(self, taps: int, heads: int, width: int, bias: bool = True) -> None:
        super().__init__()
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(taps, heads, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, 1, width).uniform_(-bound, bound)) if bias else None

    def forward(self, lags: Sequence[Tensor]) -> Tensor:
        """From x_t, x_{t-1}, …, each `[B, heads, T, width]`."""
        y = sum(tap * x for tap, x in zip(self.weight, lags, strict=True))
        assert isinstance(y, Tensor)
        return y if self.bias is None else y + self.bias


class Headwise(nn.Module):
    """y_t = b_h + Σ_s x_{t-s} F_{s,h}, mixing the channels of each head."""

    def __init__(self, taps: int, heads: int, width: int) -> None:
        super().__init__()
        bound = (taps * width) ** -0.5
        self.weight = nn.Parameter(torch.empty(taps, heads, width, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, 1, width).uniform_(-bound, bound))

    def forward(self, lags: Sequence[Tensor]) -> Tensor:
        """From x_t, x_{t-1}, …, each `[B, heads, T, width]`."""
        y = self.bias
        for tap, x in zip(self.weight, lags, strict=True):
            y = y + x @ tap
        return y
