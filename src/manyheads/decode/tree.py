"""A tree of candidate tokens, laid out so that one pass of a model reads all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from manyheads.core.check import check_whole
from manyheads.core.mask import Axis

Path = tuple[int, ...]
"""A node: which choice is taken at each depth. The root is `()`, its second child `(1,)`."""


@dataclass(frozen=True)
class Tree:
    """Nodes by path, the root first, parents before children, siblings in the order of choice.

    The root is the newest token that is certain. A node at depth d stands for the token d places after it.

    >>> Tree.of([(0, 0), (1,)]).paths
    ((), (0,), (1,), (0, 0))
    """

    paths: tuple[Path, ...] = ((),)

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """The smallest tree that holds these nodes; what leads to them is added. Without any it is the root alone."""
        paths = [tuple(path) for path in paths]
        for choice in dict.fromkeys(chain.from_iterable(paths)):
            check_whole(0, choice=choice)
        nodes = {path[:depth] for path in paths for depth in range(len(path) + 1)} | {()}
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> Tree:
        """One candidate for each of the next `depth` tokens, of which there is one at least."""
        check_whole(depth=depth)
        return cls.of([(0,) * depth])

    @classmethod
    def full(cls, widths: Sequence[int]) -> Tree:
        """Every node at depth d has `widths[d]` children, one at least."""
        level: list[Path] = [()]
        for width in widths:
            check_whole(width=width)
            level = [(*path, choice) for path in level for choice in range(width)]
        return cls.of(level)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """How many choices the drafter is asked for at most."""
        return 1 + max((path[-1] for path in self.paths[1:]), default=-1)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node; the root is its own."""
        place = {path: node for node, path in enumerate(self.paths)}
        return tuple(place[path[:-1]] for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return tuple(map(len, self.paths))

    @cached_property
    def places(self) -> Tensor:
        """`[N - 1, 2]`: where each node but the root stands in a table of depths (from 0) and choices."""
        return torch.tensor([[len(path) - 1, path[-1]] for path in self.paths[1:]], dtype=torch.long).view(-1, 2)

    def cut(self, depth: int) -> Tree:
        """The nodes down to a depth."""
        return Tree(tuple(path for path in self.paths if len(path) <= depth))

    @property
    def is_chain(self) -> bool:
        return len(self) == self.depth + 1

    @cached_property
    def lineage(self) -> Tensor:
        """`[N, depth + 1]`: the nodes from the root to each node, which repeats after its depth."""
        rows = []
        for node in range(len(self)):
            line = [node]
            while line[-1]:
                line.append(self.parents[line[-1]])
            rows.append(line[::-1] + [node] * (self.depth + 1 - len(line)))
        return torch.tensor(rows)

    @cached_property
    def ancestors(self) -> Tensor:
        """bool `[N, N]`: whether a node (row) comes after another (column) or is it."""
        return torch.zeros(len(self), len(self), dtype=torch.bool).scatter_(1, self.lineage, True)

    def keep(self, nodes: Tensor) -> tuple[Tree, Tensor]:
        """The tree of the nodes marked by bool `[N]` and all that leads to them, and which nodes of this one it has."""
        kept = (nodes[:, None] & self.ancestors).any(0)
        kept[0] = True
        index = kept.nonzero()[:, 0]
        return Tree(tuple(self.paths[node] for node in index.tolist())), index

    def axis(self, log: Axis) -> Axis:
        """The nodes as tokens after those of `log`: the time and position of a node is that of its depth."""
        after = 1 + torch.tensor(self.depths, device=log.device)[None]
        if self.is_chain and log.start is not None and log.given_position is None:
            return Axis(len(self), log.start + log.length, device=log.device)
        newest = log[log.length - 1 :]  # padding is on the left
        start = log.start + log.length if self.is_chain and log.start is not None else None
        time = None if start is not None else newest.time + after
        position = None if log.given_position is None else newest.position + after
        return Axis(len(self), start, position, time, device=log.device)

    def mask(self, log: Axis) -> Tensor | None:
        """What each node sees of `log` and the nodes, bool `[B or 1, 1, N, S + N]`; None: order says it all."""
        if self.is_chain:
            return None
        past = log.validity[:, None, None].expand(-1, -1, len(self), -1)
        own = self.ancestors.to(past.device)[None, None].expand(len(past), -1, -1, -1)
        return torch.cat([past, own], -1)
