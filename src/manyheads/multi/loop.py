"""The training loop of a table: curves of each head, the best weights; and the width of models of one head."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyheads.multi.head import Head
from manyheads.multi.model import MultiHead

Curves = dict[str, dict[str, list[float | None]]]


class Measured(NamedTuple):
    """loss: of all heads. losses, metrics: each head's own. outputs: by head."""

    loss: float
    losses: dict[str, float]
    metrics: dict[str, dict[str, float]]
    outputs: dict[str, Tensor]


def measure(model: MultiHead, x: Tensor, targets: Mapping[str, Tensor]) -> Measured:
    """What a model says of these rows, and how right that is."""
    training = model.training
    model.eval()
    with torch.no_grad():
        out = model(x, targets=targets)
    found = model.metrics(model.measure(out.outputs, targets))
    model.train(training)
    losses = {name: float(loss) for name, loss in out.losses.items()}
    return Measured(float(out.loss), losses, found, out.outputs)


@dataclass
class History:
    """How a training went: held-out losses of all heads by epoch, and by head `train` (the loss, a mean over batches
    with labels), `held_out` (the loss) and `metric` (the head's first); None where there were no labels."""

    losses: list[float] = field(default_factory=list)
    curves: Curves = field(default_factory=lambda: defaultdict(lambda: {"train": [], "held_out": [], "metric": []}))

    @property
    def best_epoch(self) -> int:
        """From 1."""
        return self.losses.index(min(self.losses)) + 1

    @property
    def loss(self) -> float:
        return min(self.losses)

    def add(self, names: Mapping[str, Head], train: Mapping[str, list[Tensor]], now: Measured) -> None:
        self.losses.append(now.loss)
        for name in names:
            seen, first = train.get(name), next(iter(now.metrics.get(name, {}).values()), None)
            self.curves[name]["train"].append(float(torch.stack(seen).mean()) if seen else None)
            self.curves[name]["held_out"].append(now.losses.get(name))
            self.curves[name]["metric"].append(first)


def fit(
    model: MultiHead, x: Tensor, targets: Mapping[str, Tensor], train: Tensor, rest: Tensor, *, epochs: int = 200,
    patience: int = 20, batch: int = 64, lr: float = 3e-3, progress: Callable[[int, int], None] | None = None,
) -> History:  # fmt: skip
    """Train on the rows `train` until the loss of the rows `rest` no longer falls; the model keeps its best weights.

    Args:
        x: `[rows, …]`, what the trunk reads. targets: labels of all rows by name. train, rest: indices of rows.
        patience: epochs without a lower loss before it stops. progress: told of epochs done, and of how many.

    Raises:
        FloatingPointError: the loss of `rest` is not finite.
    """
    held = {name: each[rest] for name, each in targets.items()}
    optimiser = torch.optim.AdamW(model.parameters(), lr)
    history, kept, since = History(), copy.deepcopy(model.state_dict()), 0
    for epoch in range(1, epochs + 1):
        model.train()
        seen: dict[str, list[Tensor]] = defaultdict(list)
        for rows in train[torch.randperm(len(train))].split(batch):
            out = model(x[rows], targets={name: each[rows] for name, each in targets.items()})
            optimiser.zero_grad()
            out.loss.backward()
            optimiser.step()
            for name, loss in out.losses.items():
                seen[name].append(loss.detach())
        now = measure(model, x[rest], held)
        if not now.loss < float("inf"):
            raise FloatingPointError(
                f"the held-out loss became {now.loss} in epoch {epoch}; a lower learning rate may help"
            )
        history.add(model.heads, seen, now)
        since = 0 if history.best_epoch == epoch else since + 1
        if not since:
            kept = copy.deepcopy(model.state_dict())
        if progress is not None:
            progress(epochs if since == patience else epoch, epochs)
        if since == patience:
            break
    model.load_state_dict(kept)
    return history


def parameters(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def single_width(
    trunk: Callable[[int], nn.Module], heads: Mapping[str, Head], width: int, budget: int | None = None
) -> int:
    """How wide trunks are of which each has one head, and which together have the parameters of the model of all heads.

    The largest width, from 1 to `width`, at which they have no more; 1 where none is as small.

    Args:
        trunk: makes one of a width. width: of the trunk that all heads share. budget: parameters; that model's own.
    """

    def count(names: Mapping[str, Head], wide: int) -> int:
        return parameters(MultiHead(trunk(wide), names, width=wide))

    def apart(wide: int) -> int:
        return sum(count({name: head}, wide) for name, head in heads.items())

    with torch.device("meta"):  # shapes alone
        most = count(heads, width) if budget is None else budget
        return max(1, bisect_right(range(1, width + 1), most, key=apart))
