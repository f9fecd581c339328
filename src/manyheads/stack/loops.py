"""A stack that runs its blocks several times: what each turn of a layer is, and how the turns have one set of weights.

The layers of loop k are numbered on: layer l is k·L + l there. So each turn has rows of its own in the cache, and a
layer that reads another's rows reads those of its own loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank, shapes
from manyheads.stack.maps import Map, sources_of, specs_of
from manyheads.stack.sources import check_layers, per_layer, sites


class Turns(NamedTuple):
    """What every layer of every loop is, in the order they run."""

    specs: list[str | Spec]
    heads: list[int]
    kv_source: list[int | None]
    attn_source: list[int | None]

    @classmethod
    def of(
        cls, specs: str | Spec | Sequence[str | Spec], heads: list[int], kv_source: Map, attn_source: Map, loops: int
    ) -> Turns:
        """From heads and sources of one loop, and specs: one, one a layer, or one for each layer of each loop."""
        check_whole(loops=loops)
        layers = len(heads)
        if isinstance(specs, str) or not isinstance(specs, Sequence) or len(specs) != layers * loops:
            specs = per_layer(specs, layers, "specs") * loops
        firsts = range(0, layers * loops, layers)
        lines = [line for first in firsts for line in specs_of(kv_source, specs[first : first + layers])]
        sources = {"kv_source": sources_of(kv_source, layers), "attn_source": sources_of(attn_source, layers)}
        for name, given in sources.items():
            for at in given:
                if at is not None:
                    check_whole(0, **{name: at})
        rows, weights = (
            [None if at is None else at + first for first in firsts for at in given] for given in sources.values()
        )
        return cls(lines, heads * loops, rows, weights)

    def check(self, dim: int, layers: int, causal: bool = True, max_len: int | None = None) -> None:
        """As `check_layers`; later turns of a layer must also do with the weights of its first."""
        check_layers(self.specs, dim, self.heads, self.kv_source, self.attn_source, causal, max_len)
        if len(self.specs) == layers:
            return
        with torch.device("meta"):
            where = sites(self.kv_source, self.attn_source, causal, max_len=max_len)
            places = zip(self.specs, self.heads, where, strict=True)
            every = [Attention(line, dim, heads, site=site) for line, heads, site in places]
        for layer in every[layers:]:
            agree(layer, every[layer.site.layer % layers])


def agree(layer: Attention, first: Attention) -> None:
    """Raise an `OptionError` unless both have weights of the same names and shapes."""
    mine, theirs = shapes(layer), shapes(first)
    if mine != theirs:
        name = min(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        raise OptionError(
            f"layer {layer.site.layer} runs with the weights of layer {first.site.layer}: {layer.spec} has "
            f"{mine.get(name, 'no')} {name}, {first.spec} has {theirs.get(name, 'none')}"
        )


def turn(first: Attention, line: str | Spec, site: Site) -> Attention:
    """A layer of another place, and perhaps another spec, that computes with the weights of `first`.

    It owns none of them: `first` alone is a submodule, is saved, moved and trained.
    """
    with torch.random.fork_rng(devices=[]):  # its own first weights are thrown away
        layer = Attention(line, first.dim, first.heads, site=site._replace(shared=Bank().share), dropout=first.dropout)
    layer.site = site
    _share(layer, first)
    return layer


def _share(layer: nn.Module, owner: nn.Module) -> None:
    """One dictionary of weights serves both, so that what loads, moves, casts or adapts the owner does so for both.

    Parts without weights need not agree, nor what they compute and do not save.
    """
    layer._parameters = owner._parameters
    if owner._buffers.keys() - owner._non_persistent_buffers_set:
        layer._buffers = owner._buffers
    for name, borrowed in vars(owner).items():
        if isinstance(borrowed, nn.Module):  # see `borrow`
            object.__setattr__(layer, name, borrowed)
    if layer._modules.keys() == owner._modules.keys() and all(map(_is_leaf, owner._modules.values())):
        layer._modules = owner._modules
        return
    for name, child in layer._modules.items():
        other = owner._modules.get(name)
        if child is not None and other is not None:
            _share(child, other)


def _is_leaf(module: nn.Module | None) -> bool:
    """One of torch's own layers, which has no options of ours."""
    return module is not None and type(module).__module__.startswith("torch.nn.") and not module._modules
