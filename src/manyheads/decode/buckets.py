"""One prompt read under several RoPE bases at once, and their next-token logits mixed by confidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.attention.position.rope import Rope, RopePosition
from manyheads.core.check import OptionError, is_number
from manyheads.core.mask import Axis
from manyheads.core.part import Position
from manyheads.core.position import inverse_frequencies

BASES = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 25000.0)
"""The authors' for the use of tools."""
CONFIDENCE = ("logit", "probability", "entropy")
Confidence = Literal["logit", "probability", "entropy"]
_ROWS = frozenset({"input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", "ids", "embeds",
                   "mask", "positions"})  # fmt: skip


@contextmanager
def attention_buckets(
    model: nn.Module, bases: Sequence[float] = BASES, confidence: Confidence = "logit"
) -> Iterator[None]:
    """Let a causal model of ours (adopted, converted or a `Decoder`) run under N bases side by side.

    >>> with attention_buckets(model):
    ...     model.generate(**inputs)

    Run i is the model with rotary frequencies b_i^(-2p/d) in every layer, and has rows of its own in the cache: a batch
    of B is one of N·B inside, run by run. What the model gives is z = Σ_i w_i z_i, w = softmax_i(confidence of z_i), at
    each position, of logits z_i `[B, T, V]`; so a token that is chosen goes to all runs. A cache made inside is of use
    inside only, and search that reorders its rows (beams) is not possible.

    The attention that a key gets by its distance has troughs under RoPE, and the base moves them.

    Args:
        bases: one gives the plain model under that base.
        confidence: `logit`, the largest logit, as the authors' code has it, which a constant added to z_i changes;
            `probability`, its log-probability, or `entropy`, minus the entropy, of which neither does.

    Raises:
        ValueError: a layer of the model does not rotate by a base.

    Source: Chen et al. 2023, arXiv 2312.04455.
    """
    bases = tuple(bases)
    if not bases or not all(is_number(base) and base > 0 for base in bases):
        raise OptionError(f"bases are one or more positive numbers, not {list(bases)}")
    if confidence not in CONFIDENCE:
        raise OptionError(f"confidence={confidence!r} is none of {', '.join(CONFIDENCE)}")
    layers = [each for each in model.modules() if isinstance(each, Attention)]
    if not layers:
        raise ValueError(f"a {type(model).__name__} has no attention of ours; adopt it first")
    for layer in layers:
        if not any(_rotates(piece) for piece in layer.positions):
            raise ValueError(f"layer {layer.site.layer} ({layer.spec}) has no rotary base to vary")
    with ExitStack() as stack:
        for layer in layers:
            _exchange(stack, layer, bases)
        stack.callback(model.register_forward_pre_hook(_repeat(len(bases)), with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(_mixing(len(bases), confidence)).remove)
        yield


def mix_logits(logits: Tensor, confidence: Confidence = "logit") -> Tensor:
    """Σ_i w_i z_i of logits `[N, …, V]`, w = softmax_i(confidence): a weighted geometric mean of distributions."""
    return torch.einsum("n...,n...v->...v", weights_of(logits, confidence), logits)


def weights_of(logits: Tensor, confidence: Confidence = "logit") -> Tensor:
    """The weights `[N, …]` of runs."""
    if confidence == "logit":
        return logits.amax(-1).softmax(0)
    log_p = logits.log_softmax(-1)
    return (log_p.amax(-1) if confidence == "probability" else (log_p.exp() * log_p).sum(-1)).softmax(0)


def waveform(base: float, width: int, length: int) -> Tensor:
    """Mean over pairs p of cos(s · base^(-2p/width)), s = 0 … length - 1: the score that a key like the query gets at
    distance s, float64 `[length]`.
    """
    theta = inverse_frequencies(width, base).double()
    return (torch.arange(length, dtype=torch.float64)[:, None] * theta).cos().mean(-1)


def choose_bases(
    count: int, width: int, length: int, *, first: float = 10000.0, step: float = 500.0, last: float = 30000.0
) -> tuple[float, ...]:
    """Bases whose peaks lie in each other's troughs: to `first` is added, one after the other, the candidate whose
    waveform makes the lowest place of the highest of all as high as it can be, summed over the troughs of the first.

    ASSUMED: the source names a greedy search without its steps.
    """
    own = waveform(first, width, length)
    inner = own[1:-1]
    troughs = 1 + ((inner < own[:-2]) & (inner <= own[2:])).nonzero()[:, 0]
    if not len(troughs) or count < 1:
        raise OptionError(f"count={count}, width={width}, length={length}: one base or more, and longer, with a trough")
    candidates = torch.arange(first + step, last + step / 2, step, dtype=torch.float64).tolist()
    if count - 1 > len(candidates):
        raise OptionError(f"count={count}, but there are {1 + len(candidates)} bases from {first:g} to {last:g}")
    found, high = [first], own[troughs]
    waves = {base: waveform(base, width, length)[troughs] for base in candidates}
    while len(found) < count:
        best = max(waves, key=lambda base: float(torch.maximum(high, waves[base]).sum()))
        high = torch.maximum(high, waves.pop(best))
        found.append(best)
    return tuple(found)


class _Buckets(Position):
    """Rows of run i turn by base i."""

    def __init__(self, piece: RopePosition, bases: Sequence[float]) -> None:
        super().__init__()
        self.at = piece.at
        self.runs = [type(piece)(replace(piece.options, base=base)) for base in bases]

    def turn(self, x: Tensor, axis: Axis) -> Tensor:
        return self._each(x, axis, "turn")

    def turn_back(self, x: Tensor, axis: Axis) -> Tensor:
        return self._each(x, axis, "turn_back")

    def _each(self, x: Tensor, axis: Axis, how: str) -> Tensor:
        n = len(self.runs)
        parts = axis.once((n, "runs"), lambda: [axis.batch(lambda t, i=i: t.chunk(n)[i]) for i in range(n)])
        turned = zip(self.runs, x.chunk(n), parts, strict=True)
        return torch.cat([getattr(run, how)(rows, part) for run, rows, part in turned])


def _rotates(piece: nn.Module) -> bool:
    return isinstance(piece, RopePosition) and cast(Rope, piece.options).pairing != "none"


def _exchange(stack: ExitStack, layer: Attention, bases: Sequence[float]) -> None:
    positions = layer.positions

    def put(pieces: nn.ModuleList) -> None:
        layer.positions = pieces
        layer._place_moves()  # tables of one base (`apart`) would not do for rows of several

    stack.callback(put, positions)
    put(nn.ModuleList([_Buckets(piece, bases) if isinstance(piece, RopePosition) else piece for piece in positions]))


def _repeat(n: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = {name: value for name, value in kwargs.items() if name in _ROWS and isinstance(value, Tensor)}
        tensors = [*args, *named.values()]
        batch = max((len(t) for t in tensors if isinstance(t, Tensor)), default=1)

        def rows(t: Any) -> Any:
            several = isinstance(t, Tensor) and t.dim() > 1 and len(t) == batch
            return t.repeat(n, *[1] * (t.dim() - 1)) if several else t

        return tuple(map(rows, args)), {**kwargs, **{name: rows(value) for name, value in named.items()}}

    return hook


def _mixing(n: int, confidence: Confidence) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        logits = output if isinstance(output, Tensor) else output.logits
        mixed = mix_logits(logits.unflatten(0, (n, -1)), confidence)
        if isinstance(output, Tensor):
            return mixed
        output.logits = mixed
        return output

    return hook


__all__ = ["attention_buckets", "choose_bases", "mix_logits", "waveform", "weights_of"]
