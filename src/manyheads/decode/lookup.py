"""Prompt look-up: what followed the newest tokens when they stood in the text before.

Source: Saxena 2023, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding); no weights, no training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from manyheads.core.check import check_whole
from manyheads.decode.drafter import Seen
from manyheads.decode.tree import Tree


class PromptLookup:
    """Candidates from the sequence itself: the longest n-gram that the text ends with, and what came after it.

    Earlier places are tried from the longest n-gram and the newest place on; the c-th of unlike first tokens is choice
    c at depth 1, and what followed there is choice 0 at every depth after it.

    Args:
        depth: tokens copied at most. width: places used at most. ngram, least: lengths that are looked up.
        window: the newest tokens of the text that are searched.
    """

    def __init__(self, depth: int = 8, width: int = 2, ngram: int = 3, least: int = 1, window: int = 4096) -> None:
        check_whole(depth=depth, width=width, ngram=ngram, least=least, window=window)
        if ngram < least:
            raise ValueError(f"ngram={ngram} is below least={least}")
        self.depth, self.width, self.ngram, self.least, self.window = depth, width, ngram, least, window
        self.odds = torch.zeros(depth, width, dtype=torch.float64)  # a guess; decoding measures it
        self.odds[:, 0] = 0.6
        self.odds[0, 1:] = 0.1

    def draft(self, seen: Seen, tree: Tree) -> Tensor:
        rows = [self._fill(ids[-self.window :], tree) for ids in seen.ids]
        return torch.tensor(rows, dtype=torch.long, device=seen.hidden.device).view(len(rows), len(tree) - 1)

    def _fill(self, ids: Sequence[int], tree: Tree) -> list[int]:
        found = list(islice(self._places(ids), max(tree.width, 1)))
        tokens = []
        for first, *rest in tree.paths[1:]:
            at = found[first] + len(rest) if first < len(found) and not any(rest) else len(ids)
            tokens.append(ids[at] if at < len(ids) else -1)
        return tokens

    def _places(self, ids: Sequence[int]) -> Iterator[int]:
        """Where to copy from, the best first."""
        told: set[int] = set()
        for length in range(min(self.ngram, len(ids) - 1), self.least - 1, -1):
            ending = list(ids[-length:])
            for start in range(len(ids) - length - 1, -1, -1):
                new = ids[start + length] not in told
                if new and ids[start + length - 1] == ending[-1] and list(ids[start : start + length]) == ending:
                    told.add(ids[start + length])
                    yield start + length
