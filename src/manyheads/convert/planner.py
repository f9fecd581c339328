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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.convert.account import has_run, shell_of
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import Auto
from manyheads.convert.moves.mla import choose
from manyheads.convert.moves.of_goal import best, every_move, moves_of, shares
from manyheads.convert.plan import BudgetError, Goal, Shape, make_goal
from manyheads.convert.prices import Costs, Option, Prices, price
from manyheads.convert.ranks import ALONE, Ranks, wait_for
from manyheads.convert.resume import write_text
from manyheads.convert.share import reader_of
from manyheads.convert.stats import AttentionStats
from manyheads.convert.stream import Layers, attention_of, batches, put_attention, run
from manyheads.convert.survey import FELT, SURVEYED, Calibration, Progress, surveyed
from manyheads.convert.verify import Reference, quality
from manyheads.core.flow import Links
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsConfig
from manyheads.stack.seam import SeamAttention

TRIED = 4096
"""Calibration tokens that a whole plan is tried on."""
SINGLES = ("mla", "gqa", "dha", "qkv-sharing", "mfa")
"""Whole methods that a plan is tried against, where they fit."""


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
    progress: Progress = lambda stage, done, total: None, ranks: Ranks = ALONE,
) -> Plan:  # fmt: skip
    """The plan of a goal; one that an earlier run has written is taken as it is.

    Several processes share the pricing; the first one decides.

    Args:
        work: of the `shrink` job, with its survey. damage: of stopping each rotary component, over all layers.
    """
    file = plan_file(work, goal)
    if file.exists():
        return Plan.load(file)
    auto, survey = goal.method, work / "survey"
    assert isinstance(auto, Auto) and goal.shape is not None
    costs = Costs(layers.config, auto)
    budget = goal.share * costs.whole * (1 + 1e-9)
    turning = choose(damage, goal.turning)
    prices = price(layers, text, goal, survey, turning, progress, ranks)
    if ranks.rank:
        wait_for([file])
        return Plan.load(file)
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


def plan_file(work: Path, goal: Goal) -> Path:
    """Where a job keeps the plan of a goal."""
    return work / f"{goal.name}.plan.json"


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
    tokens, where, fast = windows
    names = ["source", *(["mixed"] if mixed is not None else []), *(single.name for single in singles)]
    hidden = {name: layers.embed(tokens) for name in names}
    links = [Links() for _ in batches(hidden["source"])]
    readers = {n: option.at for n, option in enumerate(mixed or ()) if option.kind == "share"}
    given = {single.name: shares(layers, single, survey, damage) for single in singles}
    turning, heal = choose(damage, goal.turning), LayerwiseHeal(steps=0, bfloat16=fast)
    costs = Costs(config, cast(Auto, goal.method))
    sizes = {**dict.fromkeys(names, 0.0), "source": costs.whole}
    for index in range(count):
        stats, felt = surveyed(survey, index, layers.devices[index])
        with layers.open(index) as layer:
            own = attention_of(layer, config)
            seen = run(layer, config, hidden["source"], where, bfloat16=fast)
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
                hidden[name] = run(layer, config, hidden[name], where, record=False, bfloat16=fast, links=shared).after
            for link in links:
                link.rows = {owner: rows for owner, rows in link.rows.items() if owner in readers.values()}
        progress(f"try {goal.name}", index + 1, count)
    shell = shell_of(layers)
    whole = Reference(has_run(shell, tokens, hidden["source"]), tokens)
    found = {name: quality(has_run(shell, tokens, last), tokens, whole) for name, last in hidden.items()}
    return [
        {"name": name, "cost": sizes[name] / costs.whole, "loss": each.nll, "kl": each.kl}
        for name, each in found.items()
    ]


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
