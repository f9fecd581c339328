"""HySparse: a full layer chooses key blocks for the sparse layers above it, and lends them its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.attention.chunks import Chosen, Chunks, gathered, rows_in, weights_of
from manyheads.attention.windows import Near, keep_newest
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class HySparse(Part):
    """Layers come in groups of one full layer and `ratio` sparse ones, which read from the full layer.

    full: ordinary attention. For query t and key head g, the score of a block of `block` positions is the largest
    weight of a visible key in it, over the keys and the query heads of g; I_tg = the `blocks` blocks of largest score,
    the earlier one of two equals. No gradient passes through the choice.
    sparse: o_t = σ(W x_t) ∘ õ_t + σ(W' x_t) ∘ o'_t, the same q in both branches, õ over the full layer's keys and
    values in the blocks I_t up to t, o' over the layer's own keys of the newest `window` tokens, which are all that it
    caches. Selected keys have their original positions.

    Options: ratio; layer l is full if l is a multiple of ratio + 1. block, blocks, window. gate: one number for each
    channel of a head's output, or for each head; biases start at zero.

    Choices: the width of the gates is not stated; no block is forced, not even the query's own (the window is there
    for it).

    Source: HySparse 2026, arXiv 2602.03560.
    """

    name: ClassVar[str] = "hysparse"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2602.03560"
    examples: ClassVar = ({"block": 2, "blocks": 2, "window": 3}, {"block": 1, "blocks": 3, "gate": "head"})

    ratio: int = 3
    block: int = 64
    blocks: int = 16
    window: int = 128
    gate: Literal["channel", "head"] = "channel"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "head keys", "token keys", "one map", "alike heads"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "alike heads", "values alone"})

    def follows(self, site: Site) -> int | None:
        """The full layer that a sparse one reads from; None for a full one."""
        behind = site.layer % (self.ratio + 1)
        return site.layer - behind if behind else None

    def agrees(self, before: Heads) -> str:
        return f"{before.kv} key heads of width {before.qk_width}"

    def layout(self, heads: Heads, site: Site) -> Heads:
        if min(self.block, self.blocks, self.window, self.ratio) < 1:
            raise OptionError(
                f"hysparse: ratio={self.ratio}, block={self.block}, blocks={self.blocks} and window={self.window} must "
                "be positive"
            )
        return heads if self.follows(site) is None else keep_newest(heads, site, self.window)

    def build(self, before: Heads, after: Heads, site: Site) -> Piece:
        source = self.follows(site)
        if source is None:
            return FullSelect(self, before, serves=site.layer + 1 < site.layers)
        return SparseSelect(self, before, source)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        if self.follows(site) is None:
            serves = site.layer + 1 < site.layers
            return Cost(pair_flops=2 * before.q * before.qk_width * serves)
        gates = 2 * _gate_width(self, before)
        return Cost((before.dim + 1) * gates, token_flops=2 * before.dim * gates)


class Shared(NamedTuple):
    """What a full layer hands on: its keys `[B, G, S, E]` and values as read, their axis, and I `[B, G, T, n]`."""

    k: Tensor
    v: Tensor
    axis: Axis
    chunks: Chunks
    chosen: Tensor


class FullSelect(Piece):
    def __init__(self, options: HySparse, heads: Heads, serves: bool) -> None:
        super().__init__()
        self.options, self.kv, self.serves = options, heads.kv, serves

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        if self.serves and not flow.described:
            chunks = Chunks.along(call.mask.k, self.options.block)
            chosen = self._choose(call, chunks)
            flow.links.handed[flow.layer] = Shared(call.k, call.v, call.mask.k, chunks, chosen)
        return [call]

    @torch.no_grad()
    def _choose(self, call: Call, chunks: Chunks) -> Tensor:
        tiles = []
        for _, weights, _ in weights_of(call):
            weight = weights.unflatten(1, (self.kv, -1)).amax(2)
            block = chunks.of[:, None, None].expand_as(weight)
            scores = weight.new_zeros(*weight.shape[:3], chunks.count).scatter_reduce(-1, block, weight, "amax")
            tiles.append(scores.sort(stable=True, dim=-1, descending=True).indices[..., : self.options.blocks])
        return torch.cat(tiles, 2)


class SparseSelect(Piece):
    joins_by_lse = False

    def __init__(self, options: HySparse, heads: Heads, source: int) -> None:
        super().__init__()
        self.options, self.source, self.near = options, source, Near((options.window,))
        self.heads, self.kv = heads.q, heads.kv
        width = _gate_width(options, heads)
        self.shared_gate, self.own_gate = nn.Linear(heads.dim, width), nn.Linear(heads.dim, width)
        for gate in (self.shared_gate, self.own_gate):
            nn.init.zeros_(gate.bias)

    def split(self, call: Call, flow: Flow) -> list[Call]:
        if flow.described:
            return [call, call]
        shared = self._shared(call, flow)
        far = replace(call, k=shared.k, v=shared.v, mask=replace(call.mask, k=shared.axis))
        if call.q.shape[2] == 1:
            rows = rows_in(shared.chosen, shared.chunks.rows(shared.axis), self.options.block)
            far = gathered(far, rows)
        else:
            of, count = shared.chunks.of, shared.chunks.count
            far = replace(far, mask=far.mask & Chosen(shared.chosen, of, count, call.mask.q, shared.axis, self.heads))
        return [far, replace(call, mask=call.mask & self.near)]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        gates = (self.shared_gate, self.own_gate)
        weighed = [
            out.o * gate(flow.x).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for gate, out in zip(gates, outs, strict=True)
        ]
        return Out(weighed[0] + weighed[1])

    def _shared(self, call: Call, flow: Flow) -> Shared:
        shared = flow.links.handed.get(self.source)
        if not isinstance(shared, Shared):
            raise ValueError(
                f"hysparse in layer {flow.layer} reads keys and blocks of layer {self.source}, which links do not hold"
            )
        if (shared.k.shape[1], shared.k.shape[3]) != (call.k.shape[1], call.k.shape[3]):
            raise ValueError(
                f"hysparse: layer {self.source} has {shared.k.shape[1]} key heads of width {shared.k.shape[3]}, layer "
                f"{flow.layer} has {call.k.shape[1]} of {call.k.shape[3]}; they must agree"
            )
        return shared


def _gate_width(options: HySparse, heads: Heads) -> int:
    return heads.q * (heads.v_width if options.gate == "channel" else 1)
