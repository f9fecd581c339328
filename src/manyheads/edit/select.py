"""Which heads to take out: by a measure, to a target, under the group rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.attention import Attention
from manyheads.convert.adopt import adopt
from manyheads.edit.groups import Regroup, check_regroup, keep_of
from manyheads.edit.layers import own_layers
from manyheads.edit.prune import parameters, pruned
from manyheads.edit.slices import EditError, groups_of, spec_of
from manyheads.inspect.ablate import Inputs, ablate, batches_of, run
from manyheads.inspect.layers import layers_of
from manyheads.inspect.measures import HeadTable, Moved, ablation, importance, measure, next_token_loss, output_size
from manyheads.inspect.measures.importance import Loss
from manyheads.stack.pretrained import ManyheadsForCausalLM

Of = Literal["heads", "params", "cache"]
"""What a share is of: query heads, all parameters of the model, bytes that the cache grows by with each token."""
Measure = Callable[[nn.Module, list[Inputs]], HeadTable]
"""How much each head matters: heads with the lowest numbers go first."""
Stop = Literal["keep", "limit", "heads"]
"""Why no more heads go: the share is reached, one more would take the loss above the limit, or no more may go."""
Progress = Callable[[str, int, int], object]
TOKENS = 1024
"""Tokens in one pass."""


class Step(NamedTuple):
    """Heads of a layer that go together.

    score: what they matter, for each thing that they save. kept: the share that is left then. loss: nats a token with
    them and all before them masked, where it was measured.
    """

    layer: int
    heads: tuple[int, ...]
    score: float
    kept: float
    loss: float | None = None


@dataclass(frozen=True)
class Choice(Mapping[int, list[int]]):
    """Heads to take out, by layer (`choice[3]` is a list), with the steps in which they were chosen.

    by, of: the measure, and what `kept` is a share of. loss, loss_masked: nats a token of the text, of the model and
    without these heads, where that was measured (`limit`, `greedy`). stopped: what the choice ended at (see `Stop`).
    """

    steps: tuple[Step, ...]
    by: str
    of: Of
    loss: float | None = None
    stopped: Stop = "keep"

    @property
    def heads(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for step in self.steps:
            found.setdefault(step.layer, []).extend(step.heads)
        return {layer: sorted(of) for layer, of in sorted(found.items())}

    @property
    def kept(self) -> float:
        return self.steps[-1].kept if self.steps else 1.0

    @property
    def loss_masked(self) -> float | None:
        return self.steps[-1].loss if self.steps else self.loss

    def __getitem__(self, layer: int) -> list[int]:
        return self.heads[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)


def _random(seed: int) -> Measure:
    def table(model: nn.Module, inputs: list[Inputs]) -> HeadTable:
        draw = torch.Generator().manual_seed(seed)
        rows = {layer.number: torch.rand(layer.heads, generator=draw).double() for layer in layers_of(model)}
        return HeadTable("random", rows)

    return table


def _output_size(model: nn.Module, inputs: list[Inputs]) -> HeadTable:
    return measure(model, inputs, output_size, fewest=1)["output_size"]


def _ablation(model: nn.Module, inputs: list[Inputs], loss: Loss, progress: Progress) -> HeadTable:
    """`ablation`, layer by layer, so that one sees it go on."""
    rows: dict[int, Tensor] = {}
    layers = layers_of(model)
    for done, layer in enumerate(layers, 1):
        rows |= ablation(model, inputs, loss, layer.number).rows
        progress("ablate", done, len(layers))
    return HeadTable("ablation", rows)


def measure_of(by: str, loss: Loss = next_token_loss, seed: int = 0, progress: Progress = lambda *_: None) -> Measure:
    """A measure by name; `greedy` starts from the gradient."""
    known: dict[str, Measure] = {
        "gradient": partial(importance, loss=loss, reduction="token"),
        "gradient-by-layer": partial(importance, loss=loss, reduction="token", normalised=True),
        "ablation": partial(_ablation, loss=loss, progress=progress),
        "output": _output_size,
        "random": _random(seed),
        "greedy": partial(importance, loss=loss, reduction="token"),
    }
    if by not in known:
        raise ValueError(f"no measure {by!r}; heads are chosen by {', '.join(known)}, a HeadTable or a function")
    return known[by]


def select(
    model: PreTrainedModel, inputs: Inputs | Sequence[Inputs], keep: float | None = None, *, of: Of = "heads",
    by: str | HeadTable | Measure = "gradient", limit: float | None = None, again: int | None = None,
    tries: int | None = 16, at_least: int = 1, regroup: Regroup = "refuse", loss: Loss | None = None, seed: int = 0,
    begun: Sequence[Step] = (), progress: Progress = lambda stage, done, total: None,
    after_round: Callable[[Sequence[Step]], object] = lambda steps: None,
) -> Choice:  # fmt: skip
    """Choose heads to take out, those first that matter least for what they save, until a target is reached.

    >>> choice = select(model, ids, keep=0.75, of="cache")
    >>> small = prune(model, choice)

    What goes in one step is what groups allow: of layers where several query heads read one key head, a whole group, or
    the least head of each group; a single head elsewhere, and everywhere with a `regroup` that takes uneven groups. Its
    score is the sum of its heads' over what it saves.

    Args:
        model: as `prune` takes it; adopted in place.
        inputs: the text that is measured on: token ids `[N, T]`, or batches as `inspect.measure` takes them.
        keep: stop when at most this share is left, 0 < keep ≤ 1. of: of what (see `Of`).
        limit: stop before perplexity on the text exceeds this many times that of the model. One of both is needed; of
            both the first ends the choice, and `Choice.stopped` says which it was.
        by: `gradient`, |o · ∂𝓛/∂o| a token; `gradient-by-layer`, the same over the length of each layer's scores (the
            default of the paper's code, which on SmolLM2 costs more: `benchmarks/results/prune.md`); `ablation`, the
            loss without a head (a pass for each head); `output`,
            ‖W_O o‖; `random`, by `seed`; `greedy`, below; a HeadTable; or a function of (model, batches) to one.
        again: measure again, with those chosen so far masked, after so many steps. Default: once.
        tries: of `greedy`, which in each round masks so many candidates (those least by gradient; None: all) one at a
            time, and takes the `again` (default 1) with which predictions move least for what they save (see
            `measures.Moved`; with a `loss` of one's own, with which that rises least).
        at_least: heads that every layer keeps. regroup: as in `prune`.
        loss: of each sequence, for models of other things than next tokens, whose loss it is by default.
        begun: steps of an interrupted choice, to go on from. after_round: is called with all steps so far.

    Raises:
        EditError: a target out of reach, saying what is nearest; no layer whose heads can be edited. ValueError: bad
            options.

    Source: Michel et al. 2019, arXiv 1905.10650: scores by one backward pass, 10 % of heads a step, the lowest of the
    whole model first. There every layer has heads of its own; groups, costs and limits are ours.
    """
    _check(keep, of, limit, again, tries, at_least)
    check_regroup(regroup)
    ours, batches, greedy = adopt(model), _batches(inputs), by == "greedy"
    name, scored = _measure(by, loss or next_token_loss, seed, progress)
    heads, goal = _Heads(ours, of, at_least, regroup, begun), keep or 0.0
    if (least := heads.least()) == 1:
        raise EditError(f"no head may go: {heads.why}")
    if keep is not None and least > keep:
        raise EditError(f"{100 * keep:.4g} % of {of} is out of reach: at least {100 * least:.4g} % stay ({heads.why})")
    meter = _Meter(ours, batches, loss or next_token_loss)
    moved = _Meter(ours, batches, Moved(ours, batches)) if greedy and loss is None else meter
    base = meter({}) if limit is not None or greedy else None
    most = math.inf if limit is None or base is None else base + math.log(limit)
    size, stopped = again or (1 if greedy else 10**9), cast(Stop, "keep")
    while heads.share > goal:
        first = len(heads.steps)
        with masked(ours, heads.removed):
            table = scored(ours, batches)
        more = heads.trial(table, moved, size, tries, goal, progress) if greedy else heads.round(table, size, goal)
        if not more or (most < math.inf and meter(heads.removed) > most):
            heads.back(_last_good(heads, first, meter, most) if more else first)
            stopped = "limit" if more else "heads"
            break
        after_round(heads.steps)
        if heads.share > goal:
            progress(f"choose by {name}", round(1000 * (1 - heads.share) / (1 - goal)), 1000)
    progress(f"choose by {name}", 1000, 1000)
    if keep is not None and limit is None and heads.share > goal:
        share = 100 * heads.share
        raise EditError(f"{100 * keep:.4g} % of {of} was not reached: {share:.4g} % stay, no more may go ({heads.why})")
    if base is not None and heads.steps:
        heads.steps[-1] = heads.steps[-1]._replace(loss=meter(heads.removed))
    return Choice(tuple(heads.steps), name, of, base, stopped)


def _measure(
    by: str | HeadTable | Measure, loss: Loss, seed: int, progress: Progress
) -> tuple[str, Measure]:  # fmt: skip
    if isinstance(by, str):
        return by, measure_of(by, loss, seed, progress)
    if isinstance(by, HeadTable):
        return by.name, lambda model, batches: by
    return getattr(by, "__name__", "a measure"), by


def _check(
    keep: float | None, of: str, limit: float | None, again: int | None, tries: int | None, at_least: int
) -> None:
    if keep is None and limit is None:
        raise ValueError("give keep, the share that is to be left, or limit, how many times perplexity may grow")
    if keep is not None and not 0 < keep <= 1:
        raise ValueError(f"keep={keep:g}; a share of what is to be left, above 0 and at most 1")
    if limit is not None and not limit >= 1:
        raise ValueError(f"limit={limit:g}; how many times perplexity may grow, 1 or more")
    if of not in get_args(Of):
        raise ValueError(f"of={of!r}; a share is of {', '.join(get_args(Of))}")
    if at_least < 1:
        raise ValueError(f"at_least={at_least}; a layer without heads is none, so that at least 1 stays")
    for name, count in (("again", again), ("tries", tries)):
        if count is not None and count < 1:
            raise ValueError(f"{name}={count}; at least 1")


def _batches(inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
    """Windows `[N, T]` a few at a time; batches as they are."""
    if isinstance(inputs, Tensor) and inputs.ndim == 2:
        return [*inputs.split(max(1, TOKENS // inputs.shape[1]))]
    return batches_of(inputs)


def masked(model: nn.Module, heads: Mapping[int, Iterable[int]]) -> AbstractContextManager[Any]:
    """Some heads at zero, or none."""
    return ablate(model, {layer: [*of] for layer, of in heads.items()}) if heads else nullcontext()


@dataclass
class _Meter:
    """The mean loss with some heads masked, each asked for once."""

    model: nn.Module
    batches: list[Inputs]
    loss: Loss
    known: dict[tuple[tuple[int, tuple[int, ...]], ...], float] = field(default_factory=dict)

    def __call__(self, removed: Mapping[int, Iterable[int]]) -> float:
        key = tuple(sorted((layer, tuple(sorted(of))) for layer, of in removed.items() if of))
        if key not in self.known:
            with torch.no_grad(), masked(self.model, dict(key)):
                each = [self.loss(run(self.model, batch), batch).double() for batch in self.batches]
            self.known[key] = torch.cat(each).mean().item()
        return self.known[key]


def _last_good(heads: _Heads, first: int, meter: _Meter, most: float) -> int:
    """How many steps stay below a loss: those before `first` do, all of them do not."""
    low, high = first, len(heads.steps)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meter(heads.after(middle)) <= most else (low, middle)
    return low


class _Heads:
    """The heads of a model that may still go, and what is left of it."""

    def __init__(
        self, model: ManyheadsForCausalLM, of: Of, at_least: int, regroup: Regroup, begun: Sequence[Step]
    ) -> None:  # fmt: skip
        self.of, self.at_least = of, at_least
        self.regroup: Regroup = regroup
        self.layers: dict[int, Attention] = {}
        self.refused: list[str] = []
        self.steps: list[Step] = []
        self.removed: dict[int, set[int]] = {}
        self._sizes: dict[tuple[int, frozenset[int]], Fraction] = {}
        for number, layer in own_layers(model).items():
            self.layers[number] = layer
            try:
                for unit in self.units(number, torch.zeros(layer.heads))[:1]:
                    pruned(layer, keep_of(layer, unit, regroup))
            except ValueError as error:
                self.refused.append(str(error))
                del self.layers[number]
        if not self.layers:
            raise EditError(self.refused[0] if self.refused else "all layers share rows; no heads can be edited alone")
        everywhere = [layer for layer in model.attentions if all(layer is not mine for mine in self.layers.values())]
        self.fixed = Fraction(parameters(model)) if of == "params" else sum(map(self._plain, everywhere), Fraction(0))
        if of == "params":
            self.fixed -= sum(self._size(number, frozenset()) for number in self.layers)
        self.whole = self.total({})
        self.steps = list(begun)
        self.removed = self.after(len(begun))

    @property
    def why(self) -> str:
        most, floor = max(layer.heads for layer in self.layers.values()), "every layer keeps a head"
        if self.at_least > 1:
            floor = f"every layer keeps at least {self.at_least} heads, and none has more than {most}"
        shared = any(len({*groups_of(layer).keys}) < layer.heads for layer in self.layers.values())
        if shared and self.regroup == "refuse":
            floor += ", in equal groups unless regroup says otherwise"
        more = {"params": ", and all that is not attention", "cache": ", and key heads go as whole groups", "heads": ""}
        return floor + more[self.of] + (f"; {len(self.refused)} layers stay as they are" if self.refused else "")

    def after(self, count: int) -> dict[int, set[int]]:
        """What is gone after so many steps."""
        found: dict[int, set[int]] = {}
        for step in self.steps[:count]:
            found.setdefault(step.layer, set()).update(step.heads)
        return found

    def back(self, count: int) -> None:
        del self.steps[count:]
        self.removed = self.after(count)

    def _plain(self, layer: Attention) -> Fraction:
        cost = layer.spec.cost(layer.dim, layer.heads, layer.site)
        return Fraction({"heads": layer.heads, "params": cost.parameters, "cache": cost.cache_floats}[self.of])

    def _size(self, number: int, removed: frozenset[int]) -> Fraction:
        """What counts of a layer without some heads."""
        if (number, removed) not in self._sizes:
            layer = self.layers[number]
            if self.of == "heads":
                size = Fraction(layer.heads - len(removed))
            elif not removed:
                size = self._plain(layer)
            else:
                kept = keep_of(layer, removed, self.regroup)
                cost = spec_of(layer, kept.groups).cost(layer.dim, len(kept.queries), layer.site)
                size = Fraction(cost.parameters if self.of == "params" else cost.cache_floats)
            self._sizes[number, removed] = size
        return self._sizes[number, removed]

    def total(self, removed: Mapping[int, set[int]]) -> Fraction:
        return self.fixed + sum(self._size(number, frozenset(removed.get(number, ()))) for number in self.layers)

    @property
    def share(self) -> float:
        return float(self.total(self.removed) / self.whole)

    def least(self) -> float:
        """The share that is left when all goes that may."""
        begun = len(self.steps)
        self.round(HeadTable("", {number: torch.zeros(each.heads) for number, each in self.layers.items()}), 10**9, 0.0)
        share = self.share
        self.back(begun)
        return share

    def units(self, number: int, scores: Tensor) -> list[tuple[int, ...]]:
        """Heads of a layer that may go together now."""
        layer, gone = self.layers[number], self.removed.get(number, set())
        groups = groups_of(layer)
        left = [head for head in range(layer.heads) if head not in gone]
        by_key: dict[int, list[int]] = {}
        for head in left:
            by_key.setdefault(groups.keys[head], []).append(head)
        found = [tuple(heads) for heads in by_key.values()]
        if groups.even is None or self.regroup != "refuse":
            found += [(head,) for head in left]
        elif all(len(heads) > 1 for heads in by_key.values()):
            found.append(tuple(min(heads, key=lambda head: (float(scores[head]), head)) for heads in by_key.values()))
        return [unit for unit in dict.fromkeys(found) if len(left) - len(unit) >= self.at_least]

    def candidates(self, table: HeadTable) -> list[tuple[float, int, tuple[int, ...], Fraction]]:
        """(Score for what is saved, layer, heads, what is saved), the least first."""
        found = []
        for number in self.layers:
            row = table.rows.get(number)
            if row is None or row.ndim != 1 or len(row) != self.layers[number].heads or bool(row.isnan().any()):
                raise ValueError(f"{table.name} has no number for each of the heads of layer {number}")
            gone = self.removed.get(number, set())
            for unit in self.units(number, row):
                before, after = (self._size(number, frozenset(heads)) for heads in (gone, {*gone, *unit}))
                if after < before:
                    found.append((float(row[[*unit]].sum() / float(before - after)), number, unit, before - after))
        return sorted(found)

    def _take(self, number: int, unit: tuple[int, ...], score: float, loss: float | None = None) -> None:
        self.removed.setdefault(number, set()).update(unit)
        self.steps.append(Step(number, unit, score, self.share, loss))

    def round(self, table: HeadTable, size: int, goal: float) -> bool:
        """Up to `size` steps by one table; whether there was any."""
        for done in range(size):
            found = self.candidates(table)
            if not found:
                return done > 0
            score, number, unit, _ = found[0]
            self._take(number, unit, score)
            if self.share <= goal:
                break
        return True

    def trial(
        self, table: HeadTable, meter: _Meter, size: int, tries: int | None, goal: float, progress: Progress
    ) -> bool:
        """The same, by what a meter says without each of the first `tries` candidates."""
        found, now = self.candidates(table)[:tries], meter(self.removed)
        trials = []
        for done, (_, number, unit, saved) in enumerate(found, 1):
            gone = self.removed | {number: self.removed.get(number, set()) | {*unit}}
            trials.append(((meter(gone) - now) / float(saved), number, unit))
            progress("try candidates", done, len(found))
        taken: set[int] = set()
        for score, number, unit in sorted(trials):
            if number not in taken and len(taken) < size and self.share > goal:
                taken.add(number)  # another unit of this layer was tried while this one was there
                self._take(number, unit, score)
        return bool(taken)


__all__ = ["Choice", "Measure", "Of", "Step", "masked", "measure_of", "select"]
