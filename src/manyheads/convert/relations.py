"""Self-attention relations between layers of two models; the loss itself is `learn/relations.py`.

Source: MiniLMv2 2021, arXiv 2012.15828.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.core.flow import Rows, View
from manyheads.core.part import OptionError
from manyheads.learn.relations import PAIRS, Projected, relation_loss


@dataclass(frozen=True)
class Relations:
    """Σ over pairs of KL(Rᵀ ‖ Rˢ), R = softmax(A Bᵀ / √d) `[heads, T, T]` of one layer of teacher and student each.

    A and B are queries, keys or values of all heads, cut anew into `heads` relation heads of width d, which is each
    model's own; the mean is over relation heads and rows. Causal models have causal relations.

    heads: must divide the widths of both models; neither's number of heads. layer, of: of the student and of the
    teacher, counted from the end when negative (upper-middle layers of large teachers teach better than the last).
    weight: in the loss. pairs: such as `qq`; `qk` with as many relation heads as heads is attention itself, and needs
    queries as wide as keys.
    """

    heads: int
    weight: float = 1.0
    layer: int = -1
    of: int = -1
    pairs: tuple[str, ...] = PAIRS

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise OptionError(f"relations: heads={self.heads}; at least 1")
        if wrong := [pair for pair in self.pairs if len(pair) != 2 or not set(pair) <= set("qkv")]:
            raise OptionError(f"relations: {wrong[0]!r} is no pair of q, k and v")
        if not self.pairs or not (math.isfinite(self.weight) and self.weight > 0):
            raise OptionError(f"relations: weight={self.weight} of {len(self.pairs)} pairs; both must be positive")

    def layers(self, student: Any, teacher: Any) -> tuple[Attention, Attention]:
        """The two layers of models of ours; raises an OptionError where there is none of that number."""
        found: list[Attention] = []
        for who, model, index in (("student", student, self.layer), ("teacher", teacher, self.of)):
            layers = model.attentions
            if not -len(layers) <= index < len(layers):
                raise OptionError(f"relations: the {who} has {len(layers)} layers, none of number {index}")
            found.append(layers[index])
        return found[0], found[1]

    def check(self, student: Attention, teacher: Attention) -> None:
        """Raises an OptionError for widths that do not cut into so many relation heads, with numbers that would fit."""
        found = {name: widths(layer) for name, layer in (("student", student), ("teacher", teacher))}
        used = sorted(set("".join(self.pairs)))
        every = [width for each in found.values() for name, width in each.items() if name in used]
        if any(width % self.heads for width in every):
            listed = "; ".join(
                f"{who}: {', '.join(f'{name} {each[name]}' for name in used)}" for who, each in found.items()
            )
            common = math.gcd(*every)
            fits = [heads for heads in range(1, common + 1) if common % heads == 0]
            raise OptionError(f"relations: heads={self.heads} do not divide all widths ({listed}); heads may be {fits}")
        for pair in self.pairs:
            for who, each in found.items():
                if each[pair[0]] != each[pair[1]]:
                    raise OptionError(
                        f"relations: {pair} needs equal widths; the {who} has {pair[0]} {each[pair[0]]}, {pair[1]} "
                        f"{each[pair[1]]}"
                    )

    def __call__(
        self, student: Projected, teacher: Projected, valid: Tensor | None = None, causal: bool = True
    ) -> Tensor:
        """The loss, without its weight. valid: `[B, T]`, False on padding, which is neither a row nor a column."""
        return relation_loss(student, teacher, self.heads, pairs=self.pairs, valid=valid, causal=causal)


def projected(attention: Attention, x: Tensor) -> Projected:
    """Queries, keys and values of an attention's input x `[B, T, D]`; latents are read expanded where they can be."""
    flow = attention._enter(attention._flow(x, None, None, None, None, None))
    q = attention.project.queries(flow)
    rows = {name: row for piece in attention.writing for name, row in piece.write(flow).items()}
    flow.rows = Rows(rows, flow.new)
    views: Sequence[View] = attention.project.views  # type: ignore[assignment]
    flow.view = views[0]
    q, k, v, _ = attention.project.keys(q, flow)
    return Projected(*(heads.transpose(1, 2).flatten(2) for heads in (q, k, v)))


@torch.no_grad()
def widths(attention: Attention) -> dict[str, int]:
    """Of queries, keys and values of all heads together."""
    weight = next(attention.parameters())
    found = projected(attention, weight.new_zeros(1, 2, attention.dim))
    return {name: tensor.shape[-1] for name, tensor in found._asdict().items()}


@contextmanager
def listening(attention: Attention) -> Iterator[list[Projected]]:
    """What the attention projects, pass by pass, while the context is open."""
    heard: list[Projected] = []

    def keep(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        heard.append(projected(attention, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]))

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield heard
    finally:
        handle.remove()
