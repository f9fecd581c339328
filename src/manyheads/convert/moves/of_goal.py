"""The moves that a goal allows a layer, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import Decoupled, Latent, Merge, Retrieval, Tensorised, Tied, Wide
from manyheads.convert.moves.common import Move
from manyheads.convert.moves.dha import ToDHA, allot, trees_of
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.low_rank import allocate
from manyheads.convert.moves.mfa import ToMFA
from manyheads.convert.moves.mla import ToMLA, choose, chosen
from manyheads.convert.moves.qkv_sharing import ToTied
from manyheads.convert.moves.retrieval import ToRetrieval
from manyheads.convert.moves.tensorllm import ToTensor
from manyheads.convert.plan import Goal, shape_of
from manyheads.convert.probe import keep_heads
from manyheads.convert.stats import AttentionStats, Pairs
from manyheads.convert.stream import Layers, attention_of
from manyheads.convert.survey import looked_up, surveyed
from manyheads.stack.pretrained import ManyheadsConfig
from manyheads.stack.seam import SeamAttention


def every_move(goal: Goal) -> list[Move]:
    """All that a goal may try, before there is a layer: to ask what they refuse."""
    return [*_latents(goal, ()), *_merges(goal), *_others(goal)]


def moves_of(
    goal: Goal, attention: SeamAttention, stats: AttentionStats, damage: Tensor, share: tuple[int, ...] = ()
) -> Sequence[Move]:
    """What a layer may become. damage: of stopping each component, over all layers. share: see `shares`."""
    if goal.to == "gqa":
        return _merges(goal)
    if others := _others(goal, attention, share):
        return others
    how = _latent(goal)
    if how.keep == "damage":
        latents = _latents(goal, choose(damage, goal.turning))
    else:
        folds = [how.fold]
        if how.fold == 0:  # from the stride on, twice as many each time
            pairs = Pairs.of(attention)
            frequencies = int((pairs.index >= 0).sum())
            stride = frequencies // len(chosen(attention, stats, how.keep, how.slots, goal.turning))
            folds = [f for n in range(12) if frequencies % (f := stride * 2**n) == 0 == len(pairs.re) % f]
        components = {f: chosen(attention, stats, how.keep, how.slots, goal.turning, f) for f in folds}
        latents = [move for f, kept in components.items() for move in _latents(goal, kept, f)]
    if share:
        keys = share[0] if how.latents == "split" else None
        latents = [replace(move, rank=sum(share), keys=keys) for move in latents]
    return [*latents, *_merges(goal)]


def _latent(goal: Goal) -> Latent:
    method = goal.method
    return method if isinstance(method, Latent) else Latent()


def _latents(goal: Goal, turning: tuple[tuple[int, int], ...], fold: int = 1) -> list[ToMLA]:
    how = _latent(goal)
    return [ToMLA(goal.floats - 2 * len(turning), turning, how, fold)] if goal.to == "mla" else []


def _merges(goal: Goal) -> list[ToGQA]:
    if goal.to != "gqa" or not goal.kv_heads:
        return []
    method = goal.method
    if not isinstance(method, Merge) or method.how == "best":
        return [ToGQA(goal.kv_heads), ToGQA(goal.kv_heads, "mean")]
    return [ToGQA(goal.kv_heads, method.how, method.basis)]


def _others(goal: Goal, attention: SeamAttention | None = None, share: tuple[int, ...] = ()) -> list[Move]:
    """Moves that are neither latents nor merges; before there is a layer, to ask what they refuse."""
    method = goal.method
    if isinstance(method, Decoupled):
        heads = 2 if attention is None else goal.floats // attention.layout.qk_width
        keys, values = share or (heads // 2, heads - heads // 2)
        return [ToDHA(keys, values, method.fusion)]
    if isinstance(method, Tied):
        return [ToTied(goal.kv_heads, method.how)]
    if isinstance(method, Wide):
        return [ToMFA(goal.floats if method.key_reuse else goal.floats // 2, method.key_reuse, method.q_rank)]
    if isinstance(method, Tensorised):
        ranks = None if method.ranks is None else (method.ranks[0], method.ranks[1], method.ranks[2])
        return [ToTensor(ranks, method.layers, method.sweeps)]
    if isinstance(method, Retrieval):
        return [ToRetrieval(share, method.state)]
    return []


def shares(layers: Layers, goal: Goal, survey: Path, damage: Tensor) -> list[tuple[int, ...]]:
    """Each layer's share of a budget that a method spends by layer (ranks, heads of either kind, which heads)."""
    method = goal.method
    if isinstance(method, Retrieval):
        return kept_heads(layers.config, goal, survey)
    if isinstance(method, Decoupled) and method.heads == "adjusted":
        return adjusted_heads(layers, goal, survey)
    return adjusted_ranks(layers, goal, survey, damage)


def kept_heads(config: ManyheadsConfig, goal: Goal, survey: Path) -> list[tuple[int, ...]]:
    """The attention heads that each layer keeps: the most important to look-ups that fit the budget."""
    method, shape = goal.method, shape_of(config)
    assert isinstance(method, Retrieval)
    importance = looked_up(survey, method.pairs)
    ranking = importance.ranking()
    if method.threshold is not None:
        ranking = [at for at in ranking if importance.accuracy[at[0]][at[1]] >= method.threshold]
    count = len(config.specs)
    return keep_heads(
        ranking, config.heads, [shape.kv_heads] * count, goal.floats * count / shape.head, most=method.heads
    )


def adjusted_heads(layers: Layers, goal: Goal, survey: Path) -> list[tuple[int, ...]]:
    """How many key heads and value heads each layer gets, where a head more leaves the least of them apart."""
    scatters: list[list[float]] = []
    width = 1
    for index in range(len(layers.config.specs)):
        with layers.open(index) as layer:
            attention, (stats, _) = attention_of(layer, layers.config), surveyed(survey, index, layers.devices[index])
            scatters += [tree.scatter for tree in trees_of(attention, stats)]
            width = attention.layout.qk_width
    counts = allot(scatters, goal.floats // width * len(layers.config.specs))
    return list(zip(counts[::2], counts[1::2], strict=True))


def adjusted_ranks(layers: Layers, goal: Goal, survey: Path, damage: Tensor) -> list[tuple[int, ...]]:
    """Each layer's ranks where the method adjusts them, of keys and values apart if their latents are; else none.

    Between half of the uniform rank and twice as much, and uniform in their sum.
    """
    count, how = len(layers.config.specs), _latent(goal)
    if how.ranks == "uniform":
        return [()] * count
    found: list[list[Tensor]] = []
    limits: list[tuple[int, ...]] = []
    for index in range(count):
        with layers.open(index) as layer:
            attention, (stats, _) = attention_of(layer, layers.config), surveyed(survey, index, layers.devices[index])
            move = next(m for m in moves_of(goal, attention, stats, damage) if isinstance(m, ToMLA))
            found.append(move.spectra(attention, stats))
            limits.append(move.ranks(attention))
            exact = replace(move, rank=10**9, keys=10**9 if how.latents == "split" else None)
            limits[-1] = (*limits[-1], *exact.ranks(attention))
    parts = len(found[0])
    ranks = []
    for part in range(parts):
        uniform, exact_ranks = [limit[part] for limit in limits], [limit[parts + part] for limit in limits]
        most = [min(2 * rank, exact) for rank, exact in zip(uniform, exact_ranks, strict=True)]
        least = [max(1, rank // 2) for rank in uniform]
        ranks.append(allocate([spectrum[part] for spectrum in found], sum(uniform), least, most))
    return list(zip(*ranks, strict=True))


def best(
    moves: Sequence[Move], attention: SeamAttention, stats: AttentionStats, heal: LayerwiseHeal, own: Any
) -> SeamAttention:
    """The move that does the least damage to this layer; `own` is the problem of doing what the layer itself does."""
    fits = [move(attention, stats) for move in moves if move.refusal(attention.spec) is None]
    return fits[0] if len(fits) == 1 else min(fits, key=lambda fit: heal.error(fit, *own))
