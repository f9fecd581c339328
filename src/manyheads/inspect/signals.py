"""Which directions of the stream made a head look from one token at another, and which earlier heads wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import apart, channels_of
from manyheads.inspect.capture import watching
from manyheads.inspect.edit import standing_by
from manyheads.inspect.layers import Layer, check_heads, chosen
from manyheads.inspect.look import CaptureError, Look
from manyheads.inspect.measures.weights import head_maps
from manyheads.inspect.rotary import turn_of
from manyheads.inspect.stream import Passage, blocks_of, passages

Side = Literal["query", "key"]


def qk_svd(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular vectors of Ω = q kᵀ `[D, D]` of two factors `[D, d]`: u `[D, d]`, σ, v `[D, d]`; never at D×D."""
    left, right = (torch.linalg.qr(x) for x in (q, k))
    u, sigma, vh = torch.linalg.svd(left.R @ right.R.mT)
    return left.Q @ u, sigma, right.Q @ vh.mT


def sparse_set(parts: Tensor, share: float = 1.0) -> Tensor:
    """The fewest parts p_k of z = Σ p_k > 0 whose sum reaches a share of z, by number, the largest first.

    They can be few although many more are not zero: later parts may be below zero.
    """
    z = parts.sum()
    if z <= 0:
        raise ValueError(f"the score is {float(z):.3g}; only what is above zero has a signal")
    order = parts.argsort(descending=True)
    reached = parts[order].cumsum(0) >= share * z - 1e-9 * z.abs()
    return order[: int(reached.nonzero()[0]) + 1]


@dataclass(frozen=True, eq=False)
class Signal:
    """One score z = x̃_tᵀ Ω x̃_s = Σ_k σ_k (u_kᵀ x̃_t)(v_kᵀ x̃_s) taken apart, x̃ = [x̂; 1] with x̂ the normed stream.

    u, v `[D + 1, d]` and sigma `[d]`: of Ω, which has the norm's gain and all biases in it. parts `[d]`: the terms.
    chosen: those that make the score. norms: the divisors n_t, n_s of the stream. means: taken off first (a LayerNorm).
    """

    layer: int
    head: int
    query: int
    key: int
    z: float
    u: Tensor
    sigma: Tensor
    v: Tensor
    parts: Tensor
    signs: Tensor
    chosen: Tensor
    norms: tuple[float, float]
    centred: bool

    def contribution(self, side: Side, written: Tensor) -> Tensor:
        """What vectors `[…, D]` in the stream at the query (or the key) give to the signal there:
        1/n Σ_{k in it} ε_k √σ_k u_kᵀ written (v_k), ε_k the sign of u_kᵀ x̃_t. The constant counts for nobody."""
        vectors, n = (self.u, self.norms[0]) if side == "query" else (self.v, self.norms[1])
        some = self.chosen
        weights = vectors[:-1, some] @ (self.signs[some] * self.sigma[some].sqrt())
        written = written.double()
        written = written - written.mean(-1, keepdim=True) if self.centred else written
        return written @ weights / n

    def projection(self, side: Side, vectors: Sequence[int] | None = None) -> Tensor:
        """P `[D, D]` onto the span of the signal's vectors on a side, or of others by number (a control)."""
        some = self.chosen if vectors is None else torch.tensor(list(vectors))
        span = torch.linalg.qr((self.u if side == "query" else self.v)[:-1, some]).Q
        return span @ span.mT


class _Norm(NamedTuple):
    """x̂ `[B, T, D]`, its divisors `[B, T]`, gain and bias `[D]`, and whether the mean is taken off."""

    normed: Tensor
    divisor: Tensor
    gain: Tensor
    bias: Tensor
    centred: bool


def _norm_of(block: nn.Module, passage: Passage, name: str) -> _Norm:
    """The norm between the stream and attention, told from what it did."""
    x, read = passage.x.double(), passage.read.double()
    for module in block.modules():
        weight: Any = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.shape != x.shape[-1:]:
            continue
        gain, own = weight.detach().double(), getattr(module, "bias", None)
        bias = torch.zeros_like(gain) if own is None else own.detach().double()
        for centred in (False, True):
            for scale in (gain, 1 + gain):
                flat = x - x.mean(-1, keepdim=True) if centred else x
                divisor = (scale * flat).norm(dim=-1) / (read - bias).norm(dim=-1)
                normed = flat / divisor[..., None]
                if torch.allclose(scale * normed + bias, read, atol=1e-4 * float(read.abs().amax()), rtol=1e-3):
                    return _Norm(normed, divisor, scale, bias, centred)
    raise CaptureError(f"{name}: the norm between the stream and its attention is not known")


class Reading:
    """A model on one text, run once: its streams, maps and what each head wrote. Batch 1."""

    def __init__(self, model: nn.Module, ids: Tensor) -> None:
        if ids.shape[0] != 1:
            raise ValueError(f"signals are of one text, not of a batch of {ids.shape[0]}")
        self.model = model
        self.layers = {layer.number: layer for layer in chosen(model, None)}
        self.looks: dict[int, Look] = {}
        some = list(self.layers.values())
        with torch.no_grad(), watching(some, self._keep), passages(model, some) as seen:
            model(ids)
        self.passages = dict(seen)
        self.blocks = dict(zip(self.layers, blocks_of(model, some), strict=True))
        self._written: dict[int, Tensor] = {}

    def _keep(self, look: Look) -> None:
        self.looks[look.layer] = look

    def written(self, layer: int) -> Tensor:
        """What each head of a layer added to the stream, `[H, T, D]`."""
        if layer not in self._written:
            with torch.no_grad():
                self._written[layer] = torch.stack([c[0] for _, c in self.looks[layer].contributions()])
        return self._written[layer]

    def firing(self, layer: int, head: int, query: int, least: float = 0.5) -> int | None:
        """The key that a head looks at with at least this weight, other than the first token; None if there is none."""
        tile = next(iter(self.looks[layer].weights([head], [query])))
        weights = tile.weights[0, 0, 0]
        key = int(weights.argmax())
        return key if key and float(weights[key]) >= least else None

    def signal(self, layer: int, head: int, query: int, key: int, share: float = 1.0) -> Signal:
        """The score of one query and key taken apart along the singular vectors of its head.

        Rotation is in Ω: that of these two positions.

        Raises:
            CaptureError: the parts do not add up to the layer's score; something else acts on it.
            ValueError: the score is not above zero.
        """
        place = self.layers[layer]
        (head,) = check_heads(place, [head])
        norm = _norm_of(self.blocks[layer], self.passages[layer], place.name)
        look = self.looks[layer]
        factors = []
        for name, at, weight, bias in zip(("q", "k"), (query, key), *_pairs(head_maps(place)), strict=True):
            folded = torch.cat([norm.gain[:, None] * weight[head], (bias[head] + norm.bias @ weight[head])[None]])
            axis = look.axis if name == "q" else look.mask.k
            turn = turn_of(self.model, place, name)  # type: ignore[arg-type]
            if turn is not None:
                position = axis.position[:, at : at + 1].expand(1, len(folded))
                folded = turn(folded[None, None], Axis(len(folded), None, given_time=position))[0, 0]
            factors.append(folded.double())
        u, sigma, v = qk_svd(*factors)
        one = norm.normed.new_ones(1)
        x_t, x_s = (torch.cat([norm.normed[0, at], one]) for at in (query, key))
        left, right = u.mT @ x_t, v.mT @ x_s
        parts = sigma * left * right
        tile = next(iter(look.tiles([head], [query])))
        z = float(tile.scores[0, 0, 0, key]) / look.call.scale
        if abs(float(parts.sum()) - z) > 1e-3 * (1 + abs(z)):
            raise CaptureError(
                f"{place.name}: singular parts add up to {float(parts.sum()):.4g} and the score is {z:.4g}, so "
                "something beside queries and keys acts on it"
            )
        norms = (float(norm.divisor[0, query]), float(norm.divisor[0, key]))
        return Signal(
            layer, head, query, key, z, u, sigma, v, parts, left.sign(), sparse_set(parts, share), norms, norm.centred
        )

    def writers(self, signal: Signal, side: Side) -> dict[int, Tensor]:
        """What each head of earlier layers contributes to a signal at the query or the key, `[H]` by layer."""
        at = signal.query if side == "query" else signal.key
        earlier = [number for number in self.layers if number < signal.layer]
        return {number: signal.contribution(side, self.written(number)[:, at]) for number in earlier}


def _pairs(maps: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    q, k, q_bias, k_bias = maps
    return (q, k), (q_bias, k_bias)


class Step(NamedTuple):
    """writer: (layer, head) that wrote, at `token`, a share of what reader `(layer, head)` looked by there."""

    writer: tuple[int, int]
    reader: tuple[int, int]
    side: Side
    token: int
    share: float


def trace(
    reading: Reading, layer: int, head: int, query: int, *, covered: float = 0.7, least: float = 0.5
) -> list[Step]:
    """The circuit behind a firing: upstream heads, in descending contribution until they cover a share of all that
    heads contribute, and the same again for those that fire at that token.

    Source: arXiv 2410.00340. (The share is taken of positive contributions. There the constant enters with each head;
    here not.)
    """
    found: list[Step] = []
    todo, done = [(layer, head, query)], set()
    while todo:
        at = todo.pop(0)
        if at in done:
            continue
        done.add(at)
        key = reading.firing(*at, least)
        if key is None:
            continue
        try:
            signal = reading.signal(*at, key)
        except ValueError:
            continue  # its score is below zero: the others are lower still
        sides: tuple[Side, Side] = ("query", "key")
        for side in sides:
            token = query_of(signal, side)
            each = [(float(x), (number, h)) for number, row in reading.writers(signal, side).items()
                    for h, x in enumerate(row) if x > 0]  # fmt: skip
            total, sum_of = sum(x for x, _ in each), 0.0
            for x, writer in sorted(each, reverse=True):
                if sum_of >= covered * total:
                    break
                sum_of += x
                found.append(Step(writer, at[:2], side, token, x / total))
                todo.append((*writer, token))
    return found


def query_of(signal: Signal, side: Side) -> int:
    """The token at which a side of a signal is read."""
    return signal.query if side == "query" else signal.key


class _Without(Tap):
    """One row of a head's queries or keys less what a vector of the stream makes of it."""

    def __init__(self, layer: Layer, signal: Signal, side: Side, change: Tensor) -> None:
        self.layer, self.signal, self.change = layer, signal, change
        self.side: Side = side

    def ask(self, call: Call, flow: Flow | None) -> Call:
        call = channels_of(self.layer, call, flow, "q")
        call = call if self.side == "query" else apart(call)
        name = "q" if self.side == "query" else "k"
        x = getattr(call, name).clone()
        x[:, self.signal.head, query_of(self.signal, self.side)] -= self.change.to(x)
        return replace(call, **{name: x})


@contextmanager
def without_signal(
    reading: Reading, signal: Signal, writer: tuple[int, int], side: Side, *, everywhere: bool = True,
    vectors: Sequence[int] | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Take a signal out of what a head wrote, while the model runs on the same text: o - P o at the token of that side.

    What is taken out `[D]` is given to the block. Compare with `vectors`, as many other singular vectors at random.

    Args:
        writer: (layer, head). everywhere: for all that reads the stream; else for the head of the signal alone, whose
            norm divides as before.
    """
    at = query_of(signal, side)
    written = reading.written(writer[0])[writer[1], at].double()
    written = written - written.mean() if signal.centred else written
    taken = signal.projection(side, vectors) @ written
    if everywhere:

        def less(module: nn.Module, args: Any, output: Any) -> Any:
            y = (output if isinstance(output, Tensor) else output[0]).clone()
            y[:, at] -= taken.to(y)
            return y if isinstance(output, Tensor) else (y, *output[1:])

        hook = reading.layers[writer[0]].module.register_forward_hook(less)
        try:
            yield taken
        finally:
            hook.remove()
        return
    layer = reading.layers[signal.layer]
    norm = _norm_of(reading.blocks[signal.layer], reading.passages[signal.layer], layer.name)
    weights = head_maps(layer)[0 if side == "query" else 1][signal.head]
    name: Literal["q", "k"] = "q" if side == "query" else "k"
    change = (norm.gain * taken / norm.divisor[0, at]) @ weights
    turn, look = turn_of(reading.model, layer, name), reading.looks[signal.layer]
    if turn is not None:
        axis = look.axis if side == "query" else look.mask.k
        change = turn(change[None, None, None], Axis(1, None, given_time=axis.position[:, at : at + 1]))[0, 0, 0]
    with standing_by([layer], lambda layer: _Without(layer, signal, side, change)):
        yield taken


__all__ = ["Reading", "Signal", "Step", "qk_svd", "sparse_set", "trace", "without_signal"]
