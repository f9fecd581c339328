"""What proposes tokens: the one interface, and a drafter of noise that tests and comparisons stand on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from manyheads.core.check import check_whole
from manyheads.decode.tree import Tree


@dataclass(frozen=True, eq=False)
class Seen:
    """What is known when a tree is drafted.

    ids: all tokens of each sequence, the root last. hidden: `[B, D]`, what the language model head read when the root
    was chosen (the token before it is the newest that the model has read). trail: `[B, W, D]`, the same of the newest
    tokens, the root's last; known: bool `[B, W]`, where it has any. W is the drafter's `reads`, 1 where it has none.
    """

    ids: list[list[int]]
    hidden: Tensor
    trail: Tensor = field(default_factory=lambda: torch.empty(0, 0, 0))
    known: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bool))


class Trail:
    """What the language model head read of the newest `size` tokens of each sequence of a batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self, hidden: Tensor) -> None:
        """hidden: `[B, D]`, what the first tokens were chosen from."""
        self.rows = hidden.new_zeros(len(hidden), self.size, hidden.shape[-1])
        self.rows[:, -1] = hidden
        self.known = torch.zeros(self.rows.shape[:2], dtype=torch.bool, device=hidden.device)
        self.known[:, -1] = True

    def select(self, sequences: Tensor) -> None:
        self.rows, self.known = self.rows[sequences], self.known[sequences]

    def add(self, read: Tensor, lines: Tensor, depth: Tensor) -> None:
        """Go on by the nodes `lines` `[B, A]` of what was read of a tree `[B, N, D]`: `depth + 1` of them, `[B]`."""
        batch, size = torch.arange(len(read), device=read.device)[:, None], self.size
        place = torch.arange(size, device=read.device) + depth[:, None] + 1  # where each stands in old rows and new
        old, new = place.clamp_max(size - 1), lines.gather(1, (place - size).clamp_min(0))
        fresh = place >= size
        self.rows = torch.where(fresh[..., None], read[batch, new], self.rows[batch, old])
        self.known = fresh | self.known[batch, old]

    def seen(self, ids: list[list[int]]) -> Seen:
        return Seen(ids, self.rows[:, -1], self.rows, self.known)


@runtime_checkable
class Drafter(Protocol):
    """Fills trees. Whatever it says, the text stays the model's own; only the time that it takes changes.

    depth, width: of the largest tree that it can fill. odds: float64 `[depth, width]`, how often choice c at depth d is
    the right token if those before it are, measured or guessed; the tree is chosen by it.
    """

    @property
    def depth(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def odds(self) -> Tensor: ...
    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        """Tokens of the nodes but the root, `[B, N - 1]`; -1 where there is nothing to say."""
        ...


def fill(tree: Tree, table: Tensor) -> Tensor:
    """Tokens of nodes from a table `[B, depth, width]` of choices at each depth, whatever comes before them."""
    depth, choice = tree.places.to(table.device).unbind(-1)
    return table[:, depth, choice]


class RandomDrafter:
    """Tokens at random, the same for every node of one depth and choice."""

    def __init__(self, vocab: int, depth: int = 3, width: int = 3, seed: int = 0) -> None:
        check_whole(vocab=vocab, depth=depth, width=width)
        self.vocab, self.depth, self.width = vocab, depth, width
        self.odds = torch.full((depth, width), 1 / vocab, dtype=torch.float64)
        self._draws = torch.Generator().manual_seed(seed)

    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        shape = (len(seen.ids), max(tree.depth, 1), max(tree.width, 1))
        return fill(tree, torch.randint(self.vocab, shape, generator=self._draws)).to(seen.hidden.device)
