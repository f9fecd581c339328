"""What a drafted step costs and brings, and the tree that follows: from costs by rows, and odds by depth and choice."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.decode.tree import Path, Tree
from manyheads.decode.verify import Verifier
from manyheads.stack.pretrained import ManyheadsForCausalLM

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows a sequence of which passes are timed."""
REPEATS = 3
PRIOR = 16
"""Steps that what a drafter says of its odds counts for, against what is measured."""
WORTH = 1.05
"""What a tree must be predicted to gain at least: less than that is within what timing can tell."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by rows a sequence, of a batch of so many sequences; between measured ones on a line."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    batch: int = 1

    def __call__(self, rows: int) -> float:
        places = [*zip(self.rows, self.seconds, strict=True)]
        below = max((place for place in places if place[0] <= rows), default=places[0])
        above = min((place for place in places if place[0] >= rows), default=None)
        if above is None:  # as from the last two that were measured
            (a, before), (b, last) = places[-2:] if len(places) > 1 else [(0, 0.0), places[-1]]
            return last + (rows - b) * max(0.0, last - before) / (b - a)
        share = 0.0 if above[0] == below[0] else (rows - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


_measured: WeakKeyDictionary[ManyheadsForCausalLM, dict[tuple[int, int], Costs]] = WeakKeyDictionary()


def costs(model: ManyheadsForCausalLM, batch: int = 1, past: int = 128, rows: Sequence[int] = ROWS) -> Costs:
    """Time passes of a model, once for a batch and a length of the past (to the next power of two).

    Each is the fastest of a few, so that what else runs on the machine counts as little as it can.
    """
    past = 1 << max(0, past - 1).bit_length()
    known = _measured.setdefault(model, {})
    if (batch, past) not in known:
        known[batch, past] = _time(model, batch, past, rows)
    return known[batch, past]


@torch.no_grad()
def _time(model: ManyheadsForCausalLM, batch: int, past: int, rows: Sequence[int]) -> Costs:
    verifier = Verifier(model)
    verifier.start(torch.zeros(batch, past, dtype=torch.long, device=model.device))
    seconds = []
    for count in rows:
        tree = Tree.of([(choice,) for choice in range(count - 1)])
        best = math.inf
        for _ in range(REPEATS + 1):
            began = now(model)
            verifier.read(tree, torch.zeros(batch, count, dtype=torch.long, device=model.device))
            best = min(best, now(model) - began)
            verifier.cache.rollback(count)
        seconds.append(max([best, *seconds]))  # more rows are not less work
    return Costs(tuple(rows), tuple(seconds), batch)


def now(model: PreTrainedModel) -> float:
    """Seconds, once all that the model was asked for is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@dataclass
class Acceptance:
    """How drafts fared, by depth (the head that proposed) and choice.

    asked: `[depth, width]`, how often a node of this depth and choice stood after tokens that were all right.
    right: how often it was then right too.
    """

    asked: Tensor
    right: Tensor

    @classmethod
    def none(cls, shape: Sequence[int] = (0, 0)) -> Acceptance:
        return cls(*(torch.zeros(*shape, dtype=torch.float64) for _ in range(2)))

    @property
    def rate(self) -> Tensor:
        """`[depth, width]`, not a number where nothing was asked."""
        return self.right / self.asked

    @property
    def by_depth(self) -> list[float]:
        """Of the steps that came so far and drafted on, in how many one of the choices was right."""
        return (self.right.sum(-1) / self.asked[:, 0]).tolist()

    def add(self, tree: Tree, asked: Tensor, right: Tensor) -> None:
        """Count the nodes but the root: how often each, `[N - 1]`, was asked and was right."""
        places = tree.places.unbind(-1)
        for counts, more in ((self.asked, asked), (self.right, right)):
            counts.index_put_(places, more.to(counts), accumulate=True)

    def fade(self, share: float) -> None:
        """Let what was counted weigh less against what comes."""
        self.asked *= share
        self.right *= share

    def odds(self, prior: Tensor) -> Tensor:
        return (self.right + PRIOR * prior) / (self.asked + PRIOR)


@dataclass(frozen=True)
class Plan:
    """The tree that is drafted, and what is expected of it.

    tokens: a step. gain: tokens a second against plain decoding. A gain of 1 with the root alone is plain decoding.
    """

    tree: Tree
    tokens: float
    gain: float

    @classmethod
    def none(cls) -> Plan:
        return cls(Tree(), 1.0, 1.0)

    @property
    def plain(self) -> bool:
        return len(self.tree) == 1


def grow(odds: Tensor) -> Iterator[tuple[Path, float]]:
    """Nodes from the likeliest on, each with how often the text comes through it.

    That is the product of the odds along its path: what is right at one depth is taken to say nothing of the next.
    """
    table = odds.tolist()
    heap: list[tuple[float, Path]] = []

    def offer(path: Path, before: float) -> None:
        depth, choice = len(path), path[-1]
        if depth <= len(table) and choice < len(table[0]) and (chance := before * table[depth - 1][choice]) > 0:
            heapq.heappush(heap, (-chance, path))

    offer((0,), 1.0)
    reach: dict[Path, float] = {(): 1.0}
    while heap:
        chance, path = heapq.heappop(heap)
        reach[path] = -chance
        yield path, -chance
        offer((*path[:-1], path[-1] + 1), reach[path[:-1]])
        offer((*path, 0), -chance)


def plan(odds: Tensor, cost: Callable[[int], float], draft: float = 0.0, most: int = 64) -> Plan:
    """The tree of at most `most` nodes that is predicted to write most tokens a second.

    Args:
        odds: `[depth, width]`, see `Drafter`. cost: seconds of a pass by rows. draft: seconds to fill a tree.
    """
    ordered = odds.double().clamp(0, 1)
    ordered = ordered.cummin(-1).values  # a choice is offered after those before it
    best, paths, tokens = Plan.none(), [], 1.0
    for path, chance in grow(ordered):
        if len(paths) + 2 > most:
            break
        paths.append(path)
        tokens += chance
        gain = tokens * cost(1) / (cost(len(paths) + 1) + draft)
        if gain > best.gain:
            best = Plan(Tree.of(paths), tokens, gain)
    return best if best.gain >= WORTH else Plan.none()
