"""Several data sets as one stream of batches, each with labels of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from manyheads.multi.head import MISSING

Goal = str | None | tuple[str, Sequence[int]]


def union(sets: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, list[int]]]:
    """The classes of several data sets, each once, in the order met; and where each data set's own classes are there.

    >>> union({"a": ["cat", "dog"], "b": ["dog", "fox"]})
    (['cat', 'dog', 'fox'], {'a': [0, 1], 'b': [1, 2]})
    """
    for name, classes in sets.items():
        if len(set(classes)) != len(classes):
            raise ValueError(f"data set {name!r}: a class is named twice in {list(classes)}")
    every = list(dict.fromkeys(each for classes in sets.values() for each in classes))
    return every, {name: [every.index(each) for each in classes] for name, classes in sets.items()}


def joined(
    loaders: Mapping[str, Any], targets: Mapping[str, str | Mapping[str, Goal]] | None = None, *,
    by: Literal["turns", "size"] = "turns",
) -> Joined:  # fmt: skip
    """Batches of several loaders, one loader a batch, each batch with the names of its own labels.

    >>> batches = joined({"birds": birds, "cars": cars}, {"birds": {"label": "bird"}, "cars": {"label": "make"}})
    >>> for batch in batches: model(batch["x"], targets=batch["targets"]).loss.backward()

    A head without a label in a batch does not run (`MultiHead`), so data sets of other label sets train their own heads
    and, together, the trunk: one head a data set as in CerberusDet, or one of all classes (`union`). Which loader comes
    next follows from lengths alone, so processes whose loaders are as long agree in it.

    Args:
        loaders: by name of a data set; what has a length and is gone through anew each epoch, as a `DataLoader`. A
            batch is a dict with `targets`, as `collate` makes it, or a pair of inputs and labels.
        targets: by data set, what a label is for heads: their key of it; None, which leaves it out; or a key and the
            places of classes, `("kind", [2, 0])`: its class 0 is the heads' class 2. Labels not named keep theirs.
            Of pairs a key says what the second is: `{"cars": "make"}`, with places `{"cars": {"": ("make", [2, 0])}}`.
        by: `turns`, one batch of each in turn until the longest is through, shorter ones beginning anew; or `size`,
            each batch of each once, evenly spread.

    Source: CerberusDet (arXiv 2407.12632), for a head and label set a data set, and batches of one at a time.
    """
    return Joined(loaders, targets or {}, by)


class Joined:
    """What `joined` makes: goes through its loaders each time it is iterated."""

    def __init__(
        self, loaders: Mapping[str, Any], targets: Mapping[str, str | Mapping[str, Goal]], by: Literal["turns", "size"]
    ) -> None:
        if not loaders:
            raise ValueError("no loaders to join")
        if by not in ("turns", "size"):
            raise ValueError(f"by={by!r} is neither 'turns' nor 'size'")
        for name, loader in loaders.items():
            if not hasattr(loader, "__len__"):
                raise ValueError(f"data set {name!r}: its loader is a {type(loader).__name__}, which has no length")
            if not len(loader):
                raise ValueError(f"data set {name!r}: its loader has no batch")
        for name in targets:
            if name not in loaders:
                raise ValueError(f"targets of {name!r}, but the data sets are {', '.join(map(repr, loaders))}")
        self.loaders, self.by = dict(loaders), by
        self.goals = {name: {"": goal} if isinstance(goal, str) else dict(goal) for name, goal in targets.items()}

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.loaders.values()]
        return sum(lengths) if self.by == "size" else len(lengths) * max(lengths)

    def order(self) -> list[str]:
        """The data set of each batch."""
        lengths = {name: len(loader) for name, loader in self.loaders.items()}
        if self.by == "turns":
            return [*lengths] * max(lengths.values())
        places = [((at + 0.5) / count, name) for name, count in lengths.items() for at in range(count)]
        return [name for _, name in sorted(places, key=lambda each: each[0])]  # equal places: in the order given

    def __iter__(self) -> Iterator[Any]:
        going = {name: iter(loader) for name, loader in self.loaders.items()}
        for name in self.order():
            batch = next(going[name], None)
            if batch is None:
                going[name] = iter(self.loaders[name])
                batch = next(going[name])
            yield self.named(name, batch)

    def named(self, name: str, batch: Any) -> Any:
        """A batch of this data set with its labels under the heads' keys."""
        if isinstance(batch, Mapping):
            if not isinstance(batch.get("targets"), Mapping):
                raise ValueError(f"data set {name!r}: its batches are dicts without targets by name")
            return {**batch, "targets": self._targets(name, batch["targets"])}
        if not (isinstance(batch, Sequence) and len(batch) == 2):
            raise ValueError(f"data set {name!r}: a batch is a dict with targets, or inputs and labels")
        inputs, labels = batch
        if not isinstance(labels, Mapping) and "" not in self.goals.get(name, {}):
            raise ValueError(f"data set {name!r}: its labels have no name; give targets={{{name!r}: 'the name'}}")
        return inputs, self._targets(name, labels if isinstance(labels, Mapping) else {"": labels})

    def _targets(self, name: str, labels: Mapping[str, Any]) -> dict[str, Any]:
        goals, found = self.goals.get(name, {}), {}
        for key, value in labels.items():
            goal = goals.get(key, key)
            if goal is None:
                continue
            to, places = (goal, None) if isinstance(goal, str) else goal
            if to in found:
                raise ValueError(f"data set {name!r}: two of its labels are {to!r}")
            found[to] = value if places is None or value is None else _placed(value, places, f"{name!r}, {key!r}")
        return found


def _placed(labels: Any, places: Sequence[int], whose: str) -> Tensor:
    """Classes of one data set as those of the heads; missing ones stay so."""
    labels = torch.as_tensor(labels)
    missing = (labels == MISSING) | labels.isnan()
    own = labels.masked_fill(missing, 0).long()
    wrong = (own < 0) | (own >= len(places))
    if bool(wrong.any()):
        raise ValueError(f"data set {whose}: label {int(own[wrong][0])} is out of range: 0 to {len(places) - 1}")
    return torch.as_tensor(places, device=own.device)[own].masked_fill(missing, MISSING)


__all__ = ["Joined", "joined", "union"]
