"""The mean over tokens that several gates read: running in a causal layer, over the whole sequence in others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, Site


def runs(site: Site) -> bool:
    """Whether tokens may only read the mean so far."""
    return site.causal and not site.cross


def pooled_width(heads: Heads, site: Site) -> int:
    """The width of a mean: of x, or in cross-attention of the context."""
    return (site.context_dim or heads.dim) if site.cross else heads.dim


def running_state(name: str, dim: int) -> Mapping[str, State]:
    """What `running_mean` keeps for each sequence: a sum, how many tokens are in it, and their document."""
    return {name: State((dim + 2,))}


def running_mean(flow: Flow, name: str) -> Tensor:
    """The mean of x_1 … x_t (of the document that t belongs to), `[B, T, D]`; goes on from the state `name`."""
    rows = _counted_rows(flow)
    document = rows.new_zeros(rows.shape[:2])
    if flow.q.segment is None:
        sums = rows.cumsum(1)
    else:
        document = flow.q.segment.expand(len(rows), -1).to(rows.dtype)
        sums = (document[:, :, None] == document[:, None]).tril().to(rows.dtype) @ rows
    if name in flow.state:
        before = flow.state[name][:, None]
        sums = sums + before[..., :-1] * (document[..., None] == before[..., -1:])
    flow.new_state[name] = torch.cat([sums[:, -1], document[:, -1:]], -1)
    return _mean(sums).to(flow.x.dtype)


def whole_mean(flow: Flow, cross: bool = False) -> Tensor:
    """The mean of the tokens on the key side, `[B, 1 or T, D]`.

    In self-attention of a token's document; in cross-attention of what a query sees of the context, which is the same
    for all queries unless a mask says otherwise.
    """
    rows, segment = _counted_rows(flow, cross), flow.q.segment
    if cross and flow.mask is not None:
        sums = flow.mask.any(1).to(rows.dtype) @ rows
    elif not cross and segment is not None:
        sums = (segment[:, :, None] == segment[:, None]).to(rows.dtype) @ rows
    else:
        sums = rows.sum(1, keepdim=True)
    return _mean(sums).to(flow.x.dtype)


def _mean(sums: Tensor) -> Tensor:
    return sums[..., :-1] / sums[..., -1:].clamp_min(1)


def _counted_rows(flow: Flow, cross: bool = False) -> Tensor:
    """`[B, S, D + 1]` of the key side: a token's features and 1, or zeros where it does not count."""
    x = flow.source.to(torch.promote_types(flow.source.dtype, torch.float32))
    counts = counted(flow, cross).expand(x.shape[:2])[..., None]
    return torch.cat([x.masked_fill(~counts, 0), counts.to(x.dtype)], -1)


def counted(flow: Flow, cross: bool = False) -> Tensor:
    """Which rows of the key side are tokens, bool `[B or 1, S]`: those that are valid and may see themselves."""
    valid = flow.new.validity
    return valid if flow.mask is None or cross else valid & _sees_itself(flow.mask, flow.new.length)


def _sees_itself(mask: Tensor, tokens: int) -> Tensor:
    """Of the newest tokens, bool `[B or 1, tokens]`: padding is what a mask hides from itself.

    Tokens that the mask does not speak of (extra ones at the end) count.
    """
    mask = mask.any(1)
    queries, keys = mask.shape[-2:]
    if keys == 1:
        own = mask[..., 0]
    elif queries == 1:
        own = mask[:, 0, -tokens:]
    else:
        own = mask.diagonal(keys - queries, 1, 2)
    return F.pad(own, (0, tokens - own.shape[1]), value=True)
