"""How a layer rotates queries and keys: which channels turn together, and heads without some of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Heads, apart, channels_of, chosen_heads
from manyheads.inspect.edit import standing_by
from manyheads.inspect.layers import Layer

Turn = Callable[[Tensor, Axis], Tensor]
"""Rotates queries or keys `[B, heads, N, E]` as rows of an axis do."""


def turn_of(model: nn.Module, layer: Layer, name: Literal["q", "k"] = "q") -> Turn | None:
    """How a layer turns the queries or keys of its heads; None where nothing turns.

    Of a stock layer it is taken from its own file and its model's rotary embedding; positions are then those of tokens
    counted from the first of the sequence, so that a pass with padding is refused.

    Raises:
        ValueError: it is not known.
    """
    module = layer.module
    if isinstance(module, Attention):
        if not len(module.positions) or module.layout.rotary is None:
            return None
        attention = module
        return lambda x, axis: _all_channels(attention, x, name, axis)
    forward = inspect.unwrap(type(module).forward)
    if "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return None
    rotate = forward.__globals__["apply_rotary_pos_emb"]
    tables = [each for each in model.modules() if type(each).__name__.endswith("RotaryEmbedding")]
    if not tables or not _plain(tables[0], module):
        raise ValueError(f"{layer.name}: how a {type(module).__name__} turns is not known; adopt the model")

    def turn(x: Tensor, axis: Axis) -> Tensor:
        if axis.valid is not None and not bool(axis.valid.all()):
            raise ValueError(f"{layer.name}: positions beside padding are not known; adopt the model")
        cos, sin = tables[0](x, axis.position)
        return rotate(x, x, cos, sin)[0]

    return turn


def _all_channels(attention: Attention, x: Tensor, name: str, axis: Axis) -> Tensor:
    cut = attention.layout.rotary
    assert cut is not None
    turned = x[..., cut]
    for piece in attention.positions:
        turned = (piece.turn_q if name == "q" else piece.turn)(turned, axis)  # type: ignore[operator]
    first, last, _ = cut.indices(x.shape[-1])
    return torch.cat([x[..., :first], turned, x[..., last:]], -1)


def _plain(table: nn.Module, module: nn.Module) -> bool:
    """Whether a rotary embedding turns all channels of a head alike in all layers."""
    width: Any = getattr(module, "head_dim", None)
    frequencies: Any = getattr(table, "inv_freq", None)
    arguments = list(inspect.signature(inspect.unwrap(type(table).forward)).parameters)[1:]
    return isinstance(frequencies, Tensor) and 2 * len(frequencies) == width and len(arguments) == 2


def rotary_pairs(model: nn.Module, layer: Layer) -> tuple[Tensor, Tensor]:
    """Channels of queries that turn together, int `[P, 2]`, the fastest first, and by how much a token, float64 `[P]`.

    Read off the rotation itself: what it makes of unit vectors at position 1.

    Raises:
        ValueError: nothing turns, or not in pairs.
    """
    turn = turn_of(model, layer)
    if turn is None:
        raise ValueError(f"{layer.name} turns no channels of its queries and keys")
    module: Any = layer.module
    width = module.layout.qk_width if isinstance(module, Attention) else module.head_dim
    unit = torch.eye(width, device=next(module.parameters()).device)[None, None]
    turned = turn(unit, Axis(width, None, given_time=torch.ones(1, width, dtype=torch.long, device=unit.device)))
    matrix = turned[0, 0].double()
    beside = matrix - torch.diag(matrix.diagonal())
    partner, moved = beside.abs().argmax(-1), beside.abs().amax(-1)
    first = [c for c in range(width) if moved[c] > 0 and c < partner[c]]
    if any(int(partner[partner[c]]) != c or int((beside[c] != 0).sum()) != 1 for c in first) or not first:
        raise ValueError(f"{layer.name} does not turn its channels in pairs")
    pairs = torch.tensor([[c, int(partner[c])] for c in first])
    angle = torch.atan2(moved[first], matrix.diagonal()[first]).cpu()
    order = angle.argsort(descending=True, stable=True)
    return pairs[order], angle[order]


class Muted(Tap):
    """Heads some channels of whose queries (or keys) are zero."""

    def __init__(self, layer: Layer, heads: list[int], channels: Tensor, name: str) -> None:
        self.layer, self.heads, self.channels, self.name = layer, heads, channels, name

    def ask(self, call: Call, flow: Flow | None) -> Call:
        call = channels_of(self.layer, call, flow, self.name)
        call = apart(call) if self.name == "k" else call
        x = getattr(call, self.name)
        keep = torch.ones(x.shape[1], 1, x.shape[3], dtype=x.dtype, device=x.device)
        keep[torch.tensor(self.heads)[:, None], :, self.channels[None]] = 0
        return replace(call, **{self.name: x * keep})


@contextmanager
def without_pairs(
    model: nn.Module, heads: Heads, pairs: int | Sequence[int], *, of: Literal["q", "k"] = "q"
) -> Iterator[None]:  # fmt: skip
    """Zero rotary pairs of heads while the model runs: their terms are gone from the scores, and nothing else is.

    >>> with without_pairs(model, {4: [1, 3]}, 16):  # the 16 slowest pairs, 32 channels
    ...     model(ids)

    Zeroing whole pairs of queries before rotation, after it, or in the keys is the same.

    Args:
        heads: by layer, such as `{3: [0, 2]}`; None for all heads of a layer.
        pairs: how many of the slowest, or which, 0 being the fastest (see `rotary_pairs`).
        of: queries, so that heads which share keys are told apart, or keys.

    Raises:
        ValueError: a layer, head or pair that does not exist.

    Source: arXiv 2606.21249. (It zeroes the 32 slowest "dimensions"; taken to be channels, and of queries.)
    """
    some = chosen_heads(model, heads)
    if of not in ("q", "k"):
        raise ValueError(f"of={of!r}; pairs of q or of k are zeroed")
    channels = {}
    for layer, _ in some:
        all_pairs, _ = rotary_pairs(model, layer)
        count = len(all_pairs)
        wanted = list(range(count - pairs, count)) if isinstance(pairs, int) else list(pairs)
        if not set(wanted) <= set(range(count)):
            raise ValueError(f"pairs={pairs!r}; {layer.name} has {count} pairs, 0 (the fastest) to {count - 1}")
        channels[layer.number] = all_pairs[wanted].flatten()

    def make(layer: Layer) -> Tap:
        picked = next(heads for each, heads in some if each is layer)
        return Muted(layer, picked, channels[layer.number], of)

    with standing_by([layer for layer, _ in some if len(channels[layer.number])], make):
        yield


__all__ = ["Turn", "rotary_pairs", "turn_of", "without_pairs"]
