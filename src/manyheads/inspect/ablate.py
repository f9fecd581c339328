"""Interventions: heads taken out (`ablate`) or changed (`steer`) while a model runs. No weight is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis
from manyheads.core.tap import Tap
from manyheads.inspect.capture import watching
from manyheads.inspect.edit import Edit, flags, programmed, standing_by
from manyheads.inspect.layers import Layer, as_list, check_heads, chosen
from manyheads.inspect.look import Look

Heads = Mapping[int, int | Iterable[int] | None]
"""Heads by layer; None: all of them."""
Inputs = Tensor | Mapping[str, Any] | Callable[[], Any]
"""What to run a model on: its first argument, its keywords, or a function that runs it."""
How = Literal["zero", "mean", "resample"]


def run(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output on some inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else inputs()


def batches_of(inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
    """One batch or a list of them, as a list; none at all is an error."""
    found = cast(list[Inputs], list(inputs) if isinstance(inputs, (list, tuple)) else [inputs])
    if not found:
        raise ValueError("there are no inputs to run the model on")
    return found


def chosen_heads(model: nn.Module, heads: Heads) -> list[tuple[Layer, list[int]]]:
    """Some heads by layer; one that the model lacks is an error that says what it has. Both count from 0 on."""
    if not isinstance(heads, Mapping) or not heads:
        raise ValueError(f"heads are given by layer, such as {{3: [0, 2]}}, not {heads!r}")
    wanted = {number: None if of is None else as_list(of) for number, of in heads.items()}
    for number, of in wanted.items():
        below = [n for n in (number, *(of or ())) if isinstance(n, int) and n < 0]
        if below:
            raise ValueError(f"there is no {below[0]} in {{{number!r}: {of}}}: layers and heads count from 0 on")
    layers = [chosen(model, [number])[0] for number in wanted]
    return [
        (layer, check_heads(layer, range(layer.heads) if of is None else of))
        for layer, of in zip(layers, wanted.values(), strict=True)
    ]


class Ablated(Tap):
    """Heads whose output is something else: of `instead(axis, o)`, `[B or 1, n, T or 1, V]`."""

    def __init__(self, heads: list[int], instead: Callable[[Axis, Tensor], Tensor]) -> None:
        self.heads, self.instead = heads, instead
        self.axis: Axis | None = None

    def ask(self, call: Call, flow: Flow | None) -> Call:
        self.axis = call.mask.q if flow is None else flow.q
        return call

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        assert self.axis is not None
        new = self.instead(self.axis, o[:, self.heads]).to(o.dtype)
        index = torch.tensor(self.heads, device=o.device)
        return o.index_copy(1, index, new.expand(len(o), len(self.heads), *o.shape[2:]))


@contextmanager
def ablate(
    model: nn.Module, heads: Heads, how: How = "zero", *, reference: Inputs | None = None
) -> Iterator[None]:  # fmt: skip
    """Take heads out of a running model: in place of what they return, something that knows nothing of the input.

    >>> with ablate(model, {4: [1, 3]}, "mean", reference=ids):
    ...     model(ids)

    How: `zero`, o_h = 0. `mean`: the head's mean output over all tokens of the reference (padding left out).
    `resample`: what the head returns on the reference, at the same place of each sequence; without a reference, what it
    returns for the next sequence of the batch.

    Args:
        heads: by layer, such as `{3: [0, 2]}`; None for all heads of a layer.
        reference: token ids, a dictionary of the model's arguments, or a function that runs the model. It is run once,
            before anything is taken out (in a nested block, by the model as the outer one leaves it).

    Afterwards the model gives the same bits as before.

    Raises:
        ValueError: a layer or head that does not exist, or a way that lacks its reference.
    """
    some = chosen_heads(model, heads)
    if how not in ("zero", "mean", "resample"):
        raise ValueError(f"how={how!r}; heads are replaced by zero, mean or resample")
    if how == "mean" and reference is None:
        raise ValueError("a mean is taken over something: give reference=token ids (or a model's other inputs)")
    if how == "zero" and reference is not None:
        raise ValueError("zero needs no reference; how='mean' or 'resample' reads it")
    seen = {} if reference is None else _outputs(model, [layer for layer, _ in some], reference)

    def make(layer: Layer) -> Tap:
        picked = next(of for each, of in some if each is layer)
        if how == "zero":
            return Ablated(picked, lambda axis, o: torch.zeros_like(o))
        if layer.number not in seen:
            return Ablated(picked, lambda axis, o: _next(o))
        outs, valid = seen[layer.number]
        if how == "mean":
            mean = (outs.double() * valid[:, None, :, None]).sum((0, 2)) / valid.sum()
            return Ablated(picked, lambda axis, o: mean[None, picked, None])
        return Ablated(picked, lambda axis, o: _same_place(outs[:, picked], axis, len(o)))

    with standing_by([layer for layer, _ in some], make):
        yield


def _outputs(model: nn.Module, layers: Sequence[Layer], reference: Inputs) -> dict[int, tuple[Tensor, Tensor]]:
    """Head outputs `[B, H, T, V]` on the reference, and which tokens are none of padding, `[B, T]`."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(look: Look) -> None:
        valid = look.axis.validity.expand(len(look.out), look.out.shape[2])
        found[look.layer] = look.out.detach().clone(), valid.clone()

    with torch.no_grad(), watching(layers, keep):
        run(model, reference)
    missing = [layer for layer in layers if layer.number not in found]
    if missing:
        raise ValueError(f"{missing[0].name} did not run on the reference")
    return found


def _next(o: Tensor) -> Tensor:
    if len(o) < 2:
        raise ValueError("resample reads another sequence of the batch, which has one; give a reference")
    return o.roll(1, 0)


def _same_place(outs: Tensor, axis: Axis, batch: int) -> Tensor:
    time = axis.time.expand(batch, -1)
    if int(time.max()) >= outs.shape[2]:
        raise ValueError(f"the reference has {outs.shape[2]} tokens, this pass reaches token {int(time.max()) + 1}")
    rows = outs[torch.arange(batch, device=outs.device) % len(outs)]
    return rows.gather(2, time[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))


class Move(NamedTuple):
    """A share of the attention mass on one token goes to another; tokens count from the first of a sequence."""

    source: int
    target: int
    share: float = 1.0


@dataclass(frozen=True)
class Moved(Edit):
    """The score program of moves: w[target] += share · w[source], w[source] *= 1 - share, for queries that see both."""

    heads: tuple[int, ...]
    moves: tuple[Move, ...]
    keys: Axis

    def __str__(self) -> str:
        return "moved attention mass"

    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor:
        time = self.keys.time[:, None, None, : weights.shape[-1]]
        heads = flags(self.heads, weights.shape[1], weights.device)
        for source, target, share in self.moves:
            both = (visible & (time == target)).any(-1, keepdim=True) & heads
            moved = share * (weights * (time == source) * both)
            weights = weights - moved + moved.sum(-1, keepdim=True) * (time == target)
        return weights


@dataclass(frozen=True, eq=False)
class Change:
    """What `steer` does to some heads of a layer; vectors are `[V]` or `[n, V]`."""

    scale: float | Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None
    move: tuple[Move, ...] = ()


class Steered(Tap):
    def __init__(self, layer: Layer, heads: list[int], change: Change) -> None:
        self.layer, self.heads, self.change = layer, heads, change

    def ask(self, call: Call, flow: Flow | None) -> Call:
        change = self.change
        wanted = {name: x for name in ("q", "k", "v") if (x := getattr(change, name)) is not None}
        if wanted:
            call = channels_of(self.layer, call, flow, next(iter(wanted)))
            call = call if wanted.keys() == {"q"} else apart(call)
            call = replace(call, **{name: self._added(getattr(call, name), name, x) for name, x in wanted.items()})
        if change.move:
            call = programmed(self.layer, call, flow, Moved((*self.heads,), change.move, call.mask.k))
        return call

    def _added(self, x: Tensor, name: str, direction: Tensor) -> Tensor:
        if (
            direction.shape[-1] != x.shape[-1]
            or direction.ndim > 2
            or direction[..., 0].numel() not in (1, len(self.heads))
        ):
            raise ValueError(
                f"a direction for {name} of {len(self.heads)} heads of {self.layer.name} is [{x.shape[-1]}] or "
                f"[{len(self.heads)}, {x.shape[-1]}], not {[*direction.shape]}"
            )
        index = torch.tensor(self.heads, device=x.device)
        rows = direction.to(x).reshape(-1, 1, x.shape[-1]).expand(len(self.heads), x.shape[2], -1)
        return x.index_add(1, index, rows.expand(len(x), -1, -1, -1))

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        change, index = self.change, torch.tensor(self.heads, device=o.device)
        if change.scale is not None:
            scale = torch.as_tensor(change.scale).to(o).reshape(-1, 1, 1)
            o = o.index_copy(1, index, o[:, self.heads] * scale)
        return o if change.out is None else self._added(o, "out", change.out)


def channels_of(layer: Layer, call: Call, flow: Flow | None, name: str) -> Call:
    """The call with keys formed, so that queries, keys and values have the channels of heads.

    Raises:
        ValueError: in this pass they have others.
    """
    if _unformed(layer, flow):
        raise ValueError(
            f"{layer.name} reads few queries with keys that are not formed, so that {name} has other channels in this "
            "pass; steer out instead, or pass more tokens at once"
        )
    return call.whole


def apart(call: Call) -> Call:
    """The call with keys and values of each query head its own."""
    each = call.q.shape[1] // call.k.shape[1]
    if each == 1:
        return call
    return replace(call, k=call.k.repeat_interleave(each, 1), v=call.v.repeat_interleave(each, 1))


def _unformed(layer: Layer, flow: Flow | None) -> bool:
    """Whether this pass meets keys as they are cached, in other channels than those of heads."""
    if flow is None or not isinstance(layer.module, Attention):
        return False
    moved = flow.moved and bool(layer.module.late_transforms or layer.module.spreads)
    return moved or flow.view != "expanded"


@contextmanager
def steer(
    model: nn.Module, heads: Heads, *, scale: float | Sequence[float] | Tensor | None = None, q: Tensor | None = None,
    k: Tensor | None = None, v: Tensor | None = None, out: Tensor | None = None,
    move: Sequence[Any] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Change what heads do while the model runs; afterwards it gives the same bits as before.

    >>> with steer(model, {4: [1]}, scale=0.5, out=direction):
    ...     model.generate(ids)
    >>> with steer(model, {4: [1]}, move=(0, 3)):  # what the head gives to token 0 goes to token 3
    ...     model(ids)

    Args:
        heads: by layer, such as `{3: [0, 2]}`; None for all heads of a layer.
        scale: factor of a head's output, one for all heads or one for each.
        q, k, v: a direction `[E]` (or `[n, E]`, one a head) that is added to queries, keys or values as they meet,
            after rotation. Heads that share keys are told apart: the others keep theirs.
        out: a direction that is added to head outputs as the output projection takes them.
        move: (source, target) or (source, target, share), or a list of them: so much of the attention mass on one
            token goes to another, for queries that see both; tokens count from the first of a sequence.

    Raises:
        ValueError: a layer or head that does not exist, a direction that does not fit, or mass to be moved where there
            is no one map.
    """
    some = chosen_heads(model, heads)
    change = Change(_scales(scale), q, k, v, out, _moves(move))
    if not any(x is not None and x != () for x in vars(change).values()):
        raise ValueError("nothing is changed: give scale, q, k, v, out or move")
    for layer, of in some:
        _check_change(layer, of, change)

    def make(layer: Layer) -> Tap:
        return Steered(layer, next(of for each, of in some if each is layer), change)

    with standing_by([layer for layer, _ in some], make):
        yield


def _scales(scale: float | Sequence[float] | Tensor | None) -> Tensor | None:
    return None if scale is None else torch.as_tensor(scale, dtype=torch.float64).reshape(-1)


def _moves(move: Sequence[Any] | None) -> tuple[Move, ...]:
    if move is None:
        return ()
    each = [move] if move and isinstance(move[0], int) else list(move)
    moves = tuple(Move(*one) for one in each if len(one) in (2, 3))
    bad = len(moves) < len(each) or not moves
    if bad or any(m.source < 0 or m.target < 0 or m.source == m.target or not 0 <= m.share <= 1 for m in moves):
        raise ValueError(f"move={move!r}; it is (source, target) or (source, target, share), tokens from 0 on, 0 to 1")
    return moves


def _check_change(layer: Layer, heads: Sequence[int], change: Change) -> None:
    asked = [name for name in ("q", "k", "v") if getattr(change, name) is not None]
    if asked and layer.heads != layer.queries:
        raise ValueError(f"{layer.name} has {layer.queries} score heads for {layer.heads} outputs; steer out instead")
    if (change.move or "k" in asked) and layer.none:
        raise ValueError(f"{layer.name} has no weights: {layer.none}")
    if change.scale is not None and change.scale.numel() not in (1, len(heads)):  # type: ignore[union-attr]
        raise ValueError(f"{change.scale.numel()} scales for {len(heads)} heads")  # type: ignore[union-attr]


__all__ = [
    "Heads", "How", "Inputs", "Move", "ablate", "apart", "batches_of", "channels_of", "chosen_heads", "run", "steer",
]  # fmt: skip
