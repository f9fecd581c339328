"""What a layer costs, in exact numbers that tests hold against what is counted."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Cost(NamedTuple):
    """Costs add over parts.

    parameters: trained numbers. cache_floats: numbers cached for each token (a fraction when a slot serves several
    tokens). state_floats: numbers kept for each sequence whatever its length. token_flops: multiply-adds times two
    for each token. pair_flops: the same for each (query, key) pair, all heads together.
    """

    parameters: int = 0
    cache_floats: Fraction = Fraction(0)
    state_floats: int = 0
    token_flops: int = 0
    pair_flops: int = 0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def cache_bytes(self, tokens: int, itemsize: int = 4) -> int:
        """Bytes of the cache after `tokens` tokens of one sequence."""
        return int(self.cache_floats * tokens) * itemsize + self.state_floats * itemsize
