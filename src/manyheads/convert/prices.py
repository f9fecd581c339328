"""What a layer may become in a plan, what that costs, and how much it harms: see `planner`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.convert.account import shell_of
from manyheads.convert.methods import Auto, Target
from manyheads.convert.moves.common import Move
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.mla import ToMLA
from manyheads.convert.plan import BudgetError, Goal, Shape
from manyheads.convert.ranks import ALONE, Ranks, wait_for
from manyheads.convert.resume import write_text
from manyheads.convert.share import reader_of
from manyheads.convert.stats import AttentionStats, positions_of, power
from manyheads.convert.stream import Layers, attention_of, batches, put_attention, run
from manyheads.convert.survey import Calibration, Progress, surveyed
from manyheads.core.flow import Links, Rows
from manyheads.core.part import Site
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsConfig
from manyheads.stack.seam import SeamAttention
from manyheads.stack.sources import Kin

PRICED, HELD = 512, 2**28
"""Calibration tokens that an option is priced on, and numbers that all streams of these may be."""
THINNED = 2
"""Every so many of them, the predictions are compared."""
OWNERS = 1
"""Owners that a reader is priced with, those whose rows change its output least."""
LADDER = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Latents that are priced, by their share of a layer's cache."""
STEP = 4
"""Ranks between two prices are multiples of this."""

Kind = Literal["whole", "mla", "gqa", "share"]


@dataclass(frozen=True)
class Option:
    """What one layer may become, its cost in units of the target, and its estimated harm.

    kind: `whole` as it is; `mla` with this rank; `gqa` with so many key heads, merged `how`; `share`, reading the rows
    of layer `at`.
    """

    kind: Kind
    at: int = 0
    how: str = ""
    cost: float = 0.0
    harm: float = 0.0

    def __str__(self) -> str:
        return {
            "whole": "whole", "mla": f"mla(rank={self.at})", "gqa": f"gqa(kv_heads={self.at}, {self.how})",
            "share": f"reads layer {self.at}",
        }[self.kind]  # fmt: skip

    def moves(self, turning: tuple[tuple[int, int], ...]) -> list[Move]:
        """The move that makes it; none for a layer that stays, or that reads."""
        if self.kind == "mla":
            return [ToMLA(self.at, turning)]
        return [ToGQA(self.at, cast(Any, self.how))] if self.kind == "gqa" else []


# --- costs, which need no weight


def cost_of(spec: Spec, dim: int, heads: int, site: Site, auto: Auto) -> float:
    """What a layer costs, in numbers of the target."""
    cost = spec.cost(dim, heads, site)
    cached = 0.0 if site.kv_source is not None else float(cost.cache_floats)
    if auto.target == "cache":
        return cached
    return float(cost.parameters) + (auto.context * cached if auto.target == "speed" else 0.0)


class Costs:
    """The costs of a model's layers as they are and as options."""

    def __init__(self, config: ManyheadsConfig, auto: Auto) -> None:
        self.dim, self.heads, self.specs, self.auto = config.hidden_size, config.heads, config.specs, auto
        self.count = len(config.specs)

    def of(self, layer: int, spec: Spec | None = None, source: int | None = None) -> float:
        site = Site(layer, self.count, kv_source=source)
        found = Spec.parse(self.specs[layer]) if spec is None else spec
        return cost_of(found.resolve(site), self.dim, self.heads[layer], site, self.auto)

    @property
    def whole(self) -> float:
        return sum(self.of(layer) for layer in range(self.count))


def check_plan(config: ManyheadsConfig, goal: Goal) -> None:
    """Raise a `BudgetError` if no choice of options reaches the budget, before any work."""
    costs, shape = Costs(config, goal.method), goal.shape  # type: ignore[arg-type]
    assert shape is not None
    least = 0.0
    for layer, line in enumerate(config.specs):
        spec, found = Spec.parse(line), [costs.of(layer)]
        with torch.device("meta"):
            attention = SeamAttention(spec, config.hidden_size, config.heads[layer], site=Site(layer, costs.count))
        for move in _moves(spec, shape, _pairs(shape, goal)):
            found.append(costs.of(layer, move.target(attention)))
        least += min(found)
    if least > goal.share * costs.whole:
        raise BudgetError(
            f"no plan fits {100 * goal.share:g}% of the source's {_UNITS[costs.auto.target]}; the smallest is "
            f"{math.ceil(1e4 * least / costs.whole) / 100:g}%"
        )


_UNITS: dict[Target, str] = {
    "cache": "cache", "params": "attention parameters", "speed": "reads of a decode step"
}  # fmt: skip


def _pairs(shape: Shape, goal: Goal) -> tuple[tuple[int, int], ...]:
    """As many rotary components as a plan's latents have, of no layer in particular."""
    width = shape.qk_width // 2
    return tuple((n % width, n // width) for n in range(goal.turning))


def _moves(spec: Spec, shape: Shape, turning: tuple[tuple[int, int], ...]) -> list[ToMLA | ToGQA]:
    """What is priced: latents up the ladder, and every smaller number of key heads."""
    ranks = sorted({max(STEP, int(shape.floats * share - 2 * len(turning)) // STEP * STEP) for share in LADDER})
    moves: list[ToMLA | ToGQA] = [ToMLA(rank, turning) for rank in ranks]
    groups = [g for g in range(1, shape.kv_heads) if shape.kv_heads % g == 0]
    fits = ToGQA(1).refusal(spec) is None
    moves += [ToGQA(g, "fitted" if fits else "mean") for g in groups]
    return [move for move in moves if move.refusal(spec) is None]


# --- prices


@dataclass
class Prices:
    """options: of each layer, without readers. readers: harm and cost of each (reader, owner)."""

    options: list[list[Option]]
    readers: dict[tuple[int, int], Option]

    @classmethod
    def of(cls, costs: Costs, priced: Sequence[tuple[int, Option]]) -> Prices:
        """From what was priced, each with its layer."""
        options = [[Option("whole", cost=costs.of(index))] for index in range(costs.count)]
        readers: dict[tuple[int, int], Option] = {}
        for index, option in priced:
            if option.kind == "share":
                readers[index, option.at] = option
            else:
                options[index].append(option)
        return cls([between_ranks(each) for each in options], readers)


def price(
    layers: Layers, text: Calibration, goal: Goal, survey: Path, turning: tuple[tuple[int, int], ...],
    progress: Progress = lambda stage, done, total: None, ranks: Ranks = ALONE,
) -> Prices:  # fmt: skip
    """What each option alone does to the model's predictions.

    Every option is a stream of hidden states that leaves the source's at its layer and goes on through those that
    follow, which are all read once. Several processes price the options of every n-th layer each, and read what the
    others have found in files beside the survey's.
    """
    config, count, shape = layers.config, len(layers.config.specs), goal.shape
    assert shape is not None
    costs, kin = Costs(config, goal.method), Kin(config.specs, config.hidden_size, config.heads)  # type: ignore[arg-type]
    most = len(LADDER) + shape.kv_heads + OWNERS
    windows = priced_windows(text, count * most * config.hidden_size)
    where, hidden = windows.positions, layers.embed(windows.tokens)
    branches, told, mine = hidden[:0], list[tuple[int, Option]](), ranks.share(range(count))
    rows: dict[int, list[Rows]] = {}
    for index in range(count):
        with layers.open(index) as layer:
            attention = attention_of(layer, config)
            stats, felt = surveyed(survey, index, layers.devices[index])
            links = [Links() for _ in batches(hidden)]
            seen = run(layer, config, hidden, where, bfloat16=text.bfloat16, links=links)
            if told:
                again = where.repeat(len(told), 1)
                branches = run(layer, config, branches, again, record=False, bfloat16=text.bfloat16).after
            rows[index] = [link.rows[index] for link in links if index in link.rows]
            own, hidden = hidden, seen.after
            progress(f"plan {goal.name}", index + 1, count)
            if index not in mine:
                continue
            judge = Judge(seen.x, seen.y, seen.before + seen.y, felt, where, text.bfloat16)
            made = [*_made(attention, stats, shape, turning, costs, index)]
            given = {owner: [Links(rows={owner: each}) for each in rows[owner]] for owner in range(index)}
            owners = [owner for owner in given if kin.why_no_rows(index, owner) is None]
            readers = {owner: reader_of(attention, owner) for owner in owners}
            owners.sort(key=lambda owner: judge(readers[owner], given[owner]))
            for owner in owners[:OWNERS]:
                made.append((Option("share", owner, "", costs.of(index, source=owner)), readers[owner]))
            left: list[Tensor] = []
            for option, other in made:
                put_attention(layer, config, other)
                more = given[option.at] if option.kind == "share" else None
                left.append(run(layer, config, own, where, record=False, bfloat16=text.bfloat16, links=more).after)
                told.append((index, option))
            branches = torch.cat([branches.to(hidden.device), *left])
    shell = shell_of(layers)
    thin = dict(enumerate(branches[:, ::THINNED].split(len(hidden))))
    harms = divergences(shell, hidden[:, ::THINNED], thin)
    priced = [(index, replace(option, harm=harms[n])) for n, (index, option) in enumerate(told)]
    return Prices.of(costs, _of_all(priced, survey / goal.name, ranks))


def _of_all(priced: list[tuple[int, Option]], where: Path, ranks: Ranks) -> list[tuple[int, Option]]:
    """What all processes have priced, by layer."""
    if ranks.world == 1:
        return priced
    files = [Path(f"{where}.prices-{rank}-of-{ranks.world}.json") for rank in range(ranks.world)]
    write_text(json.dumps([(index, asdict(option)) for index, option in priced]), files[ranks.rank])
    wait_for(files)
    read = [each for file in files for each in json.loads(file.read_text(encoding="utf-8"))]
    return [(index, Option(**fields)) for index, fields in sorted(read, key=lambda each: each[0])]


def priced_windows(text: Calibration, numbers: int) -> Calibration:
    """Two windows for prices, one with jumps in its positions if any has, of `PRICED` tokens in all at most, and of so
    many that the streams, with `numbers` for each token, fit into `HELD`."""
    jumps = (text.positions.diff(dim=1) != 1).any(1)
    some = sorted({int(jumps.float().argmax()), int(jumps.float().argmin())})
    length = max(16, min(PRICED, HELD // numbers) // len(some))
    tokens, positions = (t[some, :length] for t in (text.tokens, text.positions))
    return Calibration(tokens, positions, text.bfloat16)


def _made(
    attention: SeamAttention, stats: AttentionStats, shape: Shape, turning: tuple[tuple[int, int], ...], costs: Costs,
    index: int,
) -> Iterator[tuple[Option, SeamAttention]]:  # fmt: skip
    """A layer as each option that is fitted."""
    slots = None
    for move in _moves(attention.spec, shape, turning):
        if isinstance(move, ToMLA):
            slots = move.gauge(attention, stats) if slots is None else slots
            made = move(attention, stats, slots)
            yield Option("mla", move.clipped(attention), "", costs.of(index, made.spec)), made
        else:
            made = move(attention, stats)
            yield Option("gqa", move.kv_heads, move.how, costs.of(index, made.spec)), made


@torch.no_grad()
def divergences(shell: PreTrainedModel, source: Tensor, others: Mapping[Any, Tensor]) -> dict[Any, float]:
    """Mean KL(source || other) of next tokens, nats, by what turns last hidden states `[N, T, D]` into logits."""
    totals = dict.fromkeys(others, 0.0)
    parts = {name: last.flatten(0, 1)[None].split(256, 1) for name, last in others.items()}
    for n, part in enumerate(source.flatten(0, 1)[None].split(256, 1)):
        p = _log_predicted(shell, part)
        for name in totals:
            totals[name] += F.kl_div(_log_predicted(shell, parts[name][n]), p, reduction="sum", log_target=True).item()
    return {name: total / source.shape[:2].numel() for name, total in totals.items()}


def _log_predicted(shell: PreTrainedModel, hidden: Tensor) -> Tensor:
    return shell(inputs_embeds=hidden, use_cache=False).logits.float().log_softmax(-1)


class Judge:
    """The error of a layer's output on its own inputs: in the loss's metric, or without one by the stream's size."""

    def __init__(
        self, x: Tensor, target: Tensor, stream: Tensor, felt: Tensor | None, where: Tensor, bfloat16: bool
    ) -> None:
        self.x, self.target, self.where, self.bfloat16 = x, target, positions_of(x, where), bfloat16
        self.root = None if felt is None else power(felt, 0.5).to(x.dtype)
        self.weights = 1 / stream.pow(2).sum(-1).clamp_min(1e-12) if felt is None else x.new_ones(x.shape[:2])

    @torch.no_grad()
    def __call__(self, attention: SeamAttention, links: Sequence[Links] | None = None) -> float:
        total = 0.0
        for link in links or ():
            link.move(self.x.device)
        parts = [batches(t) for t in (self.x, self.target, self.where, self.weights)]
        for n, (x, target, where, weights) in enumerate(zip(*parts, strict=True)):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bfloat16):
                y = attention.to(x.dtype)(x, position_ids=where, links=None if links is None else links[n])[0]
            error = y.to(x.dtype) - target
            error = error if self.root is None else error @ self.root
            total += (weights * error.pow(2).sum(-1)).sum().item()
        return total / self.weights.numel()


def between_ranks(options: list[Option]) -> list[Option]:
    """Latents of all ranks in steps between those priced; harm falls geometrically from one to the next."""
    latents = sorted((each for each in options if each.kind == "mla"), key=lambda each: each.at)
    filled = [each for each in options if each.kind != "mla"] + latents[-1:]
    for low, high in pairwise(latents):
        for rank in range(low.at, high.at, STEP):
            t = (rank - low.at) / (high.at - low.at)
            logs = (1 - t) * math.log(max(low.harm, 1e-30)) + t * math.log(max(high.harm, 1e-30))
            cost = low.cost + t * (high.cost - low.cost)
            filled.append(Option("mla", rank, "", cost, low.harm if t == 0 else math.exp(logs)))
    return filled
