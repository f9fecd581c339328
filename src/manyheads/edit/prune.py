"""Heads taken out of a model's weights: what is left is smaller, saves, loads, trains and generates."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.convert.adopt import adopt
from manyheads.core.linear import quicken
from manyheads.edit.groups import Heads, Regroup, check_regroup, keep_of, named
from manyheads.edit.layers import READ, own_layers
from manyheads.edit.slices import EditError, Kept, sliced
from manyheads.inspect.ablate import ablate
from manyheads.inspect.layers import layers_of
from manyheads.stack.pretrained import ManyheadsForCausalLM

SLACK = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference of a pruned layer from one whose heads are zero; in half precision, a twentieth."""


def prune(
    model: PreTrainedModel, heads: Heads, *, regroup: Regroup = "refuse", share: bool = False
) -> ManyheadsForCausalLM:
    """A smaller model without some attention heads: rows of W_Q, W_K, W_V and columns of W_O, with their biases, go.

    >>> small = prune(model, {3: [0, 1, 2], 7: [4, 5, 6]})

    It computes what `model` does while the outputs of these heads are zero (`mask`); a bias of W_O stays. Key and value
    heads go, and their share of the cache, when nobody reads them any longer. Layers may be left with different
    numbers of heads.

    Args:
        model: a model whose attention is ours, or one that `adopt` takes (in place; its logits stay). It stays whole.
        heads: query heads to take out, by layer.
        regroup: what becomes of groups of unequal size: `refuse`, `repeat` or `map` (see `edit.groups.keep_of`).
        share: all other weights are those of `model` itself, in place of copies.

    Raises:
        ValueError: a layer or head that does not exist. EditError: all heads of a layer, groups that would be uneven, a
            layer without heads, parts whose heads are not alone. Nothing has been changed then.

    Source: Michel et al. 2019, arXiv 1905.10650 (which heads: `select`).
    """
    check_regroup(regroup)
    ours = adopt(model)
    removed = named(ours, heads)
    modules = own_layers(ours)
    for number in removed.keys() - modules.keys():
        raise EditError(READ.format(number))
    kept = {number: keep_of(modules[number], of, regroup) for number, of in removed.items()}
    return replaced(ours, {number: pruned(modules[number], of) for number, of in kept.items()}, share=share)


def pruned(layer: Attention, kept: Kept) -> Attention:
    """The layer made of the heads kept, compared with the old one where the others give zero.

    Raises:
        EditError: they differ: a part mixes heads, or depends on how many there are.
    """
    new = sliced(layer, kept)
    gone = [head for head in range(layer.heads) if head not in kept.queries]
    difference = _difference(layer, new, gone)
    if not difference <= SLACK.get(next(layer.parameters()).dtype, 0.05):
        raise EditError(
            f"layer {layer.site.layer} ({layer.spec}) computes something else without heads {gone} than with their "
            f"outputs at zero (off by {difference:.2g} of it): a part mixes heads or counts them; mask them instead"
        )
    return new


@torch.no_grad()
def _difference(layer: Attention, new: Attention, gone: list[int]) -> float:
    """The relative difference of the outputs on random tokens."""
    weight, draw = next(layer.parameters()), torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, layer.dim, generator=draw).to(weight)
    options: dict[str, Any] = {}
    if layer.site.cross:
        options["context"] = torch.randn(2, 9, layer.site.context_dim or layer.dim, generator=draw).to(weight)
    training = layer.training
    try:
        layer.eval()
        new.eval()
        with ablate(layer, {layers_of(layer)[0].number: gone}) if gone else torch.no_grad():
            want = Attention.forward(layer, x, **options).double()
        return float((Attention.forward(new, x, **options).double() - want).norm() / want.norm().clamp_min(1e-30))
    finally:
        layer.train(training)
        new.train(training)


def replaced(model: ManyheadsForCausalLM, new: dict[int, Attention], *, share: bool = False) -> ManyheadsForCausalLM:
    """A copy of a model with other attention layers in it (by number), and a config that says so.

    share: its other tensors are those of the model, and no copies.
    """
    old = own_layers(model)
    memo: dict[int, Any] = {id(old[number]): layer for number, layer in new.items()}
    if share:
        memo |= {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, memo)
    layers = made.attentions
    made.config.heads = [layer.heads for layer in layers]
    made.config.specs = [str(layer.spec) for layer in layers]
    quicken(made)
    return made


def parameters(model: nn.Module) -> int:
    """Numbers in a model's weights, those that are tied once."""
    return sum(parameter.numel() for parameter in {*model.parameters()})


__all__ = ["SLACK", "parameters", "prune", "pruned", "replaced"]
