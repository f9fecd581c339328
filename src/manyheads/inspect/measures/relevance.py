"""Patterns that people find in maps, how far a head follows one, and which heads matter by their own weights.

A pattern takes the token ids `[B, S]` (None where there are none) and the axis of keys, and gives the rule of the keys
that it means for each query. Source: Li et al. 2022, arXiv 2112.05364; the relevance of a pattern is recalled, and that
it must stand out of random heads is told here by drawing them, not by a t-test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.core.mask import Axis, Rule, cols_of, rows_of
from manyheads.inspect.ablate import Heads, Inputs, batches_of, run
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.importance import Loss, next_token_loss
from manyheads.inspect.measures.table import HeadTable, Measure
from manyheads.inspect.measures.tokens import of_keys

Pattern = Callable[[Tensor | None, Axis], Rule]


def same_token(ids: Tensor | None, axis: Axis) -> Rule:
    """Other places of the query's token."""
    known = _known(ids)

    def rule(q: Axis, k: Axis) -> Tensor:
        alike = rows_of(of_keys(known, axis, q)) == cols_of(of_keys(known, axis, k))
        return alike & (rows_of(q.time) != cols_of(k.time))

    return rule


def same_sentence(separators: Iterable[int]) -> Pattern:
    """Tokens of the query's sentence, which ends with one of these ids, the separator included."""
    ends = torch.tensor(sorted(separators))

    def pattern(ids: Tensor | None, axis: Axis) -> Rule:
        known = _known(ids)
        end = torch.isin(known, ends.to(known.device)).long()
        sentence = end.cumsum(1) - end

        def rule(q: Axis, k: Axis) -> Tensor:
            return rows_of(of_keys(sentence, axis, q)) == cols_of(of_keys(sentence, axis, k))

        return rule

    return pattern


def offset(steps: int) -> Pattern:
    """The one token `steps` places after the query: -1 the one before, 1 the next (of an encoder)."""
    return lambda ids, axis: lambda q, k: cols_of(k.time) - rows_of(q.time) == steps


def _known(ids: Tensor | None) -> Tensor:
    if ids is None:
        raise ValueError("a pattern of tokens needs token ids among the model's inputs")
    return ids


def relevance(pattern: Pattern) -> Measure:
    """A measure in [0, 1]: the mass on a pattern. A query without a key in it counts 1, as if it meant all keys.

    Use it with `measure(…, fewest=1)` to have the mean over all tokens, the first one too.
    """

    def mass(look: Look) -> Tensor:
        return look.mass(pattern(look.tokens, look.mask.k)).nan_to_num(1.0)

    return mass


def stands_out(table: HeadTable, heads: Heads, *, draws: int = 10_000, seed: int = 0) -> float:
    """How often as many heads drawn at random have a mean as high as these: below 0.05, they are more than chance."""
    check_whole(draws=draws)
    flat = torch.cat([row.flatten() for row in table.values()])
    start, picked = 0, []
    for layer, row in table.items():
        if layer in heads:
            of = heads[layer]
            picked += [start + h for h in (range(len(row)) if of is None else [of] if isinstance(of, int) else of)]
        start += len(row)
    if not picked or set(heads) - set(table):
        raise ValueError(f"heads of layers {[*heads]}; the table has layers {[*table]}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(draws, len(flat), generator=generator).topk(len(picked), 1).indices
    return float((1 + (flat[drawn].mean(1) >= flat[picked].mean() - 1e-12).sum()) / (1 + draws))


def weight_importance(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], loss: Loss = next_token_loss,
    layers: int | Iterable[int] | None = None, *, normalised: bool = True,
) -> HeadTable:  # fmt: skip
    """I_h = Σ_w (w · ∂𝓛/∂w)² over the head's own numbers: rows of W_Q, W_K, W_V and their biases, columns of W_O.

    𝓛 is the mean over all sequences. Heads that share keys count these each. normalised: over the layer's largest.

    Raises:
        ValueError: a layer whose projections are not one matrix each.

    Source: Li et al. 2022 (T3-Vis), arXiv 2112.05364.
    """
    some = chosen(model, layers)
    owned = {layer.number: _projections(layer) for layer in some}
    weights = [p for parts in owned.values() for m in parts.values() for p in m.parameters(recurse=False)]
    total: list[Tensor] = [torch.zeros_like(p, dtype=torch.float64) for p in weights]
    count = 0
    flags = [p.requires_grad for p in weights]
    try:
        for p in weights:
            p.requires_grad_(True)
        for batch in batches_of(inputs):
            with torch.enable_grad():
                each = loss(run(model, batch), batch)
                grads = torch.autograd.grad(each.sum(), weights, allow_unused=True)
            count += len(each)
            total = [t if g is None else t + g.double() for t, g in zip(total, grads, strict=True)]
    finally:
        for p, flag in zip(weights, flags, strict=True):
            p.requires_grad_(flag)
    squares = {id(p): (p.detach().double() * t / count).square() for p, t in zip(weights, total, strict=True)}
    rows = {}
    for layer in some:
        found = torch.zeros(layer.heads, dtype=torch.float64, device=weights[0].device)
        for name, module in owned[layer.number].items():
            for kind, p in module.named_parameters(recurse=False):
                if name == "o" and kind == "bias":
                    continue  # of no head
                each = squares[id(p)]
                each = each.sum(0) if name == "o" else each.flatten(1).sum(1) if each.ndim > 1 else each
                group = each.unflatten(0, (-1, each.numel() // _heads_of(layer, name, each.numel()))).sum(1)
                found = found + group.repeat_interleave(layer.heads // len(group))
        rows[layer.number] = (found / found.max().clamp_min(1e-300) if normalised else found).cpu()
    return HeadTable("weight importance", rows)


def _heads_of(layer: Layer, name: str, numbers: int) -> int:
    """How many heads a projection's numbers are of."""
    if isinstance(layer.module, Attention):
        layout = layer.module.layout
        return layout.kv if name in "kv" else layout.q
    query = _projections(layer)["q"]
    width = query.weight.shape[0] // layer.heads  # type: ignore[union-attr, operator]
    return layer.heads if name in "qo" else numbers // width


def _projections(layer: Layer) -> Mapping[str, Any]:
    place: Any = layer.module.project if isinstance(layer.module, Attention) else layer.module
    names = {"q": ("q_proj", "query", "q"), "k": ("k_proj", "key", "k"), "v": ("v_proj", "value", "v")}
    found: dict[str, Any] = {
        key: next((m for name in each if isinstance(m := getattr(place, name, None), nn.Linear)), None)
        for key, each in names.items()
    }
    found["o"] = place.o_proj if isinstance(layer.module, Attention) else layer.output
    missing = [key for key, module in found.items() if not isinstance(module, nn.Linear)]
    if missing or found["q"].weight.shape[0] % layer.heads:
        raise ValueError(f"{layer.name}: its projections are not one matrix each of queries, keys, values and outputs")
    return found


__all__ = ["Pattern", "offset", "relevance", "same_sentence", "same_token", "stands_out", "weight_importance"]
