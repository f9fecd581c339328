"""The contract of an output head: options, a module, losses of labelled places, a metric, checks of labels."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.aggregate import read_aggregator
from manyheads.core.kinds import Kinds, Named
from manyheads.core.part import OptionError

MISSING = -100
"""What stands for a missing class; of numbers, NaN does."""

POOLS = ("mean", "max", "first", "last")


@dataclass(frozen=True, kw_only=True)
class Head(Named):
    """What one output is. A kind of head is one file in `multi/heads`: a frozen dataclass that says

    - `build(width)`: the module, from features `[…, width]` to outputs;
    - `known(target)`: bool, True at each *place* that has a label (a row, a cell, a token, a list);
    - `check(target, known, features)`: raises `ValueError` for labels that cannot be;
    - `losses(output, target, known)`: one loss for each known place, `[n]`; nothing else of the batch enters them;
    - `predict(output)`: what a user wants to see;
    - `sums(output, target, known)` and `metrics(sums)`: the metric as sums, which add up over batches.

    The options below are common to all kinds, and given by name.

    Args:
        weight: of the loss. target: the key of the labels in a batch (default: the head's name), so that several heads
            may learn one target. features: a submodule of the trunk whose output is read, in place of the trunk's.
        pool: `mean`, `max`, `first` or `last` token that is no padding, or an aggregator's line (`abmil(heads=4)`),
            which is learned with the head, for a head of rows on features of tokens.
        hidden: width of a hidden layer (0: the head is linear). dropout: before the last layer.
    """

    reads: ClassVar[Literal["rows", "tokens", "lists"]] = "rows"
    dtype: ClassVar[Literal["index", "number"]] = "index"
    unnamed: ClassVar[int] = 0
    better: ClassVar[Literal["higher", "lower"]] = "higher"  # of the first metric
    temper: ClassVar[float | None] = 1.0
    """What uncertainty weighting multiplies the loss by; None where a loss may be negative."""

    weight: float = 1.0
    target: str | None = None
    features: str | None = None
    pool: str | None = None
    hidden: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.ask(math.isfinite(self.weight) and self.weight >= 0, f"weight={self.weight} is no finite number from 0 on")
        if self.pool is not None and self.pool not in POOLS:
            self._check_pool(self.pool)
        self.ask(self.pool is None or self.reads == "rows", f"pool={self.pool!r}, but it reads {self.reads}")
        self.ask(self.hidden >= 0, f"hidden={self.hidden} is negative")
        self.ask(0 <= self.dropout < 1, f"dropout={self.dropout} is not in [0, 1)")

    def _check_pool(self, line: str) -> None:
        try:
            options = read_aggregator(line)
        except OptionError as error:
            raise type(error)(f"{self.name}: pool={line!r} is none of {', '.join(POOLS)}, and {error}") from None
        fits = options.tokens() is None and not options.merges and not options.needs
        self.ask(fits, f"pool={line!r} does not pool any number of tokens on its own")

    def layers(self, width: int, outputs: int) -> nn.Module:
        """The usual module: linear, or with one hidden layer."""
        last: list[nn.Module] = [nn.Dropout(self.dropout)] if self.dropout else []
        if not self.hidden:
            return nn.Sequential(*last, nn.Linear(width, outputs)) if last else nn.Linear(width, outputs)
        return nn.Sequential(nn.Linear(width, self.hidden), nn.GELU(), *last, nn.Linear(self.hidden, outputs))

    def build(self, width: int) -> nn.Module:
        raise NotImplementedError

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs of all rows. mask: bool `[B, T]`, False on padding."""
        return net(features)

    def shape(self, features: Tensor) -> tuple[int, ...]:
        """What the labels of these features are shaped like."""
        return tuple(features.shape[:1])

    def known(self, target: Tensor) -> Tensor:
        return target != MISSING if self.dtype == "index" else ~target.isnan()

    def check(self, target: Tensor, known: Tensor, features: Tensor) -> None:
        """Raise `ValueError` for labels that cannot be. Those that are missing were told apart before."""

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        raise NotImplementedError

    def predict(self, output: Tensor) -> Tensor:
        raise NotImplementedError

    def likely(self, output: Tensor) -> Tensor | None:
        """How probable the head holds its prediction; None where it does not say."""

    def below(self, output: Tensor, target: Tensor) -> Tensor | None:
        """P(y ≤ target) as the head has it, NaN where the label is missing; None where it does not say."""

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        raise NotImplementedError

    def metrics(self, sums: Tensor) -> dict[str, float]:
        raise NotImplementedError

    def tidy(self, target: Any, features: Tensor) -> Tensor | None:
        """Labels as a tensor on the features' device, missing ones marked in one way; None where there are none at all.

        Missing are NaN and None, and -100 where labels are classes.
        """
        if target is None:
            return None
        if not isinstance(target, Tensor):
            target = torch.tensor(_filled(target), dtype=torch.float64)
        target = target.to(features.device)
        if self.dtype == "number":
            target = target.to(features.dtype if features.dtype == torch.float64 else torch.float32)
        elif target.is_floating_point():
            missing = target.isnan()
            whole = target.masked_fill(missing, MISSING)
            if bool((whole != whole.round()).any()):
                raise ValueError(f"labels are whole numbers, not {float(whole[whole != whole.round()][0]):g}")
            target = whole.long()
        else:
            target = target.long()
        wanted = self.shape(features)
        if len(wanted) == 1 and target.shape == (*wanted, 1):
            target = target.squeeze(-1)
        if target.shape != wanted:
            raise ValueError(f"labels are {list(target.shape)}, but these features need {list(wanted)}")
        return target

    def within(self, target: Tensor, known: Tensor, count: int) -> None:
        """Classes are 0 to count - 1."""
        wrong = known & ((target < 0) | (target >= count))
        if bool(wrong.any()):
            raise ValueError(f"label {int(target[wrong][0])} is out of range: 0 to {count - 1}, or missing ({MISSING})")

    def finite(self, target: Tensor, known: Tensor) -> None:
        if bool((known & target.isinf()).any()):
            raise ValueError("a label is infinite")


def _filled(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_filled(each) for each in value]
    return math.nan if value is None else value


def share(sums: Tensor) -> float:
    """The first sum over the second; NaN of nothing."""
    return float(sums[0] / sums[1]) if float(sums[1]) else math.nan


KINDS = Kinds(Head, "head {}")
register_head, find_head, read_head = KINDS.register, KINDS.find, KINDS.read


def to_fields(head: Head) -> dict[str, Any]:
    """A head as JSON: its kind, and the options that are not the default."""
    options = {each.name: getattr(head, each.name) for each in dataclasses.fields(head)}
    defaults = {each.name: each.default for each in dataclasses.fields(head)}
    return {"kind": head.name, **{key: value for key, value in options.items() if value != defaults[key]}}


def from_fields(fields: dict[str, Any]) -> Head:
    options: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    kind = find_head(options.pop("kind"))
    return kind(**options)


__all__ = ["MISSING", "Head", "find_head", "read_head", "register_head"]
