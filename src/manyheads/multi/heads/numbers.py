"""What heads of numbers have in common: how many a row has, in which unit, and which are missing."""

from __future__ import annotations

import math

from torch import Tensor

from manyheads.multi.head import Head


class NumberHead(Head):
    """A head of `size` numbers a row, whose module learns (label - shift) / scale; its kind has these as options."""

    dtype = "number"
    size: int
    shift: float
    scale: float

    def ask_numbers(self) -> None:
        """Raise `OptionError` unless there are numbers, in a unit."""
        self.ask(self.size > 0, f"size={self.size}; at least 1")
        self.ask(self.scale > 0 and math.isfinite(self.scale), f"scale={self.scale} is not above 0")

    def shape(self, features: Tensor) -> tuple[int, ...]:
        return (features.shape[0],) if self.size == 1 else (features.shape[0], self.size)


class RowHead(NumberHead):
    """Its places are rows with any known number."""

    def known(self, target: Tensor) -> Tensor:
        return ~target.isnan() if target.dim() == 1 else (~target.isnan()).any(-1)

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        self.finite(target, ~target.isnan())

    def scaled(self, target: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of known rows as the module learns them, `[n, 1, size]`, zero where missing; and what is missing."""
        true = ((target[known] - self.shift) / self.scale).view(-1, 1, self.size)
        missing = true.isnan()
        return true.masked_fill(missing, 0), missing

    def labels(self, made: Tensor) -> Tensor:
        """What the module makes, `[n, size]`, in the labels' unit and shape."""
        made = made * self.scale + self.shift
        return made.squeeze(-1) if self.size == 1 else made
