"""The group rule: which heads may go, where several query heads read one key head."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

from torch import nn

from manyheads.attention import Attention
from manyheads.edit.slices import EditError, Groups, Kept, groups_of
from manyheads.inspect.ablate import chosen_heads

Regroup = Literal["refuse", "repeat", "map"]
"""What becomes of groups that no longer have equally many query heads: see `keep_of`."""
Heads = Mapping[int, int | Iterable[int]]
"""Heads by layer, such as `{3: [0, 1]}`."""


def check_regroup(regroup: str) -> None:
    if regroup not in get_args(Regroup):
        raise ValueError(f"regroup={regroup!r}; uneven groups are one of {', '.join(get_args(Regroup))}")


def keep_of(layer: Attention, removed: Collection[int], regroup: Regroup = "refuse") -> Kept:
    """What is left of a layer without some heads. A key head goes with the last query head that reads it.

    regroup: what to do where the key heads that stay have unequally many readers, which no `gqa` layer has. `map`: the
    layer becomes `dha`, where each query head names its key head: exact, no key is cached twice; keys that several
    heads read are copied while a step runs. `repeat`: key heads are written out several times, so that each serves
    equally many: exact, and still `gqa`, with a larger cache. `refuse`: neither.

    Raises:
        EditError: no head would be left, or groups would be uneven and are not to be; the message says what would fit.
    """
    check_regroup(regroup)
    was = groups_of(layer)
    queries = tuple(head for head in range(layer.heads) if head not in removed)
    if not queries:
        raise EditError(f"layer {layer.site.layer} would lose all its {layer.heads} heads; at least one stays")
    keys, values = (sorted({reads[head] for head in queries}) for reads in was)
    now = Groups(
        tuple(keys.index(was.keys[head]) for head in queries), tuple(values.index(was.values[head]) for head in queries)
    )
    if now.even is not None or was.even is None or regroup == "map":
        return Kept(queries, tuple(keys), tuple(values), now)
    if regroup == "refuse":
        raise EditError(_broken(layer, was, removed))
    each = math.gcd(*(now.keys.count(head) for head in range(len(keys))))
    firsts = queries[::each]
    again = tuple(place // each for place in range(len(queries)))
    return Kept(
        queries, tuple(was.keys[head] for head in firsts), tuple(was.values[head] for head in firsts),
        Groups(again, again),
    )  # fmt: skip


def _broken(layer: Attention, was: Groups, removed: Collection[int]) -> str:
    """Why heads cannot go, and which nearby ones could."""
    members = {key: [head for head, at in enumerate(was.keys) if at == key] for key in sorted({*was.keys})}
    left = [sum(head not in removed for head in heads) for heads in members.values()]
    whole = sorted(head for heads in members.values() if {*heads} & {*removed} for head in heads)
    each = layer.heads // len(members)
    most = each - min(left)
    fits = [f"whole groups ({_listed(whole)})"] if len(whole) < layer.heads else []
    if most < each:
        alike = [sorted(heads, key=lambda head: head not in removed)[:most] for heads in members.values()]
        fits.append(f"{most} of each group ({_listed(sorted(h for heads in alike for h in heads))})")
    return (
        f"layer {layer.site.layer} has {len(members)} key heads, each read by {each} query heads; "
        f"without {_listed(sorted(removed))} they are left with {_listed(left)} readers, which are no equal groups. "
        f"Take {' or '.join(fits)}{', or ' if fits else ''}regroup: 'map' keeps the cache small, 'repeat' keeps gqa"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def named(model: nn.Module, heads: Heads) -> dict[int, list[int]]:
    """Heads by layer as numbers from 0 on, each once, in order; layers and heads that there are not are errors.

    Raises:
        ValueError: naming the layer or head, and what there is.
    """
    found: dict[int, list[int]] = {}
    for layer, picked in chosen_heads(model, heads):
        found[layer.number] = sorted({*found.get(layer.number, []), *picked})
    return dict(sorted(found.items()))


__all__ = ["Heads", "Regroup", "check_regroup", "keep_of", "named"]
