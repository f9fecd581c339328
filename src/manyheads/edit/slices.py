"""Which weights of a layer are whose head's, and a layer made of some heads of another.

A layer's heads are described by `Groups`: for each query head, the key head and the value head that it reads. `Kept`
says of which old heads a new layer is made, and how they are grouped there. `sliced` then cuts every tensor: what is of
key or value heads by these, what follows the number of query heads by those; what all heads have in common stays.
Nothing here knows a family; layers are `gqa`, `dha` or `mla`, with any parts that treat heads alike or one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.attention.grouped import same_biases
from manyheads.attention.project.dha import DHA
from manyheads.attention.project.gqa import GQA
from manyheads.attention.project.mla import MLA
from manyheads.core.part import Heads, OptionError, Part
from manyheads.core.spec import Spec


class EditError(OptionError):
    """Heads that cannot be edited so, why, and what would fit. Raised before a weight is touched."""


class Groups(NamedTuple):
    """For each query head, the number of the key head and of the value head that it reads."""

    keys: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def even(self) -> int | None:
        """How many key heads there are, where equally many consecutive query heads read each, as `gqa` has it."""
        count = max(self.keys) + 1
        each, rest = divmod(len(self.keys), count)
        plain = tuple(head // max(1, each) for head in range(len(self.keys)))
        return count if not rest and self.keys == self.values == plain else None


class Kept(NamedTuple):
    """A layer made of another's heads: for each new head the old one, and how the new ones are grouped.

    A key or value head may come more than once.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    groups: Groups


def groups_of(layer: Attention) -> Groups:
    """How a layer's heads are grouped.

    Raises:
        EditError: it has no heads with keys of their own, or shares what it has with another layer.
    """
    site, part = layer.site, projection(layer.spec)
    if not isinstance(part, GQA | DHA | MLA):
        hint = "; 'manyheads export --format family' writes its weights out" if part.name == "directshare" else ""
        raise EditError(
            f"layer {site.layer} is {layer.spec}: heads are edited in gqa, dha and mla, and {part.name} is none{hint}"
        )
    if site.kv_source is not None or site.attn_source is not None or site.lends:
        raise EditError(f"layer {site.layer} shares rows or weights of attention with another layer; its heads stay")
    if isinstance(part, DHA):
        return Groups(*part.maps(layer.heads))
    heads, readers = range(layer.heads), layer.heads // layer.layout.kv
    of = tuple(head // readers for head in heads)
    return Groups(of, of)


def projection(spec: Spec) -> Part:
    """The part that makes heads of x."""
    return spec.by_stage["project"][0]


def spec_of(layer: Attention, groups: Groups) -> Spec:
    """A layer's spec with heads of the same widths, grouped so: `gqa` where they are even, else `dha`.

    Raises:
        EditError: no projection has such groups.
    """
    part, heads, layout = projection(layer.spec), len(groups.keys), layer.layout
    if isinstance(part, MLA):
        rank, nope, rope, v = part.widths(Heads.start(layer.dim, layer.heads))
        new: Part = dataclasses.replace(part, rank=rank, nope_dim=nope, rope_dim=rope, v_dim=v)
    elif groups.even is not None:
        given = GQA(bias=part.bias, scale=part.scale) if isinstance(part, DHA) else part
        assert isinstance(given, GQA)
        new = resized(given, layer.dim, heads, groups.even, layout.qk_width, layout.v_width)
    else:
        if layout.v_width != layout.qk_width:
            raise EditError(f"{layer.spec}: heads in uneven groups (dha) have keys and values of one width")
        assert isinstance(part, GQA | DHA)
        new = DHA(
            k_heads=max(groups.keys) + 1, v_heads=max(groups.values) + 1, k_map=groups.keys, v_map=groups.values,
            head_dim=None if layout.qk_width * heads == layer.dim else layout.qk_width,
            bias=same_biases(part.bias, "dha"), scale=part.scale,
        )  # fmt: skip
    return Spec(tuple(new if other is part else other for other in layer.spec.parts))


def resized(part: GQA, dim: int, heads: int, keys: int, width: int, v: int) -> GQA:
    """A projection with other heads: their numbers, and what of their widths does not follow."""
    return dataclasses.replace(
        part, group=None, kv_heads=None if keys == heads else keys, head_dim=None if width * heads == dim else width,
        v_dim=None if v == width else v,
    )  # fmt: skip


def take(tensor: Tensor, axis: int, heads: int, picked: Sequence[int]) -> Tensor:
    """Some heads of a tensor that has them side by side on an axis, in the order given."""
    index = torch.tensor(picked, device=tensor.device)
    return tensor.unflatten(axis, (heads, -1)).index_select(axis, index).flatten(axis, axis + 1)


@torch.no_grad()
def sliced(layer: Attention, kept: Kept) -> Attention:
    """A layer of the same class, dtype, place and mode, whose weights are copies of those of the heads kept.

    Raises:
        EditError: a weight that follows the heads in a way that is not known. OptionError: a part that does not take
            so few heads.
    """
    spec, was, axes = spec_of(layer, kept.groups), groups_of(layer), query_axes(layer)
    with torch.device("meta"):
        new = type(layer)(spec, layer.dim, len(kept.queries), site=layer.site, dropout=layer.dropout)
    wanted, state = {name: tensor.shape for name, tensor in new.state_dict().items()}, {}
    apart = not isinstance(projection(spec), MLA)  # keys and values are heads of their own
    for name, tensor in layer.state_dict().items():
        if apart and name.startswith("project.k_proj"):
            tensor = take(tensor, 0, max(was.keys) + 1, kept.keys)
        elif apart and name.startswith("project.v_proj"):
            tensor = take(tensor, 0, max(was.values) + 1, kept.values)
        for axis in axes[name]:
            tensor = take(tensor, axis, layer.heads, kept.queries)
        if tensor.shape != wanted.get(name):
            raise EditError(
                f"layer {layer.site.layer} ({layer.spec}): {name} {[*tensor.shape]} is not made of heads in a known way"
            )
        state[name] = tensor.clone()
    new.load_state_dict(state, assign=True)
    old = dict(layer.named_parameters())
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(old[name].requires_grad)
    return new.train(layer.training)


def query_axes(layer: Attention) -> dict[str, list[int]]:
    """The axes along which a weight has query heads side by side: those twice as long in a layer of twice as many."""
    doubled = Groups(*(tuple(head for head in reads for _ in range(2)) for reads in groups_of(layer)))
    with torch.device("meta"):
        twice = type(layer)(spec_of(layer, doubled), layer.dim, 2 * layer.heads, site=layer.site)
    sizes = {name: tensor.shape for name, tensor in twice.state_dict().items()}
    return {
        name: [axis for axis, size in enumerate(tensor.shape) if sizes[name][axis] == 2 * size]
        for name, tensor in layer.state_dict().items()
    }


__all__ = ["EditError", "Groups", "Kept", "groups_of", "projection", "query_axes", "sliced", "spec_of", "take"]
