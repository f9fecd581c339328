"""Measures of which tokens heads look at: they need token ids, and are told best on tokens drawn at random, twice.

A function takes a `Look` and returns `[B, H, T]`, the mass on the pattern, for queries that have one. Source: Olsson et
al. 2022, arXiv 2209.11895; the overview of Zheng et al. 2024, arXiv 2409.03752.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from manyheads.core.mask import Axis, cols_of, rows_of
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import known_tokens


class Matching:
    """The rule of earlier keys whose token, `shift` places before them, is the query's.

    With shift 0 these are its duplicates, with shift 1 what came after them.
    """

    def __init__(self, ids: Tensor, axis: Axis, shift: int) -> None:
        valid = axis.validity.expand(len(ids), -1)
        self.axis, self.tokens = axis, ids.masked_fill(~valid, -1)
        before = ids.new_full((len(ids), shift), -2)
        self.before = torch.cat([before, self.tokens[:, : ids.shape[1] - shift]], 1).masked_fill(~valid, -2)
        self.shift = shift

    def __call__(self, q: Axis, k: Axis) -> Tensor:
        rows, keys = q.within(self.axis), of_keys(self.before, self.axis, k)
        earlier = cols_of(k.time) < rows_of(q.time) + (1 if self.shift else 0)
        return (rows_of(self.tokens[:, rows]) == cols_of(keys)) & earlier


def of_keys(values: Tensor, axis: Axis, keys: Axis) -> Tensor:
    """Of values of an axis' tokens `[B, T]`, those of keys, which stand at the times of their tokens."""
    at = keys.time - axis.time[:, :1]
    return values.gather(1, at.expand(len(values), -1))


def duplicate_token(look: Look) -> Tensor:
    """Σ A_ts over s < t with the query's own token; undefined where it is new."""
    return look.mass(Matching(known_tokens(look), look.axis, 0))


def induction(look: Look) -> Tensor:
    """Σ A_ts over s ≤ t whose previous token is the query's: [A][B] … [A] looks at [B]; undefined where A is new."""
    return look.mass(Matching(known_tokens(look), look.axis, 1))


def on_tokens(wanted: Tensor) -> Callable[[Look], Tensor]:
    """A measure of the mass on tokens with certain ids, delimiters for example."""

    def token_mass(look: Look) -> Tensor:
        hit = torch.isin(known_tokens(look), wanted.to(look.read.device))
        axis = look.axis
        return look.mass(lambda q, k: cols_of(of_keys(hit, axis, k)))

    return token_mass


def repeated(vocab: int, length: int = 64, batch: int = 4, *, start: int | None = None, seed: int = 0) -> Tensor:
    """Token ids drawn at random, each sequence twice in a row `[batch, 2 · length]`, behind a first token if given."""
    generator = torch.Generator().manual_seed(seed)
    if length > vocab:
        raise ValueError(f"{length} different tokens of a vocabulary of {vocab}")
    once = torch.stack([torch.randperm(vocab, generator=generator)[:length] for _ in range(batch)])
    twice = torch.cat([once, once], 1)
    return twice if start is None else torch.cat([twice.new_full((batch, 1), start), twice], 1)
