"""Whether heads that copy are needed to find a needle: prompts, scores over many of them, and the causal test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.inspect.ablate import Heads, ablate, chosen_heads
from manyheads.inspect.layers import chosen
from manyheads.inspect.measures.behaviour import copies, greedy, recall
from manyheads.inspect.measures.table import HeadTable

FOUND = 0.5
"""Recall above which a prompt counts as answered."""


@dataclass(frozen=True)
class Needles:
    """Prompts `[N, T]` of one length, each with a needle from its first place to the one after its last."""

    prompts: Tensor
    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def ids(self) -> list[list[int]]:
        """Each needle's token ids."""
        return [self.prompts[at, first:last].tolist() for at, (first, last) in enumerate(self.spans)]


def needles(
    haystack: Tensor, needle: Sequence[Sequence[int]], question: Sequence[Sequence[int]], length: int,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
) -> Needles:  # fmt: skip
    """A prompt for each needle and depth: haystack, needle, haystack, question, `length` tokens together.

    Args:
        haystack: ids of a text `[n]`. needle, question: ids, one of each for every needle. depths: where in the
            haystack the needle stands, 0 at its beginning, 1 at its end.
    """
    if len(needle) != len(question) or not needle or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"{len(needle)} needles, {len(question)} questions, depths {[*depths]} (each 0 to 1)")
    prompts, spans = [], []
    for hidden, asked in zip(needle, question, strict=True):
        room = length - len(hidden) - len(asked)
        if not 0 < room <= len(haystack):
            raise ValueError(f"a prompt of {length} tokens has {room} of haystack; there are {len(haystack)}")
        for depth in depths:
            at = round(depth * room)
            prompts.append([*haystack[:at].tolist(), *hidden, *haystack[at:room].tolist(), *asked])
            spans.append((at, at + len(hidden)))
    return Needles(torch.tensor(prompts), tuple(spans))


def retrieval_heads(
    model: nn.Module, given: Needles, new_tokens: int = 32, layers: int | Iterable[int] | None = None
) -> HeadTable:
    """The mean of R_h (see `retrieval`) over the prompts that were answered; undefined where none was.

    A head of 0.1 or more is a retrieval head. Source: Wu et al. 2024, arXiv 2404.15574.
    """
    found = copies(model, _there(model, given.prompts), given.spans, new_tokens, layers)
    right = found.recall > FOUND
    rows = {layer: row[right].mean(0) for layer, row in found.scores.items()}  # of nothing: not a number
    return HeadTable("retrieval", rows)


def needle_recall(model: nn.Module, given: Needles, heads: Heads | None = None, new_tokens: int = 32) -> Tensor:
    """The share of each needle that the model writes, `[N]`, with some heads taken out."""
    with torch.no_grad(), nullcontext() if heads is None else ablate(model, heads):
        written = greedy(model, _there(model, given.prompts), new_tokens)
    return recall(written.tolist(), given.ids)


@dataclass(frozen=True)
class KnockOut:
    """Recall `[N]` of the same prompts: intact, without the heads, and without random ones in each draw."""

    intact: Tensor
    without: Tensor
    random: tuple[Tensor, ...]
    heads: Heads
    drawn: tuple[Heads, ...]


def knock_out(
    model: nn.Module, given: Needles, heads: Heads, new_tokens: int = 32, *, draws: int = 3, seed: int = 0
) -> KnockOut:
    """Whether a model finds needles without some heads, against as many random others (see `matched`).

    Source: arXiv 2606.21249.
    """
    drawn = [matched(model, heads, seed + draw) for draw in range(draws)]
    arms = [needle_recall(model, given, each, new_tokens) for each in (None, heads, *drawn)]
    return KnockOut(arms[0], arms[1], tuple(arms[2:]), heads, tuple(drawn))


def matched(model: nn.Module, heads: Heads, seed: int = 0) -> dict[int, list[int]]:
    """As many other heads, drawn at random, of the same layers; what a layer cannot give comes from any layer."""
    taken = {layer.number: set(of) for layer, of in chosen_heads(model, heads)}
    left = {x.number: [head for head in range(x.heads) if head not in taken.get(x.number, ())]
            for x in chosen(model, None)}  # fmt: skip
    generator, found, short = torch.Generator().manual_seed(seed), {}, 0
    for layer, of in taken.items():
        order = torch.randperm(len(left[layer]), generator=generator)[: len(of)].tolist()
        found[layer] = [left[layer][at] for at in order]
        left[layer] = [head for head in left[layer] if head not in found[layer]]
        short += len(of) - len(order)
    rest = [(layer, head) for layer, of in left.items() for head in of]
    if short > len(rest):
        raise ValueError(f"{sum(map(len, taken.values()))} heads are more than half of the model's: none to match them")
    for at in torch.randperm(len(rest), generator=generator)[:short].tolist():
        found.setdefault(rest[at][0], []).append(rest[at][1])
    return {layer: sorted(of) for layer, of in sorted(found.items()) if of}


@dataclass(frozen=True)
class Difference:
    """d: Cohen's, of heads with a label against those without. p: of its size, with layers' labels permuted."""

    d: float
    p: float


def layer_test(
    table: HeadTable, heads: Mapping[int, Sequence[int]], *, draws: int = 10_000, seed: int = 0
) -> Difference:
    """Whether labelled heads have other values than the rest, where heads of one layer are not independent.

    Layers keep their values and exchange their labels whole, so they need the same number of heads. Two-sided; the
    observed order counts as a draw. Source: arXiv 2606.21249.
    """
    values = table.grid
    if values.isnan().any():
        raise ValueError("a permutation of layers needs a value for each head, and as many heads in each layer")
    labels = torch.zeros(values.shape, dtype=torch.bool)
    for layer, of in heads.items():
        labels[list(table).index(layer), list(of)] = True
    if not 0 < labels.sum() < labels.numel():
        raise ValueError("some heads have the label and some do not; all or none are given")

    def cohen(mark: Tensor) -> Tensor:
        """Of labels `[…, L, H]`."""
        n = mark.sum((-1, -2)).double()
        other = values.numel() - n
        inside, outside = (values * mark).sum((-1, -2)) / n, (values * ~mark).sum((-1, -2)) / other
        spread = ((values - inside[..., None, None]).square() * mark).sum((-1, -2))
        spread = spread + ((values - outside[..., None, None]).square() * ~mark).sum((-1, -2))
        return (inside - outside) / (spread / (values.numel() - 2)).sqrt()

    generator = torch.Generator().manual_seed(seed)
    orders = torch.rand(draws, len(values), generator=generator).argsort(-1)
    own = cohen(labels)
    others = torch.cat([cohen(labels[some]) for some in orders.split(1024)])
    p = (1 + (others.abs() >= own.abs() - 1e-12).sum().item()) / (1 + draws)
    return Difference(own.item(), p)


def discoveries(p: Sequence[float], rate: float = 0.05) -> list[bool]:
    """Which of several tests stand at a false-discovery rate. Source: Benjamini and Hochberg 1995."""
    values = torch.tensor(p, dtype=torch.float64)
    order, n = values.argsort(), len(p)
    passed = values[order] <= rate * torch.arange(1, n + 1) / n
    last = int(passed.nonzero().max()) + 1 if passed.any() else 0
    return [bool(one) for one in torch.zeros(n, dtype=torch.bool).scatter(0, order[:last], True)]


def _there(model: nn.Module, prompts: Tensor) -> Tensor:
    return prompts.to(next(model.parameters()).device)
