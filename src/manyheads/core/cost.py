"""What a layer costs, in exact numbers that tests hold against what is counted."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class Cost(NamedTuple):
    """Costs add over parts.

    parameters: trained numbers. cache_floats: numbers cached for each token (a fraction when a slot serves several
    tokens). state_floats: numbers kept for each sequence whatever its length. token_flops: multiply-adds times two
    for each token. pair_flops: the same for each (query, key) pair, all heads together. windows: (kept, floats) where
    `floats` of the numbers cached for each token are held for the newest `kept` tokens only. shared: (name, numbers) of
    those parameters that a stack owns (`Site.share`); a sum counts each name once. idle: of the others, those that a
    token does not use, since it goes to other experts. used: (name, numbers) that it uses of what is shared, at each
    place where that is not all. packed: (kept, floats, bytes) where `floats` of the numbers cached for each token take
    so many bytes, whatever the dtype of others, and the newest `kept` tokens (None: all) have them.
    """

    parameters: int = 0
    cache_floats: Fraction = Fraction(0)
    state_floats: int = 0
    token_flops: int = 0
    pair_flops: int = 0
    windows: tuple[tuple[int, Fraction], ...] = ()
    shared: tuple[tuple[str, int], ...] = ()
    idle: int = 0
    used: tuple[tuple[str, int], ...] = ()
    packed: tuple[tuple[int | None, Fraction, int], ...] = ()

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        twice = sum(numbers for _, numbers in {*self.shared} & {*other.shared})
        return Cost(
            self.parameters + other.parameters - twice,
            self.cache_floats + other.cache_floats,
            self.state_floats + other.state_floats,
            self.token_flops + other.token_flops,
            self.pair_flops + other.pair_flops,
            self.windows + other.windows,
            tuple(dict.fromkeys(self.shared + other.shared)),
            self.idle + other.idle,
            self.used + other.used,
            self.packed + other.packed,
        )

    @property
    def active(self) -> int:
        """The parameters that a token uses; of what is shared, no more than there is."""
        used: dict[str, int] = {}
        for name, numbers in self.used:
            used[name] = used.get(name, 0) + numbers
        spare = (max(0, size - used[name]) for name, size in self.shared if name in used)
        return self.parameters - self.idle - sum(spare)

    def settled(self) -> Cost:
        """The same without rows that nobody keeps."""
        never = sum(floats for kept, floats in self.windows if not kept)
        lasting = tuple(window for window in self.windows if window[0])
        packed = tuple(each for each in self.packed if each[0] != 0)
        return self._replace(cache_floats=self.cache_floats - never, windows=lasting, packed=packed)

    def again(self) -> Cost:
        """Of another run with the same parameters."""
        return self._replace(parameters=0, shared=(), idle=0, used=())

    def kept(self) -> Cost:
        """Of a run whose rows are in the place of those of another."""
        return self._replace(cache_floats=Fraction(0), windows=(), packed=())

    def cache_bytes(self, tokens: int, itemsize: int = 4) -> int:
        """Bytes of the cache after `tokens` tokens of one sequence."""
        dropped = sum(floats * max(0, tokens - kept) for kept, floats in self.windows)
        plain = (int(self.cache_floats * tokens - dropped) + self.state_floats) * itemsize
        held = ((tokens if kept is None else min(tokens, kept), floats, size) for kept, floats, size in self.packed)
        return plain + sum(count * (size - int(floats) * itemsize) for count, floats, size in held)

    def token_bytes(self, itemsize: int = 4) -> float:
        """Bytes that a token adds to the cache, as long as nothing is forgotten."""
        saved = sum(floats * itemsize - size for _, floats, size in self.packed)
        return float(self.cache_floats * itemsize - saved)


def windows(kept: int | None, floats: Fraction) -> tuple[tuple[int, Fraction], ...]:
    """`Cost.windows` of rows whose newest `kept` tokens are held (None: all)."""
    return () if kept is None or not floats else ((kept, floats),)
