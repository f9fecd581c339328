"""What editors share: which layers may be edited, a layer's heads as rows, layers of other heads in their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.convert.adopt import adopt
from manyheads.convert.moves.common import Layer, like, linear_rows, set_rows
from manyheads.convert.stream import batches
from manyheads.core.linear import quicken
from manyheads.core.spec import Spec
from manyheads.edit.slices import EditError, groups_of, resized
from manyheads.inspect.layers import layers_of
from manyheads.stack.bank import Bank
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.seam import put_attention

ALIKE = frozenset({"gqa", "rope", "window", "softmax", "qk-norm"})
"""Parts that do the same to every head, whichever and however many there are."""
READ = "the rows of layer {} are read by another layer, whose heads would have to change too"


class Rows(NamedTuple):
    """The heads of a `gqa` layer, float64, a bias as one more input channel.

    q `[H, d, D + 1]`, k `[G, d, D + 1]`, v `[G, v, D + 1]`, o `[H, D, v]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    @classmethod
    def of(cls, layer: Attention) -> Rows:
        project, layout = cast(GQAProject, layer.project), layer.layout
        o = project.o_proj.weight.detach().double()
        return cls(
            linear_rows(project.q_proj).unflatten(0, (layout.q, -1)),
            linear_rows(project.k_proj).unflatten(0, (layout.kv, -1)),
            linear_rows(project.v_proj).unflatten(0, (layout.kv, -1)),
            o.unflatten(1, (layout.out, -1)).transpose(0, 1),
        )


def gqa_of(spec: Spec) -> GQA:
    return next(part for part in spec.parts if isinstance(part, GQA))


def spec_of(layer: Attention, rows: Rows, scale: float | None = None) -> Spec:
    """The layer's spec with the numbers of these heads. scale: of scores, where it is not that of their width."""
    (heads, width, _), kv, v = rows.q.shape, len(rows.k), rows.v.shape[1]
    part = replace(resized(gqa_of(layer.spec), layer.dim, heads, kv, width, v), scale=scale)
    return Spec(tuple(part if isinstance(other, GQA) else other for other in layer.spec.parts))


@torch.no_grad()
def with_rows(layer: Layer, rows: Rows, spec: Spec | None = None) -> Layer:
    """A layer with these heads in the place of its own, in evaluation mode; everything else is copied."""
    spec = spec_of(layer, rows, gqa_of(layer.spec).scale) if spec is None else spec
    new = like(layer, spec, len(rows.q))
    heads = tuple(f"project.{name}_proj.weight" for name in "qkvo") + tuple(f"project.{n}_proj.bias" for n in "qkv")
    rest = {name: tensor for name, tensor in layer.state_dict().items() if name not in heads}
    new.load_state_dict(rest, strict=False)
    project = cast(GQAProject, new.project)
    for linear, own in ((project.q_proj, rows.q), (project.k_proj, rows.k), (project.v_proj, rows.v)):
        set_rows(linear, own.flatten(0, 1))
    project.o_proj.weight.copy_(rows.o.transpose(0, 1).flatten(1))
    return new


def own_layers(model: ManyheadsForCausalLM) -> dict[int, Attention]:
    """The layers of a model by number, as `inspect` counts them, those whose rows no other layer reads.

    Raises:
        EditError: layers have weights in common, or blocks run several times with one set of weights.
    """
    if model.config.base is None and model.config.loops > 1:
        raise EditError(f"this model runs its blocks {model.config.loops} times; heads are edited where they run once")
    if any(True for bank in model.modules() if isinstance(bank, Bank) for _ in bank.parameters()):
        raise EditError("layers of this model share weights; heads are edited where each layer has its own")
    read = {id(model.attentions[at]) for at in model.config.kv_source if at is not None}
    own = {id(layer) for layer in model.attentions} - read
    return {layer.number: cast(Attention, layer.module) for layer in layers_of(model) if id(layer.module) in own}


def gqa_layers(
    model: PreTrainedModel, wanted: Iterable[int] | None = None, parts: frozenset[str] = ALIKE
) -> tuple[ManyheadsForCausalLM, dict[int, Attention]]:
    """The model as ours, and the layers to edit (all by default), by number.

    Raises:
        EditError: a layer that is not there, is not `gqa`, has a part beside `parts`, or shares rows or weights with
            others.
    """
    ours = adopt(model)
    own, count = own_layers(ours), len(ours.attentions)
    numbers = range(count) if wanted is None else [*wanted]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise EditError(f"there is no layer {number!r}; this model has 0 to {count - 1}")
        if number not in own:
            raise EditError(READ.format(number))
        layer = own[number]
        groups_of(layer)
        names = [part.name for part in layer.spec.parts]
        if "gqa" not in names:
            raise EditError(f"layer {number} is {layer.spec}; heads of gqa are edited")
        if other := next((name for name in names if name not in parts), None):
            raise EditError(f"layer {number}: {other} may tell heads apart; known not to: {', '.join(sorted(parts))}")
    return ours, {number: own[number] for number in numbers}


def put(model: ManyheadsForCausalLM, made: Mapping[int, Attention]) -> None:
    """Put layers in their places, and what they are into the config."""
    layers = [made.get(number, layer).train(model.training) for number, layer in enumerate(model.attentions)]
    put_attention(model.model, model.config.attention_path, layers)
    model.config.specs = [str(layer.spec) for layer in layers]
    model.config.heads = [layer.heads for layer in layers]
    quicken(model)


@contextmanager
def measuring(model: ManyheadsForCausalLM) -> Iterator[None]:
    """In evaluation mode, without gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def inputs_of(model: ManyheadsForCausalLM, layers: Iterable[int], tokens: Tensor) -> dict[int, Tensor]:
    """What layers are given on windows of tokens `[N, T]`, each one text: `[N, T, D]`, float32 or wider."""
    if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ValueError(f"calibration text is windows of token ids, [N, T], not {tokens.dtype} {[*tokens.shape]}")
    seen: dict[int, list[Tensor]] = {number: [] for number in layers}
    handles = [
        model.attentions[number].register_forward_pre_hook(
            lambda module, args, kwargs, to=to: to.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for number, to in seen.items()
    ]
    try:
        with measuring(model):
            for batch in batches(tokens):
                model(batch.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    wide = torch.promote_types(model.dtype, torch.float32)
    return {number: torch.cat(parts).to(wide) for number, parts in seen.items()}


def relative_error(layer: Attention, source: Attention, x: Tensor) -> float:
    """Σ |y - y_source|² / Σ |y_source|² of two layers' outputs on inputs `[N, T, D]`."""
    apart = size = 0.0
    for part in batches(x):
        want = Attention.forward(source, part.to(next(source.parameters()))).double()
        got = Attention.forward(layer, part.to(next(layer.parameters()))).double()
        apart, size = apart + (got - want).pow(2).sum().item(), size + want.pow(2).sum().item()
    return apart / size if size else 0.0
