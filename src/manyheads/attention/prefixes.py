"""Rows that several sequences have in common: which layers can read them, and how (see `PrefixCache`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from manyheads.core.flow import Flow, Shared
from manyheads.core.kernel import Call, Out, merge
from manyheads.core.mask import Axis, Bounded, causal
from manyheads.core.part import FACTS, Position, Tokens

if TYPE_CHECKING:
    from manyheads.attention.layer import Attention


def why_whole(layer: Attention) -> str | None:
    """Why its keys must be read as one sequence, and not in pieces that others share; None if they need not."""
    broken = {fact: part.name for part in layer.spec.parts for fact in part.breaks}
    for fact in ("token keys", "final rows", "softmax", "one map"):
        if fact in broken:
            return f"{broken[fact]} breaks {fact!r} ({FACTS[fact]})"
    for piece in layer._pieces():
        name = type(piece).__name__
        if piece.states:
            return f"{name} keeps the state {next(iter(piece.states))!r} for each sequence"
        if isinstance(piece, Tokens) and piece.extra:
            return f"{name} adds tokens to the sequence"
        if isinstance(piece, Position) and piece in layer.asking and type(piece).bias is not Position.bias:
            return f"{name} adds a bias that depends on the query"
    if layer.project.remembers:
        return f"{type(layer.project).__name__} reads earlier rows when it writes new ones"
    if layer.site.lends or layer.site.attn_source is not None:
        return "its attention weights serve several layers"
    return None if layer.site.causal and not layer.site.cross else "it does not read its sequence in causal order"


def with_shared(layer: Attention, asked: Tensor, call: Call, flow: Flow) -> Tensor:
    """What heads read of their own sequence's rows and of those that it shares, merged."""
    assert flow.rows is not None
    if layer.taps:
        raise ValueError("heads that read rows shared by sequences are not shown; use manyheads.Cache")
    whole = layer._attend(call, layer.splitting, flow, need_lse=True)
    told = [] if flow.links.lse is None else flow.links.lse.setdefault(layer.site.layer, [])
    told.append(cast(Tensor, whole.lse))
    for rows, first, last in flow.rows.shared:
        read = _read_shared(layer, asked, Shared(rows, first, last), flow)
        told.append(cast(Tensor, read.lse))
        if last - first == len(whole.o):
            whole = merge([whole, read])
            continue
        assert whole.lse is not None
        read = merge([Out(whole.o[first:last], whole.lse[first:last]), read])
        assert read.lse is not None
        whole = Out(
            torch.cat([whole.o[:first], read.o, whole.o[last:]]),
            torch.cat([whole.lse[:first], read.lse, whole.lse[last:]]),
        )
    return whole.o


def _read_shared(layer: Attention, asked: Tensor, shared: Shared, flow: Flow) -> Out:
    """What sequences read of rows that they share.

    All their queries are one sequence of queries, so that the rows are read once; only where a rule looks beyond
    the axes, at the tokens of each sequence, the rows are there for each.
    """
    rows, first, last = shared
    one = replace(flow, rows=rows, memo={**flow.memo})
    call = layer._read(asked, one, None)
    rules = tuple(rule for rule in call.mask.rules if rule is not causal)  # all is earlier
    folds = all(isinstance(rule, Bounded) for rule in rules)
    if folds:
        q, axis = call.q[first:last].transpose(0, 1).flatten(1, 2)[None], _in_a_row(call.mask.q, first, last)
        call = replace(call, q=q, mask=replace(call.mask, q=axis, rules=rules))
    else:
        k, v = (t.expand(len(call.q), -1, -1, -1) for t in (call.k, call.v))
        call = replace(call, k=k, v=v, mask=replace(call.mask, rules=rules))
    out = layer._attend(layer._biased(call, one), layer.splitting, one, need_lse=True)
    assert out.lse is not None
    if not folds:
        return Out(out.o[first:last], out.lse[first:last])
    return Out(*(t[0].unflatten(1, (last - first, -1)).transpose(0, 1) for t in (out.o, out.lse)))


def _in_a_row(axis: Axis, first: int, last: int) -> Axis:
    """The tokens of sequences first to last - 1 as those of one sequence; what stands on padding has no meaning."""
    if last - first == 1 and axis.start is not None:
        return replace(axis, valid=None)

    def fold(t: Tensor) -> Tensor:
        return (t.expand(last - first, -1) if len(t) == 1 else t[first:last]).reshape(1, -1)

    return replace(axis, valid=None).map(fold, (last - first) * axis.length)
