"""Another assignment of query heads to key heads: alike key heads become neighbours, and then fewer.

The order of key heads, each with its query heads and their blocks of W_O, is a symmetry of the layer; a merge of
neighbours (`convert.moves.gqa`) is not blind to it. Two key heads and their value heads are as far apart as what is
lost when one of each stands for both: for the fitted merges, the energy beyond the first principal direction of each
frequency's two numbers and beyond the first v of the two values', weighed by what queries and the output feel; for the
others, the spread around the mean. Groups start as they lie, and two heads change places while the sum over pairs
within groups falls.

Choices: the merge of the heads as they lie is made too, and stays where it does less harm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.convert.moves.gqa import ToGQA, felt_values
from manyheads.convert.stats import AttentionStats, Pairs
from manyheads.convert.stats import measure as statistics
from manyheads.core.check import check_whole
from manyheads.core.part import OptionError
from manyheads.edit.layers import Rows, gqa_layers, inputs_of, measuring, put, relative_error, with_rows
from manyheads.stack.pretrained import ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention

How = Literal["fitted", "lowrank", "mean", "first"]


@dataclass(frozen=True)
class Regrouped:
    """The model, the new order of each layer's key heads, and relative squared errors of its output.

    as_it_lay: of a merge of neighbours as they lay. error: of what was done, no larger; 0 where heads only moved.
    """

    model: ManyheadsForCausalLM
    orders: dict[int, list[int]]
    as_it_lay: dict[int, float]
    error: dict[int, float]


def regroup(
    model: PreTrainedModel,
    tokens: Tensor,
    kv: int | None = None,
    *,
    how: How = "fitted",
    layers: Iterable[int] | None = None,
) -> Regrouped:
    """Put alike key heads side by side, in place, and merge neighbours until `kv` are left.

    >>> regroup(model, windows)  # the same function
    >>> regroup(model, windows, kv=2)

    Args:
        tokens: calibration windows `[N, T]`.
        kv: key heads to leave in each layer, a divisor of what there is; None or all of them: heads only move.
        how: of the merge, see `ToGQA`.

    Raises:
        OptionError: a number that does not divide the key heads, or layers that `gqa_layers` or the merge refuses. The
            model is as it was.
    """
    ours, chosen = gqa_layers(model, layers)
    if how not in ("fitted", "lowrank", "mean", "first"):
        raise OptionError(f"how={how!r}; key heads are merged by fitted, lowrank, mean or first")
    for number, layer in chosen.items():
        if kv is not None:
            check_whole(kv=kv)
            ToGQA(kv, how).target(cast(SeamAttention, layer))
        if why := ToGQA(1, how).refusal(layer.spec):
            raise OptionError(f"layer {number}: {why}")
    made: dict[int, Attention] = {}
    found = Regrouped(ours, {}, {}, {})
    inputs = inputs_of(ours, chosen, tokens)
    with measuring(ours):
        for number, layer in chosen.items():
            x, heads = inputs.pop(number), layer.layout.kv
            wide = cast(SeamAttention, copy.deepcopy(layer).to(x))
            stats = statistics(wide, x, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
            apart = distances(wide, stats, how)
            if kv is None or kv == heads:
                order, errors = chain(apart), (0.0, 0.0)
                made[number] = permuted(layer, order)
            else:
                order = [head for group in groups(apart, kv) for head in group]
                moved = permuted(wide, order)
                fits = [
                    ToGQA(kv, how)(wide, stats),
                    ToGQA(kv, how)(moved, _moved(stats, order, wide.layout.q // heads)),
                ]
                errors = tuple(relative_error(fit, wide, x) for fit in fits)
                better = errors[1] < errors[0]
                order, errors = (order if better else [*range(heads)]), (errors[0], min(errors))
                made[number] = fits[int(better)].to(next(layer.parameters()))
            found.orders[number], found.as_it_lay[number], found.error[number] = order, *errors
    put(ours, made)
    return found


def permuted(layer: SeamAttention | Attention, order: list[int]) -> SeamAttention:
    """The same function with its key heads, and the query heads of each, in another order."""
    rows = Rows.of(layer)
    q, o = (each.unflatten(0, (len(rows.k), -1))[order].flatten(0, 1) for each in (rows.q, rows.o))
    return with_rows(cast(SeamAttention, layer), Rows(q, rows.k[order], rows.v[order], o))


def _moved(stats: AttentionStats, order: list[int], each: int) -> AttentionStats:
    """What is known of query heads, in the new order."""
    heads = [head * each + member for head in order for member in range(each)]
    return stats._replace(
        distance=stats.distance[heads], query=stats.query[heads], value=stats.value[heads], sizes=stats.sizes[heads]
    )


def distances(layer: SeamAttention, stats: AttentionStats, how: How) -> Tensor:
    """`[G, G]`: what is lost of keys and values if one of each stands for two heads', as shares of all there is."""
    rows = Rows.of(layer)
    if how in ("mean", "first"):
        return sum((_spread(side, stats.plain) for side in (rows.k, rows.v)), torch.zeros(()))
    roots = felt_values(layer, stats, rows.o.transpose(0, 1)) if how == "fitted" else None
    values = _beyond(rows.v if roots is None else roots @ rows.v, stats.rows if how == "fitted" else stats.plain)
    if layer.layout.rotary is None:
        return values + _beyond(rows.k, stats.plain)
    pairs, moment = Pairs.of(layer), stats.keys if how == "fitted" else stats.plain
    z = pairs.join(rows.k)
    if how == "fitted":
        diagonal = stats.query.double().diagonal(dim1=1, dim2=2)
        felt = (diagonal[:, pairs.re] + diagonal[:, pairs.im]).unflatten(0, (len(z), -1)).sum(1)
        z = z * felt.sqrt()[..., None]
    spread = torch.einsum("gpd,de,hpe->pgh", z, moment.to(z.dtype), z.conj())
    size = spread.diagonal(dim1=1, dim2=2).real
    a, b = size[:, :, None], size[:, None, :]
    least = (a + b) / 2 - (((a - b) / 2).square() + spread.abs().square()).sqrt()  # of [[a, c], [c*, b]]
    keys = least.clamp_min(0).sum(0) / size.sum().clamp_min(1e-100)
    return (values + keys).fill_diagonal_(0)


def _spread(rows: Tensor, moment: Tensor) -> Tensor:
    """Σ over two heads of E|row x - mean|², `[G, G]`, as a share of all."""
    gram = torch.einsum("gcd,de,hce->gh", rows, moment, rows)
    size = gram.diagonal()
    return (size[:, None] + size - 2 * gram).clamp_min(0) / 2 / size.sum().clamp_min(1e-100)


def _beyond(rows: Tensor, moment: Tensor) -> Tensor:
    """Energy of two heads' rows beyond their first `width` principal directions, `[G, G]`, as a share of all."""
    heads, width, _ = rows.shape
    flat = rows.flatten(0, 1)
    gram = (flat @ moment @ flat.T).unflatten(0, (heads, width)).unflatten(-1, (heads, width))  # [G, w, G, w]
    lost = rows.new_zeros(heads, heads)
    for a, b in combinations(range(heads), 2):
        both = gram[[a, b]][:, :, [a, b]].flatten(2).flatten(0, 1)
        lost[a, b] = lost[b, a] = torch.linalg.eigvalsh(both)[:width].clamp_min(0).sum()
    return lost / torch.einsum("gwgw->", gram).clamp_min(1e-100)


def groups(apart: Tensor, count: int) -> list[list[int]]:
    """`count` groups of equal size with little within them, from distances `[G, G]`: see above."""
    far, heads = apart.tolist(), len(apart)
    size = heads // count
    found = [[*range(at, at + size)] for at in range(0, heads, size)]

    def within(head: int, group: list[int], but: int) -> float:
        return sum(far[head][other] for other in group if other not in (head, but))

    while True:
        best, change = 1e-12, None
        for a, b in combinations(range(count), 2):
            for i, j in product(found[a], found[b]):
                gain = within(i, found[a], j) + within(j, found[b], i) - within(i, found[b], j) - within(j, found[a], i)
                if gain > best:
                    best, change = gain, (a, b, i, j)
        if change is None:
            return sorted(sorted(group) for group in found)
        a, b, i, j = change
        found[a] = [j if head == i else head for head in found[a]]
        found[b] = [i if head == j else head for head in found[b]]


def chain(apart: Tensor) -> list[int]:
    """Heads from the first on, each followed by the nearest of those left."""
    order, far = [0], apart.tolist()
    while len(order) < len(far):
        order.append(min((head for head in range(len(far)) if head not in order), key=lambda h: far[order[-1]][h]))
    return order


__all__ = ["Regrouped", "permuted", "regroup"]
