"""`capture`: what heads do in a running model, next to its own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap
from manyheads.inspect.layers import Layer, as_list, attach_all, check_heads, chosen
from manyheads.inspect.look import CaptureError, Look, some_heads

What = Literal["weights", "scores", "q", "k", "v", "out", "lse"]
WORDS: tuple[str, ...] = get_args(What)
SCORED = frozenset({"weights", "scores", "lse"})
"""What exists only where a query has weights over keys."""


@dataclass(frozen=True, eq=False)
class Captured:
    """What one pass of a layer had of the heads n and queries t that were asked for; None: it was not asked for.

    weights, scores `[B, n, t, S]`: weights as values are read with (after score programs), scores as the softmax takes
    them, -inf where a key is hidden. q `[B, n, t, E]`, k `[B, n, S, E]`, v `[B, n, S, V]`: each head with the keys and
    values that it reads, rotated, in the pass's view (for latent attention `expanded` or `absorbed`). out
    `[B, n, t, V]`: head outputs as the output projection takes them. lse `[B, n, t]`. queries: which rows t of the
    pass. axis, keys: of all its queries and keys, with their positions, times and padding.
    """

    layer: int
    heads: tuple[int, ...] | None
    queries: tuple[int, ...]
    view: str
    axis: Axis
    keys: Axis
    weights: Tensor | None = None
    scores: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of all that it holds."""
        return sum(x.nbytes for word in WORDS if isinstance(x := getattr(self, word), Tensor))


class Tape(Mapping[int, Captured]):
    """What was captured: `tape[layer]` of a layer's newest pass, `tape.passes(layer)` of all of them in order."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._passes: dict[int, list[Captured]] = {layer.number: [] for layer in layers}
        self.names = {layer.number: layer.name for layer in layers}

    def passes(self, layer: int) -> list[Captured]:
        """Every pass of a layer, first to last: in generation the prompt, then each step."""
        if layer not in self._passes:
            raise KeyError(f"layer {layer} is not captured; layers {', '.join(map(str, self._passes))} are")
        return self._passes[layer]

    def __getitem__(self, layer: int) -> Captured:
        passes = self.passes(layer)
        if not passes:
            raise KeyError(f"{self.names[layer]} has not run yet")
        return passes[-1]

    def __iter__(self) -> Iterator[int]:
        return iter(self._passes)

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for passes in self._passes.values() for each in passes)

    def clear(self) -> None:
        """Forget what is captured so far, inside the block too."""
        for passes in self._passes.values():
            passes.clear()


class Watcher(Tap):
    """Calls a function with a `Look` at each pass of a layer."""

    def __init__(self, layer: Layer, seen: Callable[[Look], None], grad: bool = False) -> None:
        self.layer, self.seen, self.grad = layer, seen, grad

    def see(self, call: Call, read: Tensor, out: Tensor, flow: Flow | None, unlike: str | None = None) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad and torch.is_grad_enabled()))
            if self.layer.module.training:  # what is drawn at random beside the pass must not change the pass
                stack.enter_context(torch.random.fork_rng([call.q.device] if call.q.is_cuda else []))
            self.seen(self.layer.look(call, read, out, flow, unlike))


@contextmanager
def watching(layers: Iterable[Layer], seen: Callable[[Look], None], *, grad: bool = False) -> Iterator[None]:
    """Call a function with a `Look` at each pass of each of the layers."""
    detach = attach_all(layers, lambda layer: Watcher(layer, seen, grad))
    try:
        yield
    finally:
        detach()


@contextmanager
def capture(
    model: nn.Module, layers: int | Iterable[int] | None = None, heads: int | Iterable[int] | None = None,
    queries: int | slice | Iterable[int] | None = None, what: str | Iterable[str] = ("weights",), *, grad: bool = False,
) -> Iterator[Tape]:  # fmt: skip
    """Keep what heads do while the model runs as it always does.

    >>> with capture(model, layers=[2], heads=[0, 3], queries=slice(-4, None)) as tape:
    ...     model(ids)
    >>> tape[2].weights  # [B, 2, 4, S]

    The model's own kernels compute its outputs, which stay the same bits. What was asked for is computed from queries
    and keys afterwards, for the heads and rows asked for and no others.

    Args:
        model: any model, or a single layer, with attention of ours (built, adopted, converted), or a transformers
            model, encoders included.
        layers, heads: by number, from 0 on (negative: from the end); default all. A head is what has an output.
        queries: rows of each pass: a slice, numbers, or one; default all.
        what: of `weights`, `scores`, `q`, `k`, `v`, `out`, `lse`; see `Captured`.
        grad: keep what is captured connected to the model's gradients.

    Raises:
        ValueError: at once, for a layer, head or word that does not exist, or for weights of a layer without any.
        CaptureError: in a pass, where something asked for cannot be told from queries and keys.
    """
    words = _words(what)
    some = chosen(model, layers)
    picked = _heads(some, heads)
    _check_rows(queries)
    _check_scored(some, words, heads is not None)
    tape = Tape(some)

    def keep(look: Look) -> None:
        tape._passes[look.layer].append(_captured(look, words, picked, _rows(queries, look), grad))

    with watching(some, keep, grad=grad):
        yield tape


def _words(what: str | Iterable[str]) -> frozenset[str]:
    words = frozenset([what] if isinstance(what, str) else as_list(what))
    unknown = sorted(map(str, words - set(WORDS)))
    if unknown or not words:
        said = f"{unknown[0]!r} cannot be captured" if unknown else "nothing is asked for"
        raise ValueError(f"{said}; what is one or more of {', '.join(WORDS)}")
    return words


def _heads(layers: Sequence[Layer], heads: int | Iterable[int] | None) -> dict[int, list[int]] | None:
    if heads is None:
        return None
    return {layer.number: check_heads(layer, as_list(heads)) for layer in layers}


def _check_rows(queries: int | slice | Iterable[int] | None) -> None:
    rows = [queries] if isinstance(queries, int) else queries
    if rows is None or isinstance(rows, slice):
        return
    if not isinstance(rows, Sequence) or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        raise ValueError(f"queries are a slice or whole numbers, not {queries!r}")
    if not rows:
        raise ValueError("no queries are chosen; leave them out for all")


def _rows(queries: int | slice | Iterable[int] | None, look: Look) -> list[int]:
    length = look.axis.length
    if queries is None or isinstance(queries, slice):
        return list(range(length))[queries or slice(None)]
    rows = [queries] if isinstance(queries, int) else list(queries)
    wrong = [row for row in rows if not -length <= row < length]
    if wrong:
        raise CaptureError(f"there is no query {wrong[0]} in a pass of {length} tokens; a slice takes what there is")
    return sorted({row % length for row in rows})


def _check_scored(layers: Sequence[Layer], words: frozenset[str], some_heads: bool) -> None:
    """What a layer does not have is refused before it runs."""
    asked = sorted(words & SCORED)
    without = [layer for layer in layers if layer.none] if asked else []
    if without:
        others = [layer.number for layer in layers if not layer.none]
        instead = f"layers={others} have them" if others else "no layer of it has any"
        raise ValueError(
            f"{without[0].name} has no {asked[0]}: {without[0].none}; {instead}, and q, k, v and out are there for all"
        )
    apart = sorted(words & {"q", "k", "v", "scores", "lse"})
    unequal = [layer for layer in layers if layer.heads != layer.queries] if some_heads and apart else []
    if unequal:
        layer = unequal[0]
        raise ValueError(
            f"{layer.name} has {layer.queries} score heads for {layer.heads} outputs, so that heads of {apart[0]} "
            "cannot be chosen by output; leave heads out for all"
        )


def _captured(
    look: Look, words: frozenset[str], picked: dict[int, list[int]] | None, rows: list[int], grad: bool
) -> Captured:
    heads = None if picked is None else picked[look.layer]
    found: dict[str, Tensor] = {}
    if words & {"weights", "scores"}:
        found |= _maps(look, words, heads, rows)
    if words & {"q", "k", "v"}:
        some = _aligned(look.call, range(look.call.q.shape[1]) if heads is None else heads)
        found |= {"q": some.q[:, :, rows] if some.q.shape[2] == look.axis.length else some.q, "k": some.k, "v": some.v}
    if "lse" in words:
        if look.fused and heads is not None:
            lse = look.lse_of(some_heads(look.call, heads))
        else:
            lse = look.lse if heads is None else look.lse[:, heads]
        found["lse"] = lse[:, :, rows]
    if "out" in words:
        found["out"] = (look.out if heads is None else look.out[:, heads])[:, :, rows]
    kept = {word: x if grad else x.detach().clone() for word, x in found.items() if word in words}
    return Captured(
        look.layer,
        None if heads is None else (*heads,),
        (*rows,),
        look.view,
        _lean(look.axis),
        _lean(look.mask.k),
        **kept,
    )


def _lean(axis: Axis) -> Axis:
    """Without what layers have computed of it."""
    return replace(axis, memo={})


def _aligned(call: Call, heads: Sequence[int]) -> Call:
    """Each head's own queries, keys and values."""
    some = some_heads(call, heads)
    many = some.q.shape[1]
    if many % some.k.shape[1]:
        return some  # a part pairs heads itself
    k, v = (x.repeat_interleave(many // x.shape[1], 1) for x in (some.k, some.v))
    return Call(some.q, k, v, some.mask, some.scale)


def _maps(look: Look, words: frozenset[str], heads: list[int] | None, rows: list[int]) -> dict[str, Tensor]:
    counted = look.read.shape[1] if look.unlike else look.call.q.shape[1]
    if heads is not None and counted != look.heads:
        raise CaptureError(
            f"{look.name} has {counted} maps for {look.heads} outputs, so that maps cannot be chosen by output; leave "
            "heads out for all"
        )
    if "scores" in words:
        look._scored()
    found: dict[str, list[Tensor]] = {"weights": [], "scores": []}
    for tile in look.weights(heads, rows):
        if "weights" in words:
            look.check(tile, heads)
            found["weights"].append(tile.weights)
        if "scores" in words:
            found["scores"].append(tile.scores)
    return {word: torch.cat(parts, 2) for word, parts in found.items() if parts}


__all__ = ["CaptureError", "Captured", "Tape", "What", "capture", "watching"]
