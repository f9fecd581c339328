"""Recurrences over the tokens of a sequence: a state of fixed size in place of keys that are kept.

A pass of many tokens runs in chunks: products inside a chunk, a state from chunk to chunk, so that its memory is linear
in its length. A pass of one token is one step. Both are the same sum in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.flow import Flow

CHUNK = 64
"""Tokens a chunk: half of a chunk's products are above the diagonal, and each chunk passes the state on once."""


class Stream(NamedTuple):
    """What a scan goes on from, and which rows of the pass are tokens of which document.

    state: as the last pass left it, None at the start. valid: bool `[B or 1, T]`, None where all rows are tokens.
    document: int `[B, 1 + T]`, the state's document and that of each row (padding belongs to the document before it),
    None where there is one. A state is of one document and is left behind where another begins.
    """

    state: Tensor | None
    valid: Tensor | None
    document: Tensor | None

    @classmethod
    def of(cls, flow: Flow, name: str = "scan") -> Stream:
        """The stream of this pass for the state `name`, whose document is kept beside it where there are several."""
        axis, state = flow.new, flow.state.get(name)
        last = flow.state.get(f"{name}.document")
        if axis.segment is None and last is None:
            return cls(state, axis.valid, None)
        batch = len(flow.source)
        segment = torch.zeros_like(axis.time) if axis.segment is None else axis.segment
        first = segment[:, :1].expand(batch, -1) if last is None else last
        rows = torch.cat([first, segment.expand(batch, -1)], 1)
        counted = F.pad(axis.validity.expand(batch, -1), (1, 0), value=True)
        newest = torch.where(counted, torch.arange(rows.shape[1], device=rows.device), 0).cummax(-1).values
        document = rows.gather(1, newest)
        flow.new_state[f"{name}.document"] = document[:, -1:]
        return cls(state, axis.valid, document)

    def tokens(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Rows `[B, heads, T, …]` with `fill` in place of padding, whatever stood there."""
        if self.valid is None:
            return rows
        valid = self.valid[:, None].unflatten(-1, (-1, *[1] * (rows.ndim - 3)))
        return torch.where(valid, rows, rows.new_tensor(fill))


class Chunked(NamedTuple):
    """The documents of a stream cut in chunks, bool and ready to multiply what crosses from one to another.

    same `[B, 1, n, C, C]`: two rows of a chunk are of one document. reads `[B, 1, n, C, 1]`: a row is of the document
    that the state before its chunk is of. stays `[B, 1, n, C, 1]`: of the one that the state after it is of.
    carries `[B, 1, n, 1, 1]`: these two states are of the same document.
    """

    same: Tensor
    reads: Tensor
    stays: Tensor
    carries: Tensor

    @classmethod
    def of(cls, document: Tensor, chunk: int) -> Chunked:
        rows = document[:, 1:]
        rows = F.pad(rows, (0, -rows.shape[1] % chunk), mode="replicate").unflatten(1, (-1, chunk))[:, None]
        last = rows[..., -1:]
        before = torch.cat([document[:, None, None, :1], last[:, :, :-1]], 2)
        return cls(
            rows[..., :, None] == rows[..., None, :], (rows == before)[..., None], (rows == last)[..., None],
            (before == last)[..., None],
        )  # fmt: skip


def in_chunks(t: Tensor, chunk: int) -> Tensor:
    """`[B, heads, T, …]` to `[B, heads, n, chunk, …]`, with zeros at the end."""
    short = -t.shape[2] % chunk
    if short:
        t = torch.cat([t, t.new_zeros(*t.shape[:2], short, *t.shape[3:])], 2)
    return t.unflatten(2, (-1, chunk))


def start(k: Tensor, v: Tensor, stream: Stream) -> Tensor:
    """The state that a pass goes on from, `[B, G, K, V]`; zero at the start."""
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if stream.state is None else stream.state


def decayed_sum(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, stream: Stream, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """S_t = e^{decay_t} S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t for each key head, whose H/G query heads read one state.

    Args:
        q: `[B, H, T, K]`; k: `[B, G, T, K]`; v: `[B, G, T, V]`.
        decay: `[B or 1, G·M, T]`, not positive; None: nothing decays. With M > 1 the columns of v and of S are M value
            heads side by side, each of which fades at its own rate.

    Returns:
        o `[B, H, T, V]` in the dtype of v, and the state `[B, G, K, V]`, in float32 at least.
    """
    wide, dtype, (groups, t) = torch.promote_types(v.dtype, torch.float32), v.dtype, k.shape[1:3]
    q, k, v = q.to(wide), stream.tokens(k.to(wide)), stream.tokens(v.to(wide))
    fades = k.new_zeros(1, groups, t) if decay is None else stream.tokens(decay.to(wide))
    state, values = start(k, v, stream), fades.shape[1] // groups
    columns = v.shape[-1] // values

    def each_column(x: Tensor) -> Tensor:
        """`[B, G·M, n, C]` to `[B, G, n, C, V]`, or `1` in place of V where all columns are alike."""
        x = x.unflatten(1, (groups, values)).movedim(2, -1)
        return x if values == 1 else x.repeat_interleave(columns, -1)

    if t == 1 and stream.document is None:
        state = state * each_column(fades[..., None])[:, :, 0].exp() + k.transpose(-1, -2) * v
        return (q.reshape(len(q), groups, -1, q.shape[3]) @ state).reshape(*q.shape[:3], -1).to(dtype), state
    chunk = min(chunk, t)
    q, k, v, fades = (in_chunks(each, chunk) for each in (q, k, v, fades))
    q = q.unflatten(1, (groups, -1))
    since = fades.cumsum(-1)  # log of what is left at a row of what stood before its chunk
    within = (since[..., :, None] - since[..., None, :]).masked_fill(future(chunk, q.device), -torch.inf).exp()
    across, sinks = each_column(since.exp()), each_column((since[..., -1:] - since).exp())
    keeps = across[..., -1:, :]
    if stream.document is not None:
        cut = Chunked.of(stream.document, chunk)
        within, across, sinks, keeps = within * cut.same, across * cut.reads, sinks * cut.stays, keeps * cut.carries
    within, heads = within.unflatten(1, (groups, values)), v.unflatten(-1, (values, columns)).movedim(-2, 2)
    o = ((q @ k.transpose(-1, -2)[:, :, None])[:, :, :, None] * within[:, :, None]) @ heads[:, :, None]
    before, state = passed_on(state, keeps, k.transpose(-1, -2) @ (v * sinks))
    o = o.movedim(3, -2).flatten(-2) + (q @ before[:, :, None]) * across[:, :, None]
    return o.flatten(1, 2).flatten(2, 3)[:, :, :t].to(dtype), state


def future(chunk: int, device: torch.device) -> Tensor:
    """What a row of a chunk does not see, bool `[C, C]`."""
    return torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)


def passed_on(state: Tensor, keeps: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk, `[B, G, n, K, V]`, and after the last: S_i = keeps_i ∘ S_{i-1} + added_i."""
    before = []
    for keep, add in zip(keeps.expand(-1, -1, added.shape[2], -1, -1).unbind(2), added.unbind(2), strict=True):
        before.append(state)
        state = state * keep + add
    return torch.stack(before, 2), state
