"""The attention layers of a model, ours and stock ones alike: how many heads they have, and how to stand by at one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core import stock
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out, attend
from manyheads.core.part import Piece, Project
from manyheads.core.tap import Tap
from manyheads.inspect.look import Look
from manyheads.stack.block import Block


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer of a model.

    number: as `Site` counts it in a model of ours (cross-attention after all others), else in the order of modules.
    heads: those with an output. queries: those with scores. none: why there are no weights, if so. output: the output
    projection of a stock layer, where it is known.
    """

    number: int
    name: str
    module: nn.Module
    heads: int
    queries: int
    none: str | None = None
    output: nn.Module | None = None

    def attach(self, tap: Tap) -> None:
        if isinstance(self.module, Attention):
            self.module.taps = (*self.module.taps, tap)
        else:
            stock.watch(self.module, tap)

    def detach(self, tap: Tap) -> None:
        if isinstance(self.module, Attention):
            self.module.taps = tuple(each for each in self.module.taps if each is not tap)
        else:
            stock.unwatch(self.module, tap)

    def look(self, call: Call, read: Tensor, out: Tensor, flow: Flow | None, unlike: str | None = None) -> Look:
        """What a tap at this layer has seen (`Tap.see`)."""
        if isinstance(self.module, Attention):
            assert flow is not None
            return _look(self, self.module, call.whole, read, out, flow)
        project = None if self.output is None else partial(_project, self.output)
        axis, valid = call.mask.q, call.mask.k.valid
        axis = axis if valid is None else replace(axis, valid=valid[:, -axis.length :])
        return Look(
            self.number,
            self.name,
            axis,
            call,
            read,
            out,
            attend,
            (),
            project,
            none=unlike,
            exact=not self.module.training,
        )

    def output_weight(self) -> Tensor:
        """W_O of each head, `[H, d, D]`.

        Raises:
            ValueError: it is not one matrix.
        """
        module = self.output
        if isinstance(self.module, Attention):
            if type(self.module.project).output is not Project.output:
                raise ValueError(f"{self.name}: its output projection ({self.module.spec}) is not one matrix of heads")
            module = self.module.project.o_proj
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            raise ValueError(f"{self.name}: its output projection is not known")
        weight = weight if type(module).__name__ == "Conv1D" else weight.T
        return weight.detach().unflatten(0, (self.heads, -1))


def layers_of(model: nn.Module) -> list[Layer]:
    """Every layer with attention weights of its own, or a state in their place.

    Raises:
        ValueError: there is none whose queries and keys can be seen.
    """
    found = list(_find(model))
    if not found:
        raise ValueError(
            f"a {type(model).__name__} has no attention layer that can be seen: neither `manyheads.Attention` nor one "
            "that calls transformers' attention functions"
        )
    numbers = [module.site.layer if isinstance(module, Attention) else -1 for _, module in found]
    if len(set(numbers)) < len(found) or -1 in numbers:
        numbers = list(range(len(found)))
    made = [_layer(model, *each) for each in zip(numbers, *zip(*found, strict=True), strict=True)]
    return sorted(made, key=lambda layer: layer.number)


def _find(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention) and module.site.attn_source is not None:
            continue  # it takes the attention weights of another layer, where they can be seen
        if isinstance(module, Attention) or stock.calls_attention(module):
            yield name or type(module).__name__, module
        if isinstance(module, Block):
            for loop, turn in enumerate(module.later, 1):
                for kind, attention in zip(("attention", "cross"), turn, strict=True):
                    if attention is not None:
                        yield f"{name}.{kind} (loop {loop})", attention


def _layer(model: nn.Module, number: int, name: str, module: nn.Module) -> Layer:
    if isinstance(module, Attention):
        none = "it reads a state in place of keys" if module.scan is not None else None
        label = f"layer {number} ({module.spec})"
        return Layer(number, label, module, module.layout.out, module.layout.q, none)
    heads = stock.heads_of(module)
    if heads is None:
        raise ValueError(f"{name}: how many heads a {type(module).__name__} has is not known")
    output = stock.output_of(model, name, module) if "." in name else None
    return Layer(number, f"layer {number} ({name})", module, heads, heads, None, output)


def chosen(model: nn.Module, layers: int | Iterable[int] | None) -> list[Layer]:
    """Some layers by number; one that the model lacks is an error that says what it has."""
    have = {layer.number: layer for layer in layers_of(model)}
    if layers is None:
        return list(have.values())
    wanted = as_list(layers)
    if not wanted:
        raise ValueError("no layers are chosen; leave them out for all")
    highest = max(have)
    missing = [n for n in wanted if not _whole(n) or (n + highest + 1 if n < 0 else n) not in have]
    if missing:
        raise ValueError(f"there is no layer {missing[0]!r}; this model has {_span(sorted(have))}")
    return [have[n + highest + 1 if n < 0 else n] for n in dict.fromkeys(wanted)]


def check_heads(layer: Layer, heads: Sequence[int]) -> list[int]:
    """Heads by number, negative ones from the end."""
    heads = list(heads)
    wrong = [h for h in heads if not _whole(h) or not -layer.heads <= h < layer.heads]
    if wrong:
        raise ValueError(f"there is no head {wrong[0]!r} in {layer.name}; it has {layer.heads}, from 0 on")
    if not heads:
        raise ValueError("no heads are chosen; leave them out for all")
    return list(dict.fromkeys(head % layer.heads for head in heads))


def as_list(value: Any) -> list[Any]:
    """Several things, or one as a list."""
    return list(value) if isinstance(value, Iterable) else [value]


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _span(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"layer {first} alone"
    return f"layers {first} to {last}" if len(numbers) == last - first + 1 else f"layers {', '.join(map(str, numbers))}"


def _look(layer: Layer, attention: Attention, call: Call, read: Tensor, out: Tensor, flow: Flow) -> Look:
    """Parts that split an attention problem into one other (a soft cap) are followed to it; others make it unlike."""
    program, dropped = attention._program(_aside(flow)), attention.training and attention.dropout > 0
    one, unlike = (call, None) if layer.none else followed(attention, call, flow)
    none = "weights are dropped in training, of several problems at once" if unlike and dropped else layer.none

    def project(o: Tensor) -> Tensor:
        return attention.project.output(o, _aside(flow))

    def again(call: Call) -> Out:
        if unlike is None:
            return attend(call, program)
        return attention._attend(call, attention.splitting, _aside(flow))

    return Look(
        layer.number, layer.name, flow.q, one, read, out, again, program, project, unlike, none, flow.view, not dropped
    )


def followed(attention: Attention, call: Call, flow: Flow) -> tuple[Call, str | None]:
    """The problem that parts make of a layer's (a soft cap, say), or why it does not stay one problem of its heads."""
    one = call
    for piece in attention.splitting:
        calls = piece.split(one, _aside(flow))
        same = len(calls) == 1 and type(piece).join is Piece.join
        found = calls[0].whole if same else one
        if not same or found.q.shape[:3] != call.q.shape[:3]:
            problems = f"{len(calls)} attention problems" if len(calls) > 1 else "another attention problem"
            return call, f"{type(piece).__name__} makes {problems} of it"
        one = found
    return one, None


def _aside(flow: Flow) -> Flow:
    """The flow for work beside the pass, which leaves nothing behind."""
    links = replace(flow.links, handed=dict(flow.links.handed), aux={}, memo=dict(flow.links.memo), lse=None)
    return replace(flow, new_state={}, memo=dict(flow.memo), links=links)


def _project(module: nn.Module, o: Tensor) -> Tensor:
    return module(o.transpose(1, 2).flatten(2))


def attach_all(layers: Iterable[Layer], make: Callable[[Layer], Tap]) -> Callable[[], None]:
    """A tap at each layer; what is returned takes them away again."""
    made = [(layer, make(layer)) for layer in layers]
    for layer, tap in made:
        layer.attach(tap)

    def detach() -> None:
        for layer, tap in made:
            layer.detach(tap)

    return detach


__all__ = ["Layer", "as_list", "attach_all", "check_heads", "chosen", "followed", "layers_of"]
