"""The main job: a source model and cache budgets in, converted and healed checkpoints out.

Layer by layer, twice over the source. The survey measures every layer on the source's own hidden states. The
conversion then goes through the layers again with two streams, the source's and the converted model's: each layer is
fitted, healed on the inputs it will really get, and written. Nothing else is ever in memory, and a job that was
interrupted goes on after the last layer written, with the same result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from manyheads.convert.adopt import family_of
from manyheads.convert.devices import fast_in_half
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import Retrieval, Shared, Tensorised
from manyheads.convert.mohawk import Mohawk
from manyheads.convert.moves.mla import choose
from manyheads.convert.moves.of_goal import best, every_move, moves_of, shares
from manyheads.convert.plan import Goal
from manyheads.convert.planner import Plan, become, make_plan, plan_file
from manyheads.convert.prices import check_plan
from manyheads.convert.ranks import ALONE, Ranks, wait_for
from manyheads.convert.resume import check_resume, write_text
from manyheads.convert.share import check_in_place, check_shared, shrink_shared
from manyheads.convert.stats import AttentionStats
from manyheads.convert.stream import InMemory, Layers, OnDisk, attention_of, batches, layer_name, put_attention, run
from manyheads.convert.survey import Calibration, Progress, look_up, save, stretched, survey, surveyed, turning_damage
from manyheads.core.flow import Links
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.pretrained import ManyheadsConfig
from manyheads.stack.seam import SeamAttention


@dataclass(frozen=True)
class Damage:
    """Relative squared error of a converted layer's output, on the inputs it really gets, before and after healing."""

    spec: str
    fitted: float
    healed: float


def shrink(
    layers: Layers,
    tokens: Tensor,
    goals: Sequence[Goal],
    work: Path,
    *,
    heal: LayerwiseHeal | None = None,
    stretch: int = 4096,
    bfloat16: bool | None = None,
    options: dict[str, Any] | None = None,
    progress: Progress = lambda stage, done, total: None,
    ranks: Ranks = ALONE,
) -> list[list[Damage]]:
    """Convert a source for each goal; checkpoints land in `work/<goal name>`.

    Args:
        layers: the source.
        tokens: calibration windows `[N, T]`.
        work: folder of the job; what it holds from an interrupted run with the same options is used.
        heal: layer-wise healing, or None for the bare fit.
        stretch: half of the windows get jumps in their positions, up to this one (or as far as the source goes), so
            that short windows also teach what far keys look like; 0 for none.
        bfloat16: matrix products in half precision; by default where all devices are fast at them.
        options: anything else that the result depends on; recorded to check a resume.
        ranks: this process among several with one `work`. They share the layers of the survey and of prices, then the
            goals; each returns when all goals are finished.

    Returns:
        For each goal, the damage of each layer.
    """
    heal = LayerwiseHeal(steps=0) if heal is None else heal
    if bfloat16 is None:
        bfloat16 = all(map(fast_in_half, layers.devices))
    heal = replace(heal, bfloat16=bfloat16)
    limit = min(stretch, getattr(layers.config.base, "max_position_embeddings", stretch))
    text = Calibration(tokens, stretched(len(tokens), tokens.shape[1], limit, heal.seed), bfloat16)
    refuse(layers.config, goals)
    if any(goal.to == "retrieval" for goal in goals) and not isinstance(layers, InMemory):
        raise OptionError("which heads retrieve is tried on the whole model; this one is read layer by layer")
    if any(goal.to == "share" for goal in goals) and isinstance(layers, InMemory):
        check_in_place(layers)
    source = {"source": _digest(layers.embed(tokens)), "tokens": _digest(tokens)}
    check_resume(work, {**source, "heal": asdict(heal), "stretch": limit, **(options or {})})
    slots = torch.zeros(0)
    if any(goal.to != "share" for goal in goals):  # which fits nothing
        survey(layers, text, work / "survey", progress, ranks)
        slots = turning_damage(work / "survey", len(layers.config.specs))
    for goal in goals:
        if isinstance(goal.method, Retrieval) and isinstance(layers, InMemory):
            look_up(layers, tokens, goal.method.pairs, work / "survey", heal.seed, progress)
    for goal in goals:
        if goal.to == "auto" and not damage_file(work, goal).exists():
            make_plan(layers, text, goal, work, slots, progress, ranks)
    for goal in ranks.share(goals):
        found = (
            share(layers, tokens, goal, work, progress) if goal.to == "share"
            else convert(layers, text, goal, work, heal, slots, progress)
        )  # fmt: skip
        write_text(json.dumps([asdict(each) for each in found], indent=1), damage_file(work, goal))
    files = [damage_file(work, goal) for goal in goals]
    wait_for(files)
    return [[Damage(**each) for each in json.loads(file.read_text(encoding="utf-8"))] for file in files]


def damage_file(work: Path, goal: Goal) -> Path:
    """What a finished goal leaves beside its folder."""
    return work / f"{goal.name}.damage.json"


def share(layers: Layers, tokens: Tensor, goal: Goal, work: Path, progress: Progress) -> list[Damage]:
    """One goal by layers that read the rows of others."""
    assert isinstance(goal.method, Shared)
    found = shrink_shared(
        layers, tokens, goal.owners, work / goal.name, search=goal.method.search, threshold=goal.method.threshold,
        notes={"goal": asdict(goal)},
        progress=lambda done, total: progress(goal.name, done, total),
    )  # fmt: skip
    return [Damage(**each) for each in found]


def refuse(config: ManyheadsConfig, goals: Sequence[Goal]) -> None:
    """Raise before any work for layers that a goal's moves cannot convert."""
    for goal in goals:
        if goal.to in ("share", "auto"):
            check_shared(config, goal.owners) if goal.to == "share" else check_plan(config, goal)
            continue
        method, count = goal.method, len(config.specs)
        if isinstance(method, Tensorised) and method.layers and max(method.layers) >= count:
            raise OptionError(f"{method}: the model has {count} layers, 0 to {count - 1}")
        if isinstance(method, Retrieval) and (method.heads or 0) >= sum(config.heads):
            raise OptionError(f"{method}: the model has {sum(config.heads)} heads; fewer stay")
        moves = every_move(goal)
        for index, line in enumerate(config.specs):
            reasons = [why for move in moves if (why := move.refusal(Spec.parse(line))) is not None]
            if len(reasons) == len(moves):
                raise OptionError(f"layer {index} cannot become {goal.name}: {reasons[0]}")


def convert(
    layers: Layers,
    text: Calibration,
    goal: Goal,
    work: Path,
    heal: LayerwiseHeal,
    damage: Tensor,
    progress: Progress = lambda stage, done, total: None,
) -> list[Damage]:
    """One goal: fit, heal and write layer after layer. Goes on after the last layer that an earlier run finished."""
    config, count = layers.config, len(layers.config.specs)
    assert config.base is not None
    normed = family_of(config.base).norms_output
    folder = work / goal.name
    folder.mkdir(parents=True, exist_ok=True)
    done = _Done.read(folder)
    if done.finished:
        return done.damage
    fit = Fitting(layers, goal, work, damage, heal)
    if fit.readers and done.layers:  # whose owners' rows are kept in memory alone
        done = done.again()
    source, ours = done.streams or ((hidden := layers.embed(text.tokens)), hidden.clone())
    links = [Links() for _ in batches(ours)]
    for index in range(done.layers, count):
        with layers.open(index) as layer:
            seen = run(layer, config, source, text.positions, bfloat16=text.bfloat16)
            given = run(layer, config, ours, text.positions, bfloat16=text.bfloat16)
            stats, felt = surveyed(work / "survey", index, layers.devices[index])
            # Through a norm a layer cannot make good what earlier ones lost: it is to do what its source does.
            stream, target = (seen.y, seen.y) if normed else (seen.before + seen.y, seen.before + seen.y - given.before)
            problem = (given.x, target, stream, felt, text.positions)
            own = (given.x, given.y, stream, felt, text.positions)
            attention = attention_of(layer, config)
            fitted = fit(index, attention, stats, own)
            put_attention(layer, config, fitted)
            if index in fit.readers:  # of rows that are given, nothing is healed
                passed = run(layer, config, ours, text.positions, bfloat16=text.bfloat16, links=links)
                before = after = _relative(passed.y, target)
            else:
                before = heal.error(fitted, *problem)
                if fit.recurrent(index, attention):
                    stages = Mohawk(heal.steps, heal.batch, seed=heal.seed, bfloat16=heal.bfloat16)
                    stages(fitted, attention, fit.shares[index], seen.x, seen.y, text.positions)
                after = heal(fitted, *problem)
                passed = run(layer, config, ours, text.positions, record=False, bfloat16=text.bfloat16, links=links)
            for link in links:
                link.rows = {owner: rows for owner, rows in link.rows.items() if owner in fit.readers.values()}
            source, ours = seen.after, passed.after
            _write_layer(layer, config, index, folder)
        done.add(Damage(str(fitted.spec), before, after), source, ours)
        progress(goal.name, index + 1, count)
    _finish(layers, goal, folder, done.damage, fit)
    return done.damage


class Fitting:
    """What a goal makes of each layer: a method's best move, or what a plan says. readers: who reads whose rows."""

    def __init__(self, layers: Layers, goal: Goal, work: Path, damage: Tensor, heal: LayerwiseHeal) -> None:
        self.damage, self.heal, self.goal = damage, heal, goal
        self.plan = Plan.load(plan_file(work, goal)) if goal.to == "auto" else None
        if self.plan is not None and self.plan.method:
            self.goal = self.plan.goal_of(goal)
        self.readers = {} if self.plan is None else self.plan.readers
        self.shares = shares(layers, self.goal, work / "survey", damage)

    def __call__(self, index: int, attention: SeamAttention, stats: AttentionStats, own: Any) -> SeamAttention:
        """The fitted layer; `own` is the problem of doing what the layer itself does."""
        if self.plan is not None and self.plan.options:
            return become(self.plan.options[index], attention, stats, choose(self.damage, self.goal.turning))
        moves = moves_of(self.goal, attention, stats, self.damage, self.shares[index])
        return best(moves, attention, stats, self.heal, own)

    def recurrent(self, index: int, attention: SeamAttention) -> bool:
        """Whether heads of a layer have become recurrent, which has stages of its own before it heals."""
        return self.goal.to == "retrieval" and len(self.shares[index]) < attention.heads

    def heads(self, config: ManyheadsConfig) -> list[int]:
        """How many attention heads each layer has."""
        if self.goal.to != "retrieval":
            return config.heads
        return [len(kept) or every for kept, every in zip(self.shares, config.heads, strict=True)]

    @property
    def notes(self) -> dict[str, Any]:
        """What the config remembers of the choice."""
        kept = {"kept": [[*each] for each in self.shares]} if self.goal.to == "retrieval" else {}
        return kept | ({} if self.plan is None else {"plan": asdict(self.plan)})


def _relative(y: Tensor, target: Tensor) -> float:
    return ((y - target).pow(2).sum() / target.pow(2).sum().clamp_min(1e-30)).item()


class _Done:
    """What of a goal is finished: layer files, and the two streams after the last of them."""

    def __init__(self, folder: Path, damage: list[Damage], streams: tuple[Tensor, Tensor] | None) -> None:
        self.folder, self.damage, self.streams = folder, damage, streams

    @property
    def layers(self) -> int:
        return len(self.damage)

    @property
    def finished(self) -> bool:
        """The streams go last, after the config."""
        return self.streams is None and (self.folder / "config.json").exists()

    def again(self) -> _Done:
        """From the first layer on."""
        return _Done(self.folder, [], None)

    @classmethod
    def read(cls, folder: Path) -> _Done:
        log, streams, config = (folder / name for name in ("damage.json", "streams.safetensors", "config.json"))
        if not streams.exists() and not config.exists():
            return cls(folder, [], None)
        damage = [Damage(**entry) for entry in json.loads(log.read_text())]
        if not streams.exists():
            return cls(folder, damage, None)
        kept = load_file(streams)
        damage = damage[: int(kept["layers"])]  # the log may be one layer ahead
        return cls(folder, damage, (kept["source"], kept["ours"]))

    def add(self, damage: Damage, source: Tensor, ours: Tensor) -> None:
        self.damage.append(damage)
        write_text(json.dumps([asdict(entry) for entry in self.damage], indent=1), self.folder / "damage.json")
        kept = {"source": source.contiguous(), "ours": ours.contiguous(), "layers": torch.tensor(self.layers)}
        save(kept, self.folder / "streams.safetensors")


def _write_layer(layer: nn.Module, config: ManyheadsConfig, index: int, folder: Path) -> None:
    name = layer_name(config, index)
    tensors = {f"model.{name}.{key}": t.contiguous() for key, t in layer.state_dict().items()}
    save(tensors, folder / f"layer-{index:05d}.safetensors")


def _finish(layers: Layers, goal: Goal, folder: Path, damage: list[Damage], fit: Fitting) -> None:
    """What surrounds the layers, the index and the config; afterwards the folder is a checkpoint."""
    for number, (name, tensor) in enumerate(layers.rest()):
        save({f"model.{name}": tensor.contiguous()}, folder / f"rest-{number:05d}.safetensors")
    where, size = {}, 0
    for file in sorted(folder.glob("*-*.safetensors")):
        header = _header(file)
        where |= dict.fromkeys(header, file.name)
        size += sum(stop - start for start, stop in header.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    write_text(json.dumps(index, indent=1), folder / "model.safetensors.index.json")
    config = ManyheadsConfig(
        base=layers.config.base,
        specs=[entry.spec for entry in damage],
        heads=fit.heads(layers.config),
        attention_path=layers.config.attention_path,
        kv_source=[fit.readers.get(layer) for layer in range(len(damage))],
        notes={
            "goal": asdict(goal),
            "damage": [asdict(entry) for entry in damage],
            **fit.notes,
        },
        architectures=["ManyheadsForCausalLM"],
    )
    config.save_pretrained(folder)
    if isinstance(layers, InMemory):
        layers.model.generation_config.save_pretrained(folder)
    elif isinstance(layers, OnDisk) and (given := layers.folder / "generation_config.json").exists():
        shutil.copy(given, folder)
    (folder / "streams.safetensors").unlink(missing_ok=True)


def _header(file: Path) -> dict[str, tuple[int, int]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"}


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:16]
