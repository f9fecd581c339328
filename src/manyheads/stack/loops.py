"""A stack that runs its blocks several times: what each turn of a layer is, and how the turns have one set of weights.

The layers of loop k are numbered on: of L looped layers, layer l is k·L + l there. So each turn has rows of its own in
the cache, and a layer that reads another's rows reads those of its own loop. Layers behind the looped ones run once,
are numbered behind all turns of these, and read the rows of their last loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.core.part import OptionError, Site
from manyheads.core.spec import Spec
from manyheads.stack.bank import Bank, shapes
from manyheads.stack.maps import Map, sources_of, specs_of
from manyheads.stack.sources import check_layers, per_layer, sites

T = TypeVar("T")


class Turns(NamedTuple):
    """What every layer of every loop is, in the order they run; blocks: the layer whose turn it is, by number."""

    specs: list[str | Spec]
    heads: list[int]
    kv_source: list[int | None]
    attn_source: list[int | None]
    blocks: list[int]

    @classmethod
    def of(
        cls, specs: str | Spec | Sequence[str | Spec], heads: list[int], kv_source: Map, attn_source: Map, loops: int,
        looped: int | None = None,
    ) -> Turns:  # fmt: skip
        """From heads and sources of one loop, and specs: one, one a layer, or one for each turn of each layer.

        looped: how many layers are in the loops, the first ones (None: all).
        """
        layers = len(heads)
        looped = layers if looped is None else looped
        check_whole(layers=layers, loops=loops, looped=looped)
        if looped > layers:
            raise OptionError(f"looped={looped} of {layers} layers; 1 to {layers}")
        firsts, blocks = range(0, looped * loops, looped), [*range(looped)] * loops + [*range(looped, layers)]
        if isinstance(specs, str) or not isinstance(specs, Sequence) or len(specs) != len(blocks):
            once = per_layer(specs, layers, "specs")
            specs = [once[block] for block in blocks]
        once, lines = [], []
        for first in firsts:
            once = specs_of(kv_source, [*specs[first : first + looped], *specs[looped * loops :]])
            lines += once[:looped]
        lines += once[looped:]
        sources = {"kv_source": sources_of(kv_source, layers), "attn_source": sources_of(attn_source, layers)}
        for name, given in sources.items():
            for at in given:
                if at is not None:
                    check_whole(0, **{name: at})
        shifts = [first for first in firsts for _ in range(looped)] + [firsts[-1]] * (layers - looped)
        rows, weights = (
            [None if (at := given[block]) is None else at + shift for block, shift in zip(blocks, shifts, strict=True)]
            for given in sources.values()
        )
        return cls(lines, [heads[block] for block in blocks], rows, weights, blocks)

    @property
    def loops(self) -> list[int]:
        """Which turn of its layer each is."""
        return [self.blocks[:at].count(block) for at, block in enumerate(self.blocks)]

    def once(self, values: Sequence[T]) -> list[T]:
        """Of what each turn has, what the first of each layer has."""
        return [value for value, loop in zip(values, self.loops, strict=True) if loop == 0]

    def given(self, sources: Sequence[int | None]) -> list[int | None]:
        """Sources of the first turns as those of layers."""
        return [None if at is None else self.blocks[at] for at in sources]

    def layers(self, dim: int, causal: bool = True, max_len: int | None = None) -> list[Attention]:
        """The layer of every turn, without weights."""
        where = sites(self.kv_source, self.attn_source, causal, max_len=max_len)
        with torch.device("meta"):
            return [
                Attention(line, dim, heads, site=site)
                for line, heads, site in zip(self.specs, self.heads, where, strict=True)
            ]

    def check(self, dim: int, causal: bool = True, max_len: int | None = None) -> None:
        """As `check_layers`; later turns of a layer must also do with the weights of its first."""
        check_layers(self.specs, dim, self.heads, self.kv_source, self.attn_source, causal, max_len)
        if not any(self.loops):
            return
        every = self.layers(dim, causal, max_len)
        firsts = self.once(every)
        for layer, block in zip(every, self.blocks, strict=True):
            if layer is not firsts[block]:
                agree(layer, firsts[block])


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
