"""Which layer becomes what: `--to auto` spends a budget where it hurts least.

1. Price. Each layer is fitted with each option: latents of several ranks, fewer key heads, the rows of an earlier
   layer in place of its own, or nothing at all. The harm of an option is how far the predictions move if it is the only
   change to the model (KL, nats a token); between ranks it is interpolated. Which earlier layers are worth a price is
   judged by the error of the layer's own output, in the metric of the loss. That metric is no price itself: errors of
   one layer's output say little about how much another layer's may be.
2. Spend. The choice with the least sum of harms within the budget is exact (a dynamic programme over the layers).
   Layers that read another one's rows, which stays whole for it, are added as long as that sum falls.
3. Try. Harms of layers add up only roughly, so the plan and each single method are put into the whole model, unhealed,
   and the one whose predictions stay nearest to the source's (KL), on calibration windows that no fit has seen, is
   taken.

A budget is of numbers cached a token (`cache`), of attention parameters (`params`), or of numbers that a decode step
reads with a context of so many tokens (`speed`: parameters + context · cache; memory bounds such a step).
"""

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

from manyheads.convert.account import loss_of, shell_of
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import Auto, Target
from manyheads.convert.moves.common import Move
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.mla import ToMLA, choose
from manyheads.convert.moves.of_goal import best, every_move, moves_of, shares
from manyheads.convert.plan import BudgetError, Goal, Shape, make_goal
from manyheads.convert.resume import write_text
from manyheads.convert.share import reader_of
from manyheads.convert.stats import AttentionStats, power
from manyheads.convert.stream import Layers, attention_of, batches, put_attention, run
from manyheads.convert.survey import FELT, SURVEYED, Calibration, Progress, surveyed
from manyheads.core.flow import Links, Rows
from manyheads.core.part import OptionError, Site
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
TRIED = 4096
"""Calibration tokens that a whole plan is tried on."""
LADDER = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Latents that are priced, by their share of a layer's cache."""
STEP = 4
"""Ranks between two prices are multiples of this."""
SINGLES = ("mla", "gqa", "dha", "qkv-sharing", "mfa")
"""Whole methods that a plan is tried against, where they fit."""

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


@dataclass(frozen=True)
class Plan:
    """What was decided for one goal. method: the line of a single method, or none for options by layer.

    tried: of each whole plan, and of the `source`, its name, cost as a share of the source's, and, measured in nats a
    token, its loss and the divergence (`kl`) of the source's predictions from its own. reasons: a line for each thing
    that was decided.
    """

    method: str
    options: tuple[Option, ...]
    tried: tuple[Mapping[str, Any], ...]
    reasons: tuple[str, ...]

    @property
    def readers(self) -> dict[int, int]:
        """Which layers read whose rows."""
        return {layer: option.at for layer, option in enumerate(self.options) if option.kind == "share"}

    def goal_of(self, goal: Goal) -> Goal:
        """Of the single method that was taken, at the budget of the plan's goal."""
        return replace(_single(self.method, goal), name=goal.name)

    def save(self, file: Path) -> None:
        write_text(json.dumps(asdict(self), indent=1), file)

    @classmethod
    def load(cls, file: Path) -> Plan:
        read = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            read["method"], tuple(Option(**each) for each in read["options"]), tuple(read["tried"]),
            tuple(read["reasons"]),
        )  # fmt: skip


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


def price(
    layers: Layers, text: Calibration, goal: Goal, survey: Path, turning: tuple[tuple[int, int], ...],
    progress: Progress = lambda stage, done, total: None,
) -> Prices:  # fmt: skip
    """What each option alone does to the model's predictions.

    Every option is a stream of hidden states that leaves the source's at its layer and goes on through those that
    follow, which are all read once.
    """
    config, count, shape = layers.config, len(layers.config.specs), goal.shape
    assert shape is not None
    costs, kin = Costs(config, goal.method), Kin(config.specs, config.hidden_size, config.heads)  # type: ignore[arg-type]
    most = len(LADDER) + shape.kv_heads + OWNERS
    windows = priced_windows(text, count * most * config.hidden_size)
    where, hidden = windows.positions, layers.embed(windows.tokens)
    branches, told = hidden[:0], list[tuple[int, Option]]()
    rows: dict[int, list[Rows]] = {}
    for index in range(count):
        with layers.open(index) as layer:
            attention = attention_of(layer, config)
            stats, felt = surveyed(survey, index)
            links = [Links() for _ in batches(hidden)]
            seen = run(layer, config, hidden, where, bfloat16=text.bfloat16, links=links)
            if told:
                again = where.repeat(len(told), 1)
                branches = run(layer, config, branches, again, record=False, bfloat16=text.bfloat16).after
            judge = Judge(seen.x, seen.y, seen.before + seen.y, felt, where, text.bfloat16)
            made = [*_made(attention, stats, shape, turning, costs, index)]
            given = {owner: [Links(rows={owner: each}) for each in found] for owner, found in rows.items()}
            owners = [owner for owner in given if kin.why_no_rows(index, owner) is None]
            readers = {owner: reader_of(attention, owner) for owner in owners}
            owners.sort(key=lambda owner: judge(readers[owner], given[owner]))
            for owner in owners[:OWNERS]:
                made.append((Option("share", owner, "", costs.of(index, source=owner)), readers[owner]))
            for option, other in made:
                put_attention(layer, config, other)
                more = given[option.at] if option.kind == "share" else None
                left = run(layer, config, hidden, where, record=False, bfloat16=text.bfloat16, links=more).after
                branches = torch.cat([branches, left])
                told.append((index, option))
            rows[index] = [link.rows[index] for link in links if index in link.rows]
        hidden = seen.after
        progress(f"plan {goal.name}", index + 1, count)
    shell = shell_of(layers)
    options: list[list[Option]] = [[Option("whole", cost=costs.of(index))] for index in range(count)]
    found = Prices(options, {})
    thin = dict(enumerate(branches[:, ::THINNED].split(len(hidden))))
    harms = divergences(shell, hidden[:, ::THINNED], thin)
    for n, (index, option) in enumerate(told):
        priced = replace(option, harm=harms[n])
        if option.kind == "share":
            found.readers[index, option.at] = priced
        else:
            options[index].append(priced)
    found.options = [between_ranks(each) for each in options]
    return found


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


class Judge:
    """The error of a layer's output on its own inputs: in the loss's metric, or without one by the stream's size."""

    def __init__(
        self, x: Tensor, target: Tensor, stream: Tensor, felt: Tensor | None, where: Tensor, bfloat16: bool
    ) -> None:
        self.x, self.target, self.where, self.bfloat16 = x, target, where, bfloat16
        self.root = None if felt is None else power(felt, 0.5).to(x.dtype)
        self.weights = 1 / stream.pow(2).sum(-1).clamp_min(1e-12) if felt is None else torch.ones(x.shape[:2])

    @torch.no_grad()
    def __call__(self, attention: SeamAttention, links: Sequence[Links] | None = None) -> float:
        total = 0.0
        parts = [batches(t) for t in (self.x, self.target, self.where, self.weights)]
        for n, (x, target, where, weights) in enumerate(zip(*parts, strict=True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
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


# --- spending


CELLS = 8192
"""A budget is spent in so many steps at most; costs round up."""


def spend(options: Sequence[Sequence[Option]], budget: float) -> list[Option] | None:
    """One option a layer with the least sum of harms whose costs sum to at most `budget`; None if nothing fits."""
    unit = max(1.0, budget / CELLS)
    size = int(budget / unit + 1e-9) + 1
    best_sum = torch.zeros(size, dtype=torch.float64)
    taken: list[Tensor] = []
    for layer in options:
        sums = torch.full((len(layer), size), torch.inf, dtype=torch.float64)
        for n, option in enumerate(layer):
            cells = math.ceil(option.cost / unit - 1e-9)
            if cells < size:
                sums[n, cells:] = best_sum[: size - cells] + option.harm
        best_sum, chosen = sums.min(0)
        taken.append(chosen)
    if best_sum[-1].isinf():
        return None
    found: list[Option] = []
    at = size - 1
    for layer, chosen in zip(reversed(options), reversed(taken), strict=True):
        option = layer[int(chosen[at])]
        found.append(option)
        at -= math.ceil(option.cost / unit - 1e-9)
    return found[::-1]


def with_readers(prices: Prices, budget: float, tries: int = 64) -> list[Option] | None:
    """As `spend`, where a layer may also read an earlier one, which then stays whole; pairs of least harm go first."""
    options = [list(layer) for layer in prices.options]
    found = spend(options, budget)
    readers, owners = set[int](), set[int]()
    for (reader, owner), option in sorted(prices.readers.items(), key=lambda pair: pair[1].harm)[:tries]:
        if reader in readers | owners or owner in readers:
            continue
        trial = list(options)
        trial[reader], trial[owner] = [option], [each for each in options[owner] if each.kind == "whole"]
        better = spend(trial, budget)
        if better is not None and (found is None or _harm(better) < _harm(found)):
            options, found = trial, better
            readers.add(reader)
            owners.add(owner)
    return found


def _harm(options: Sequence[Option]) -> float:
    return sum(option.harm for option in options)


# --- trying


def make_plan(
    layers: Layers, text: Calibration, goal: Goal, work: Path, damage: Tensor,
    progress: Progress = lambda stage, done, total: None,
) -> Plan:  # fmt: skip
    """The plan of a goal; one that an earlier run has written is taken as it is.

    Args:
        work: of the `shrink` job, with its survey. damage: of stopping each rotary component, over all layers.
    """
    file = work / f"{goal.name}.plan.json"
    if file.exists():
        return Plan.load(file)
    auto, survey = goal.method, work / "survey"
    assert isinstance(auto, Auto) and goal.shape is not None
    costs = Costs(layers.config, auto)
    budget = goal.share * costs.whole * (1 + 1e-9)
    turning = choose(damage, goal.turning)
    prices = price(layers, text, goal, survey, turning, progress)
    mixed = with_readers(prices, budget)
    singles = single_goals(layers.config, goal)
    if mixed is None and not singles:
        raise BudgetError(f"no plan fits {goal.name}")
    unseen = unseen_windows(text)
    windows = Calibration(text.tokens[unseen], text.positions[unseen], text.bfloat16)
    tried = try_all(layers, windows, goal, survey, damage, mixed, singles, progress)
    won = min((each for each in tried if each["name"] != "source"), key=lambda each: each["kl"])["name"]
    options = tuple(mixed or ()) if won == "mixed" else ()
    reasons = [_compared(won, tried, _harm(mixed or ()))]
    reasons += [_reason(layer, option, prices) for layer, option in enumerate(options)]
    plan = Plan("" if won == "mixed" else won, options, tuple(tried), tuple(reasons))
    plan.save(file)
    return plan


def single_goals(config: ManyheadsConfig, goal: Goal, lines: Sequence[str] = SINGLES) -> list[Goal]:
    """Of the methods that take every layer within the budget; none where it is of another target."""
    found = []
    if cast(Auto, goal.method).target != "cache":
        return found
    for line in lines:
        try:
            single = _single(line, goal)
        except (BudgetError, OptionError):
            continue
        specs = [Spec.parse(each) for each in config.specs]
        moves = every_move(single)
        if moves and all(any(move.refusal(spec) is None for move in moves) for spec in specs):
            found.append(single)
    return found


def _single(line: str, goal: Goal) -> Goal:
    return replace(make_goal(f"{100 * goal.share:.6f}%", line, cast(Shape, goal.shape)), name=line)


def try_all(
    layers: Layers, windows: Calibration, goal: Goal, survey: Path, damage: Tensor, mixed: Sequence[Option] | None,
    singles: Sequence[Goal], progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """What the source and each whole plan predict, unhealed, on windows that no fit has seen (see `Plan.tried`)."""
    config, count = layers.config, len(layers.config.specs)
    tokens, where, text = windows.tokens, windows.positions, windows
    names = ["source", *(["mixed"] if mixed is not None else []), *(single.name for single in singles)]
    hidden = {name: layers.embed(tokens) for name in names}
    links = [Links() for _ in batches(hidden["source"])]
    readers = {n: option.at for n, option in enumerate(mixed or ()) if option.kind == "share"}
    given = {single.name: shares(layers, single, survey, damage) for single in singles}
    turning, heal = choose(damage, goal.turning), LayerwiseHeal(steps=0, bfloat16=text.bfloat16)
    costs = Costs(config, cast(Auto, goal.method))
    sizes = {**dict.fromkeys(names, 0.0), "source": costs.whole}
    for index in range(count):
        stats, felt = surveyed(survey, index)
        with layers.open(index) as layer:
            own = attention_of(layer, config)
            seen = run(layer, config, hidden["source"], where, bfloat16=text.bfloat16)
            made: dict[str, SeamAttention] = {}
            if mixed is not None:
                made["mixed"] = become(mixed[index], own, stats, turning)
            for single in singles:
                problem = (seen.x, seen.y, seen.before + seen.y, felt, where)
                moves = moves_of(single, own, stats, damage, given[single.name][index])
                made[single.name] = best(moves, own, stats, heal, problem)
            hidden["source"] = seen.after
            for name, attention in made.items():
                reads = readers.get(index) if name == "mixed" else None
                sizes[name] += costs.of(index, attention.spec, reads)
                put_attention(layer, config, attention)
                shared = links if name == "mixed" else None
                hidden[name] = run(
                    layer, config, hidden[name], where, record=False, bfloat16=text.bfloat16, links=shared
                ).after
            for link in links:
                link.rows = {owner: rows for owner, rows in link.rows.items() if owner in readers.values()}
        progress(f"try {goal.name}", index + 1, count)
    shell = shell_of(layers)
    apart = divergences(shell, hidden["source"], hidden)
    return [
        {"name": name, "cost": sizes[name] / costs.whole, "loss": loss_of(shell, tokens, last), "kl": apart[name]}
        for name, last in hidden.items()
    ]


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


def become(
    option: Option, attention: SeamAttention, stats: AttentionStats, turning: tuple[tuple[int, int], ...]
) -> SeamAttention:
    """The layer that an option makes of this one."""
    if option.kind == "share":
        return reader_of(attention, option.at)
    moves = option.moves(turning)
    return moves[0](attention, stats) if moves else attention


def unseen_windows(text: Calibration) -> Tensor:
    """Windows for about `TRIED` tokens that neither statistics nor gradients were taken from, where there are any."""
    seen = {*text.some(SURVEYED).tolist(), *text.some(FELT).tolist()}
    left = torch.tensor([n for n in range(len(text.tokens)) if n not in seen] or [*range(len(text.tokens))])
    count = min(max(1, TRIED // text.tokens.shape[1]), len(left))
    return left[torch.linspace(0, len(left) - 1, count).round().long()]


def _compared(won: str, tried: Sequence[Mapping[str, Any]], harm: float) -> str:
    """Why this plan, in a line."""
    others = sorted((each for each in tried if each["name"] != "source"), key=lambda each: each["kl"])
    said = ", ".join(f"{each['name']} {each['kl']:.4f}" for each in others)
    line = f"{won} stays nearest to the source's predictions, unhealed, in nats a token: {said}"
    return line + (f" (mixed: the layers' harms add up to {harm:.4f})" if harm else "")


def _reason(layer: int, option: Option, prices: Prices) -> str:
    """Why a layer becomes what it does: beside what costs about as much, and what costs one step more."""
    others = [each for each in prices.options[layer] if each.kind != option.kind and each.cost <= option.cost + 1e-9]
    line = f"layer {layer}: {option}, {option.cost:,.0f} at a harm of {option.harm:.3g}"
    if others:
        other = min(others, key=lambda each: each.harm)
        line += f"; {other} would do {other.harm:.3g}"
    reads = [each for (reader, _), each in prices.readers.items() if reader == layer]
    if reads and option.kind != "share":
        nearest = min(reads, key=lambda each: each.harm)
        line += f"; reading layer {nearest.at} {nearest.harm:.3g}"
    return line
