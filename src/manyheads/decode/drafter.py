"""What proposes tokens: the one interface, and a drafter of noise that tests and comparisons stand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from manyheads.decode.tree import Tree


@dataclass(frozen=True, eq=False)
class Seen:
    """What is known when a tree is drafted.

    ids: all tokens of each sequence, the root last. hidden: `[B, D]`, what the language model head read when the root
    was chosen (the token before it is the newest that the model has read).
    """

    ids: list[list[int]]
    hidden: Tensor


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
    depth = torch.tensor(tree.depths[1:], device=table.device) - 1
    choice = torch.tensor([path[-1] for path in tree.paths[1:]], device=table.device)
    return table[:, depth, choice] if len(tree) > 1 else table.new_empty(len(table), 0, dtype=torch.long)


class RandomDrafter:
    """Tokens at random, the same for every node of one depth and choice."""

    def __init__(self, vocab: int, depth: int = 3, width: int = 3, seed: int = 0) -> None:
        self.vocab, self.depth, self.width = vocab, depth, width
        self.odds = torch.full((depth, width), 1 / vocab, dtype=torch.float64)
        self._draws = torch.Generator().manual_seed(seed)

    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        shape = (len(seen.ids), max(tree.depth, 1), max(tree.width, 1))
        return fill(tree, torch.randint(self.vocab, shape, generator=self._draws)).to(seen.hidden.device)
