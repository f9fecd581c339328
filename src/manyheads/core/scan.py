"""Recurrences over the tokens of a sequence: a state of fixed size in place of keys that are kept.

A pass of many tokens runs in chunks: products inside a chunk, a state from chunk to chunk, so that its memory is linear
in its length. A pass of one token is one step. Both are the same sum in another order. On a GPU, where the package
flash-linear-attention is installed, its kernels run instead (`core.fla`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core import fla
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


def read(q: Tensor, state: Tensor) -> Tensor:
    """Sᵀ q, `[B, H, T, V]`, of the states `[B, G, K, V]` of the key heads."""
    return (q.unflatten(1, (state.shape[1], -1)) @ state[:, :, None]).flatten(1, 2)


def counted(v: Tensor) -> Tensor:
    """Values with a one behind each, so that a weighted sum of them also has the sum of the weights."""
    return torch.cat([v, torch.ones_like(v[..., :1])], -1)


def averaged(o: Tensor) -> Tensor:
    """Of weighted sums of `counted` values the mean; zero where there is no weight."""
    total = o[..., -1:]
    return o[..., :-1] / torch.where(total == 0, torch.ones_like(total), total)


def decayed_sum(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, stream: Stream, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """S_t = diag(e^{decay_t}) S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t for each key head; its H/G query heads read one state.

    Args:
        q: `[B, H, T, K]`; k: `[B, G, T, K]`; v: `[B, G, T, V]`.
        decay: not positive; None: nothing decays. `[B or 1, G, T, K]` is of each channel of the keys, and may be -inf.
            `[B or 1, G·M, T]` is of whole heads: with M > 1 the columns of v and of S are M value heads side by side,
            each of which fades at its own rate.

    Returns:
        o `[B, H, T, V]` in the dtype of v, and the state `[B, G, K, V]`, in float32 at least.
    """
    wide, dtype, (groups, t) = torch.promote_types(v.dtype, torch.float32), v.dtype, k.shape[1:3]
    q, k, v = q.to(wide), stream.tokens(k.to(wide)), stream.tokens(v.to(wide))
    fades = k.new_zeros(1, groups, t) if decay is None else stream.tokens(decay.to(wide))
    state, heads = start(k, v, stream), fades.ndim == 3
    if t == 1 and stream.document is None:
        kept = _columns(fades[..., None], groups, v.shape[-1])[:, :, 0] if heads else fades.transpose(-1, -2)
        state = state * kept.exp() + k.transpose(-1, -2) * v
        return read(q, state).to(dtype), state
    single = fades.shape[1] == groups
    if single and stream.document is None and fla.why_not(q, dtype, t, fla.SINGLE) is None:
        return fla.decayed_sum(q, k, v.to(dtype), fades[..., None] if heads else fades, state)
    chunk = min(chunk, t)
    q, k, v, fades = (in_chunks(each, chunk) for each in (q, k, v, fades))
    q = q.unflatten(1, (groups, -1))
    cut = None if stream.document is None else Chunked.of(stream.document, chunk)
    o, state = (_faded_heads if heads else _faded_channels)(q, k, v, fades, state, cut)
    return o.flatten(1, 2).flatten(2, 3)[:, :, :t].to(dtype), state


def _faded_heads(
    q: Tensor, k: Tensor, v: Tensor, fades: Tensor, state: Tensor, cut: Chunked | None
) -> tuple[Tensor, Tensor]:
    """In chunks, with a decay for each value head: what fades are columns of the state."""
    groups, values = k.shape[1], fades.shape[1] // k.shape[1]
    within, since, until = fading(fades[..., None])
    across, sinks = (_columns(each.exp()[..., 0], groups, v.shape[-1]) for each in (since, until))
    keeps = across[..., -1:, :]
    if cut is not None:
        within, across, sinks, keeps = within * cut.same, across * cut.reads, sinks * cut.stays, keeps * cut.carries
    within, heads = within.unflatten(1, (groups, values)), v.unflatten(-1, (values, -1)).movedim(-2, 2)
    o = ((q @ k.transpose(-1, -2)[:, :, None])[:, :, :, None] * within[:, :, None]) @ heads[:, :, None]
    before, state = passed_on(state, keeps, k.transpose(-1, -2) @ (v * sinks))
    return o.movedim(3, -2).flatten(-2) + (q @ before[:, :, None]) * across[:, :, None], state


def _faded_channels(
    q: Tensor, k: Tensor, v: Tensor, fades: Tensor, state: Tensor, cut: Chunked | None
) -> tuple[Tensor, Tensor]:
    """In chunks, with a decay for each channel of the keys: what fades are rows of the state."""
    scores, since, until = faded_scores(q, k, fades)
    across, sinks, keeps = since.exp(), until.exp(), since[..., -1:, :].exp().transpose(-1, -2)
    if cut is not None:
        across, sinks, keeps = across * cut.reads, sinks * cut.stays, keeps * cut.carries
        scores = scores * cut.same[:, :, None]
    before, state = passed_on(state, keeps, (k * sinks).transpose(-1, -2) @ v)
    return scores @ v[:, :, None] + (q * across[:, :, None]) @ before[:, :, None], state


def _columns(x: Tensor, groups: int, width: int) -> Tensor:
    """Of each value head, `[B, G·M, n, C]`, to each column of its values, `[B, G, n, C, width]` (1 where M is 1)."""
    x = x.unflatten(1, (groups, -1)).movedim(2, -1)
    return x if x.shape[-1] == 1 else x.repeat_interleave(width // x.shape[-1], -1)


def delta_sum(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, stream: Stream, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """S_t = e^{decay_t} (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t: what k_t held gives way to v_t.

    Row t adds k_t u_tᵀ with u_t = β_t (v_t - e^{decay_t} S_{t-1}ᵀ k_t). With Γ_ts the decay from row s to row t of a
    chunk and γ_t that since its start, the rows u of a chunk solve a triangular system,
    (I + tril(diag(β) (K Kᵀ ∘ Γ), -1)) U = diag(β) (V - diag(γ) K S), whose two right sides need no state yet.

    Args:
        beta: `[B, G, T]`. decay: `[B or 1, G, T]`, not positive, or None. The rest, and what it returns, as in
            `decayed_sum`. Stable where β_t |k_t|² is in [0, 2].
    """
    wide, dtype, (groups, t) = torch.promote_types(v.dtype, torch.float32), v.dtype, k.shape[1:3]
    q, k, v = q.to(wide), stream.tokens(k.to(wide)), stream.tokens(v.to(wide))
    fades = (k.new_zeros(1, groups, t) if decay is None else stream.tokens(decay.to(wide)))[..., None]
    beta, state = stream.tokens(beta.to(wide))[..., None], start(k, v, stream)
    if t == 1 and stream.document is None:
        state = state * fades.exp()
        state = state + k.transpose(-1, -2) * (beta * (v - k @ state))
        return read(q, state).to(dtype), state
    if stream.document is None and fla.why_not(q, dtype, t, fla.HALF) is None:
        return fla.delta_sum(q, k, v.to(dtype), beta, None if decay is None else fades, state)
    chunk = min(chunk, t)
    q, k, v, beta, fades = (in_chunks(each, chunk) for each in (q, k, v, beta, fades))
    q = q.unflatten(1, (groups, -1))
    within, since, until = fading(fades)
    across, sinks, keeps = since.exp(), until.exp(), since[..., -1:, :].exp()
    if stream.document is not None:
        cut = Chunked.of(stream.document, chunk)
        within, across, sinks, keeps = within * cut.same, across * cut.reads, sinks * cut.stays, keeps * cut.carries
    system = beta * (k @ k.transpose(-1, -2)) * within
    sides = beta * torch.cat([v, k * across], -1)
    written, erased = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    sinks, keeps = (k * sinks).transpose(-1, -2), keeps.expand(-1, -1, v.shape[2], -1, -1)
    before, rows = [], []
    for write, erase, sink, keep in zip(*(each.unbind(2) for each in (written, erased, sinks, keeps)), strict=True):
        before.append(state)
        rows.append(write - erase @ state)
        state = state * keep + sink @ rows[-1]
    scores = (q @ k.transpose(-1, -2)[:, :, None]) * within[:, :, None]
    o = scores @ torch.stack(rows, 2)[:, :, None] + (q * across[:, :, None]) @ torch.stack(before, 2)[:, :, None]
    return o.flatten(1, 2).flatten(2, 3)[:, :, :t].to(dtype), state


def fading(fades: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of log decays `[…, C, 1]`: what is left of row s at row t, `[…, C, C]`, zero for a later s; and two logs
    `[…, C, 1]`, of what is left at a row of what stood before its chunk, and of a row after it."""
    since = fades.cumsum(-2)
    log = (since - since.transpose(-1, -2)).masked_fill(future(fades.shape[-2], fades.device), -torch.inf)
    return log.exp(), since, since[..., -1:, :] - since


def faded_scores(q: Tensor, k: Tensor, fades: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_c q_tc k_sc e^{fades from s to t, of c} `[…, C, C]`, zero for a later s; and the two logs of `fading`.

    q `[B, G, H/G, n, C, K]`, k `[B, G, n, C, K]`, fades `[B or 1, G, n, C, K]`. Blocks grow from one row to the whole
    chunk: rows of a block's second half read those of its first half through the row where they meet. Both factors of
    that are at most one, and logs are only ever added, so that no decay is too strong; a quotient of cumulative decays
    would overflow.
    """
    rows = k.shape[-2]
    short = (1 << (rows - 1).bit_length()) - rows
    q, k, since = (F.pad(each, (0, 0, 0, short))[..., None, :] for each in (q, k[:, :, None], fades[:, :, None]))
    scores, until = (q * k).sum(-1, keepdim=True), torch.zeros_like(since)
    while since.shape[-3] > 1:
        (q1, q2), (k1, k2), (s1, s2), (u1, u2), (a, b) = (_halves(each) for each in (q, k, since, until, scores))
        across = (q2 * s2.exp()) @ (k1 * u1.exp()).transpose(-1, -2)
        scores = torch.cat([F.pad(a, (0, a.shape[-1])), torch.cat([across, b], -1)], -2)
        q, k = torch.cat([q1, q2], -2), torch.cat([k1, k2], -2)
        since, until = torch.cat([s1, s2 + s1[..., -1:, :]], -2), torch.cat([u1 + s2[..., -1:, :], u2], -2)
    scores, since, until = (each.squeeze(-3)[..., :rows, :] for each in (scores, since, until))
    return scores[..., :rows], since[:, :, 0], until[:, :, 0]


def _halves(blocks: Tensor) -> tuple[Tensor, ...]:
    """Neighbouring blocks of rows, `[…, n, C, width]`, as first and second halves of `n / 2` blocks."""
    return blocks.unflatten(-3, (-1, 2)).unbind(-3)


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
