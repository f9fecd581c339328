"""How much of each residual vector came through which head and token, through the feed-forward, or was there before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.inspect.ablate import Inputs, apart, batches_of, run
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.look import CaptureError, Look
from manyheads.inspect.measures.table import HeadTable, Sums
from manyheads.inspect.stream import Passage, passages

Norm = Literal["l1", "l2"]
FLOOR = 1e-5
"""The least proximity of a part that is there."""
BLOCK = 2**24
"""Numbers of parts that are in memory at once."""


@dataclass(frozen=True, eq=False)
class Shares:
    """One layer's contributions; those of one residual vector add up to 1.

    heads `[B, H, T, S]`, bias and skip `[B, T]` are of the stream behind attention: what came from key s through head
    h, from the output projection's bias, and what was there. fed and past `[B, T]` are of the stream behind the
    feed-forward (None where there is none).
    """

    heads: Tensor
    bias: Tensor
    skip: Tensor
    fed: Tensor | None
    past: Tensor | None


class Node(NamedTuple):
    """kind: `x` the stream before a layer, `i` the stream between its sublayers, `m` its feed-forward."""

    kind: str
    layer: int
    token: int


class Edge(NamedTuple):
    source: Node
    target: Node
    share: float


@dataclass(frozen=True, eq=False)
class Routes:
    """Contributions by layer, first to last."""

    layers: dict[int, Shares]

    def edges(self, token: int = -1, threshold: float = 0.04, batch: int = 0) -> list[Edge]:
        """The routes that end at a token's last state: edges above the threshold, walked from there downwards.

        Each layer's parts below the threshold are left out first and the rest scaled to add up to 1.
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold={threshold}; contributions are 0 to 1")
        order = list(self.layers)
        length = self.layers[order[-1]].skip.shape[1]
        if not -length <= token < length:
            raise ValueError(f"there is no token {token}; there are {length}, from 0 on")
        reached, found = {token % length}, []
        for place in reversed(range(len(order))):
            number, shares = order[place], self.layers[order[place]]
            above = order[place + 1] if place + 1 < len(order) else number + 1
            middle: set[int] = set()
            for t in sorted(reached):
                out, into = Node("x", above, t), Node("i", number, t)
                if shares.fed is None or shares.past is None:
                    found.append(Edge(into, out, 1.0))
                    middle.add(t)
                    continue
                (fed,), past = renormalised(shares.fed[batch, t][None], shares.past[batch, t], threshold)
                if fed > 0:
                    feed = Node("m", number, t)
                    found += [Edge(feed, out, float(fed)), Edge(into, feed, float(fed))]
                if past > 0:
                    found.append(Edge(into, out, float(past)))
                middle |= {t} if fed > 0 or past > 0 else set()
            reached = set()
            for t in sorted(middle):
                keys = shares.heads[batch, :, t]
                parts, skip = renormalised(keys.flatten(), shares.skip[batch, t], threshold)
                by_key = parts.view_as(keys).sum(0)
                by_key[t] += skip
                for s in by_key.nonzero()[:, 0].tolist():
                    found.append(Edge(Node("x", number, s), Node("i", number, t), float(by_key[s])))
                    reached.add(s)
        return found

    def importance(self, token: int | None = None, threshold: float = 0.04) -> HeadTable:
        """Σ_s c_hs of each head: in the mean over all tokens, or over those on the routes to one."""
        rows = {}
        met = None
        if token is not None:
            met = {(edge.target.layer, edge.target.token) for edge in self.edges(token, threshold)
                   if edge.target.kind == "i"}  # fmt: skip
        for number, shares in self.layers.items():
            each = shares.heads.sum(-1).double()  # [B, H, T]
            at = range(each.shape[2]) if met is None else sorted(t for layer, t in met if layer == number)
            rows[number] = each[: 1 if met is not None else None, :, list(at)].mean((0, 2)).cpu()
        return HeadTable("flow", rows)


def renormalised(parts: Tensor, skip: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Parts and the skip with those at or below a threshold zero, and the rest adding up to 1 again."""
    parts, skip = (x * (x > threshold) for x in (parts, skip))
    total = parts.sum() + skip
    total = torch.where(total > 0, total, torch.ones_like(total))
    return parts / total, skip / total


def proximity(part: Tensor, whole: Tensor, norm: Norm = "l1") -> Tensor:
    """max(‖y‖ - ‖z - y‖, 1e-5) of a part z of a whole y."""
    order = 1 if norm == "l1" else 2
    near = whole.norm(order, -1) - (part - whole).norm(order, -1)
    return near.clamp_min(FLOOR)


def routes(
    model: nn.Module, inputs: Inputs, layers: int | Iterable[int] | None = None, *, norm: Norm = "l1"
) -> Routes:  # fmt: skip
    """The contributions of every part to every residual vector, by one forward pass.

    A part z of a whole y has c(z, y) = p(z, y) / Σ p over all parts of y, p = max(‖y‖ - ‖z - y‖, 1e-5). Parts of the
    stream behind attention are A_ts W_O[h] v_s of each head and key, the projection's bias, and the stream before; of
    that behind the feed-forward, what it adds and the stream before. Memory: B·H·T·S numbers a layer.

    Args:
        norm: `l1`, as published, or `l2`, which needs products instead of differences and is several times as fast.

    Raises:
        CaptureError: heads do more than to weigh values. ValueError: a block does more than to add, or no layer has
            weights.

    Source: Ferrando and Voita 2024, arXiv 2403.00824. (There a value's bias may count twice, and the projection's bias
    is in the whole and in no part: here once, and a part of its own.)
    """
    found: dict[int, Shares] = {}
    for number, heads, bias, skip, passage in _passed(model, inputs, layers, norm):
        fed = past = None
        if passage.fed is not None:
            one, two = (proximity(part, passage.y, norm) for part in (passage.fed, passage.middle))
            fed, past = one / (one + two), two / (one + two)
        found[number] = Shares(heads, bias, skip, fed, past)
    return Routes(found)


def flow_share(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], layers: int | Iterable[int] | None = None, *, norm: Norm = "l2"
) -> HeadTable:
    """⟨Σ_s c_hs⟩: the share of the stream behind its layer's attention that came through a head, in [0, 1]."""
    sums = Sums()
    for batch in batches_of(inputs):
        for number, heads, *_ in _passed(model, batch, layers, norm):
            share = heads.sum(-1)
            sums.add(number, share, torch.ones_like(share[:, :1], dtype=torch.bool))
    return sums.table("flow")


def _passed(
    model: nn.Module, inputs: Inputs, layers: int | Iterable[int] | None, norm: Norm
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Passage]]:
    if norm not in ("l1", "l2"):
        raise ValueError(f"norm={norm!r}; proximity is by l1 or l2")
    given = chosen(model, layers)
    some = [layer for layer in given if not layer.none]
    if not some:
        raise ValueError(f"{given[0].name} has no weights to follow: {given[0].none}")
    looks: dict[int, Look] = {}
    with (
        torch.no_grad(),
        watching(some, lambda look: looks.__setitem__(look.layer, look)),
        passages(model, some) as seen,
    ):
        run(model, inputs)
    with torch.no_grad():
        for layer in (layer for layer in some if layer.number in looks):
            look = looks.pop(layer.number)
            yield layer.number, *_parts(layer, look, seen[layer.number], norm), seen[layer.number]


def _parts(layer: Layer, look: Look, passage: Passage, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions of heads, bias and skip to the stream behind attention."""
    if look.project is None:
        raise CaptureError(f"{look.name}: its output projection is not known")
    whole = passage.middle
    weight, factor, v = layer.output_weight().to(whole), _gate(look), apart(look.call).v
    bias = look.project(torch.zeros_like(look.out))
    near: list[Tensor] = []
    for tile in look.weights():
        scaled = tile.weights * factor[:, :, tile.rows, None]
        rows = [
            _near(scaled[:, head], v[:, head] @ weight[head], whole[:, tile.rows], norm) for head in range(look.heads)
        ]
        near.append(torch.stack(rows, 1).masked_fill(~tile.visible, 0.0))
    heads, skip = torch.cat(near, 2), proximity(passage.x, whole, norm)
    silent = not bool(bias.any())
    own = torch.zeros_like(skip) if silent else proximity(bias, whole, norm)
    total = heads.sum((1, 3)) + skip + own
    return heads / total[:, None, :, None], own / total, skip / total


def _near(a: Tensor, w: Tensor, y: Tensor, norm: Norm) -> Tensor:
    """The proximity of A_ts w_s to y_t, `[B, t, S]`, of a `[B, t, S]`, w `[B, S, D]`, y `[B, t, D]`."""
    if norm == "l2":
        size, length = w.square().sum(-1)[:, None], y.square().sum(-1)[..., None]
        apart = (a.square() * size - 2 * a * (y @ w.mT) + length).clamp_min(0).sqrt()
        return (length.sqrt() - apart).clamp_min(FLOOR)
    step = max(1, BLOCK // max(1, w.numel()))
    cuts = [slice(at, at + step) for at in range(0, a.shape[1], step)]
    rows = [(a[:, cut, :, None] * w[:, None] - y[:, cut, None]).abs().sum(-1) for cut in cuts]
    return (y.abs().sum(-1)[..., None] - torch.cat(rows, 1)).clamp_min(FLOOR)


def _gate(look: Look) -> Tensor:
    """The factor `[B, H, T]` between what heads read and what they return."""
    if look.read.shape != look.out.shape:
        raise CaptureError(f"{look.name}: what its heads return is not what they read, times a number")
    if torch.equal(look.read, look.out):
        return look.out.new_ones(look.out.shape[:3])
    factor = (look.out * look.read).sum(-1) / look.read.square().sum(-1).clamp_min(1e-30)
    if not torch.allclose(factor[..., None] * look.read, look.out, atol=1e-4 * float(look.out.abs().amax())):
        raise CaptureError(f"{look.name}: what its heads return is not what they read, times a number")
    return factor


__all__ = ["Edge", "Node", "Routes", "Shares", "flow_share", "proximity", "renormalised", "routes"]
