"""The whole of `manyheads shrink` as a function: from a model's name and budgets to checkpoints, figures and a report.

A job works in `<out>.partial`, which an interrupt leaves behind and a resumed job goes on from; it takes the name
`<out>` when everything is converted, measured and written. At most two models are in memory, the source and one
candidate.
"""

from __future__ import annotations

import datetime
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from manyheads.bench.figures import CONTEXTS, measure_all
from manyheads.bench.folders import check_folders, finish, kept, partial_folder
from manyheads.bench.healed import on_device, save_healed
from manyheads.bench.report import write_report
from manyheads.bench.streamed import measure_streamed
from manyheads.bench.timing import machine
from manyheads.convert.account import account
from manyheads.convert.adopt import FAMILIES, AdoptError, adopted_config, family_of
from manyheads.convert.corpus import FileWindows, Text
from manyheads.convert.devices import DeviceMap, Devices, peak_memory
from manyheads.convert.distil import Distil, check, distil
from manyheads.convert.export.atomic import new_folder
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import Method, read_method
from manyheads.convert.plan import BudgetError, Goal, make_goal, shape_of
from manyheads.convert.planner import plan_file
from manyheads.convert.ranks import Ranks, wait_for
from manyheads.convert.shrink import damage_file, refuse, shrink
from manyheads.convert.source import (
    EMBEDDED,
    Source,
    SourceError,
    download,
    load_source,
    open_source,
    read_config,
    reason_of,
    weight_files,
)
from manyheads.convert.stream import InMemory, OnDisk, layers_prefix
from manyheads.convert.text import Texts, default_text, fitting, max_positions, read_text, second_text, split, windows
from manyheads.convert.verify import quality
from manyheads.stack.pretrained import ManyheadsConfig

Progress = Callable[[str, int, int], object]
"""Called with (stage, steps done, steps in all)."""

PROMPT = "Water boils at a lower temperature in the mountains because"
CALIBRATION = (16, 1024)
"""Windows and tokens in each."""
EVALUATION = (5, 2048)
SECOND = 2
"""Windows of the second text, as long as those of the evaluation."""
HEALED, TRAINING = "healed", "training"
"""Folders of a job that heals end to end, until it is finished."""


def shrink_model(
    model: str | Path,
    budgets: str | Sequence[str] = "50%",
    *,
    to: str | Method = "mla",
    texts: Sequence[str | Path] = (),
    heal: str | int | LayerwiseHeal | None = "layerwise",
    end_to_end: int | Distil | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    prompt: str = PROMPT,
    contexts: Sequence[int] = CONTEXTS,
    calibration: tuple[int, int] = CALIBRATION,
    evaluation: tuple[int, int] = EVALUATION,
    stages: bool = False,
    stream: bool = False,
    device_map: Devices | None = None,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Shrink a model's cache to each budget, measure what that cost, and write everything to a new folder.

    Args:
        model: a hub name, a folder, a GGUF file, or `smollm2`.
        budgets: `50%` of the source's cache, or a number of floats a token and layer; one candidate each.
        to: `mla`, `gqa`, `auto` (a plan: each layer becomes what hurts least, see `convert.planner`), `share` (layers
            that read the rows of others, which nothing heals), or a published method, with options such as `gqa(mean)`
            or `mha2mla(keep=uniform)`; see `manyheads list --methods`.
        texts: files to calibrate on (first 80 %) and to evaluate on (the rest), instead of Python's help texts.
        heal: `layerwise`, a number of steps a layer, `none`, or the options themselves.
        end_to_end: steps of training that follow for each candidate, on the text that calibrates (see `distil`), or its
            options.
        out: must not exist; default `<name>-shrunk`.
        resume: go on with what an interrupted job left in `<out>.partial`; without such a job, start one.
        prompt: what every model's text sample continues.
        contexts: lengths at which decoding is timed; none, and nothing is.
        calibration, evaluation: (windows, tokens in each).
        stages: also say how much of the loss each stage of a conversion brings (takes another pass for each).
        stream: read the model layer by layer from its folder, and measure so: memory holds a layer, however large the
            model. Nothing is timed or generated, and fits go without the loss's own metric, which needs all of it.
        device_map: which devices work on which layers, of the conversion and of what `stream` measures (see
            `DeviceMap.read`); None: the CPU. What takes the whole model stays on the CPU.
        seed: of healing.

    Under a launcher (RANK and WORLD_SIZE in the environment) processes share layers and candidates, and rank 0 measures
    them.

    Returns:
        What `result.json` holds and `manyheads shrink --json` prints: `model`, `date`, `text`, `source` and
        `candidates` (rows of figures, see `manyheads.bench.report`), `prompt`, `seconds`, `machine`, `notes`, `out`,
        `report` (None without plotly).

    Raises:
        FileExistsError: `out` exists, or an unfinished job of that name and `resume` is not set.
        SourceError, AdoptError, BudgetError, OptionError, ValueError: a model, budget, option or text that does not
            fit, before any work; nothing is left behind.
        ResumeError: the unfinished job had other options.
        CheckError: a converted model failed its checks.
        OSError: the disk is full; what is finished stays for `resume`.
    """
    budgets = [budgets] if isinstance(budgets, str) else list(budgets)
    to = read_method(to)
    healing = read_heal(heal, seed)
    training = Distil(steps=end_to_end, seed=seed) if isinstance(end_to_end, int) else end_to_end
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if wrong := [context for context in contexts if context < 1]:
        raise ValueError(f"a context is at least one token, not {wrong[0]}")
    if stream and (training is not None or stages):
        raise ValueError(f"{'stages' if stages else 'training end to end'} needs the whole model in memory: no stream")
    out, ranks = out_folder(model, out), Ranks.here()
    devices = None if device_map is None else DeviceMap.read(device_map, ranks)
    if ranks.world > 1 and training is not None:
        raise ValueError("several processes train by a command of its own, heal; shrink without training first")
    work = partial_folder(out)
    check_folders(out, work, resume or ranks.rank > 0)
    own = read_text([Path(file) for file in texts]) if texts else None
    config = quick_config(model)
    goals = None if config is None else _goals(config, budgets, to)
    if config is not None and devices is not None:
        devices.over(layers_prefix(config), len(config.specs))
    clock = _Clock(progress)
    progress("load", 0, 1)
    source = open_source(model) if stream else load_source(model)
    layers = (
        OnDisk(source.folder, devices=devices) if stream and source.folder is not None
        else InMemory(source.model, devices)
    )  # fmt: skip
    clock("load", 1, 1)
    goals = goals or _goals(layers.config, budgets, to)
    tried = Tried.cut(source, own, [Path(file).name for file in texts], calibration, evaluation)
    contexts = _within(contexts, layers.config, tried.notes)
    options = {"model": source.name, "kv": budgets, "to": str(to), "text": tried.text["calibration"], "seed": seed}
    text = None
    if training is not None and isinstance(layers, InMemory):
        training, text = _end_to_end(training, layers.model, own, tried)
        options["distil"] = asdict(training)
    notes = [*tried.notes, *(goal.note for goal in goals if goal.note is not None)]
    progress("calibrate", 0, len(layers.config.specs))
    if ranks.rank:
        shrink(layers, tried.calibration, goals, work, heal=healing, options=options, progress=clock, ranks=ranks)
        wait_for([out / "result.json"])
        return json.loads((out / "result.json").read_text(encoding="utf-8"))
    with kept(work):
        _put_healed(work, [goal.name for goal in goals if not (work / goal.name).exists()])
        damages = shrink(
            layers, tried.calibration, goals, work, heal=healing, options=options, progress=clock, ranks=ranks
        )
        for goal in goals:
            tried.tokenizer.save_pretrained(work / goal.name)
        if training is not None and text is not None and isinstance(layers, InMemory):
            _distil(layers.model, goals, work, tried.tokenizer, text, training, clock)
        folders = {goal: _candidate(work, goal) for goal in goals}
        if isinstance(layers, OnDisk):
            rows = measure_streamed(layers, folders, damages, tried.evaluation, tried.second, clock)
        else:
            rows = measure_all(
                layers.model, folders, damages, tried.tokenizer, tried.evaluation, tried.second, prompt, contexts, clock
            )
        for row, goal in zip(rows[1:], goals, strict=True):
            row |= {"folder": str(out / goal.name), "damage_healed": row["damage_healed"] if healing else None}
            if stages and isinstance(layers, InMemory):
                row["stages"] = _stages(layers, tried.calibration, goal, work, clock)
        if taken := peak_memory(layers.devices):
            said = ", ".join(f"{size:,.0f} MB on {device}" for device, size in taken.items())
            notes.append(f"tensors took at most {said}; other figures of memory are the host's")
        result = {
            "model": source.name, "date": datetime.date.today().isoformat(), "text": tried.text, "source": rows[0],
            "candidates": rows[1:], "prompt": prompt, "seconds": clock.seconds, "machine": machine(), "notes": notes,
            "out": str(out), "report": str(out / "report.html"),
        }  # fmt: skip
        _write(result, work)
        _put_healed(work, [goal.name for goal in goals])
        finish(work, out)
    shutil.rmtree(out / "survey", ignore_errors=True)
    for folder in (TRAINING, HEALED):
        shutil.rmtree(out / folder, ignore_errors=True)
    beside = [file for goal in goals for file in (plan_file(out, goal), damage_file(out, goal))]
    for scrap in (out / "job.json", *beside, *(out / goal.name / "damage.json" for goal in goals)):
        scrap.unlink(missing_ok=True)
    return result


# --- before any work


def out_folder(model: str | Path, out: str | Path | None = None) -> Path:
    """Where a job's output goes."""
    if out is not None and str(out).strip():
        return Path(out).expanduser()
    path = Path(model).expanduser()
    name = path.resolve().name if path.is_dir() else path.stem if path.suffix == ".gguf" else path.name
    return Path(f"{name}-shrunk")


def read_heal(heal: str | int | LayerwiseHeal | None, seed: int = 0) -> LayerwiseHeal | None:
    """Healing by name or by number of steps."""
    if heal is None or isinstance(heal, LayerwiseHeal):
        return heal
    text = str(heal).strip().lower()
    if text == "layerwise":
        return LayerwiseHeal(seed=seed)
    if text in ("none", "0"):
        return None
    if not text.isdecimal():
        raise ValueError(f"heal is layerwise, none, or a number of steps a layer, not {heal!r}")
    return LayerwiseHeal(steps=int(text), seed=seed)


def quick_config(model: str | Path) -> ManyheadsConfig | None:
    """The specs of a model from its config and its files' headers, before a weight is read.

    None where that is no faster than loading (a GGUF file), or where loading will say better what is wrong.

    Raises:
        SourceError, AdoptError: as loading and adopting would.
    """
    path = Path(model).expanduser()
    if not str(model).strip() or not path.is_dir():
        local = path.exists() or path.suffix == ".gguf" or str(model) == EMBEDDED or not str(model).strip()
        config = None
        if not local:
            with suppress(Exception):  # of the hub: no network, no such name
                config = AutoConfig.from_pretrained(download(str(model), ["config.json"]))
        return None if config is None else _specs_of(config)
    weight_files(path)
    return config_of(path)


def config_of(path: Path) -> ManyheadsConfig:
    """The specs of a model folder, or of a GGUF file, from its config alone.

    Raises:
        SourceError: there is no config, or it cannot be read. AdoptError: the family is not known.
    """
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_dir():
        kind = read_config(path).get("model_type")
        if not isinstance(kind, str):
            raise SourceError(f"{path / 'config.json'} names no model_type")
        if kind not in {"manyheads", *(known for family in FAMILIES for known in family.model_types)}:
            try:
                family_of(cast(PreTrainedConfig, SimpleNamespace(model_type=kind)))
            except AdoptError as error:
                raise AdoptError(f"{path}: {error}") from None
    else:
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        config = AutoConfig.from_pretrained(**where)
    except Exception as error:  # transformers raises whatever the checks of its fields raise
        raise SourceError(f"the config of {path} cannot be read: {reason_of(error)}") from error
    return _specs_of(config)


def _specs_of(config: PreTrainedConfig) -> ManyheadsConfig:
    return config if isinstance(config, ManyheadsConfig) else adopted_config(config)


def _goals(config: ManyheadsConfig, budgets: Sequence[str], to: str | Method) -> list[Goal]:
    """What each budget asks for; refused here if no method reaches it."""
    shape = shape_of(config)
    goals = [make_goal(text, to, shape) for text in budgets]
    if not goals:
        raise BudgetError("no budget given; 50% halves the cache")
    names = [goal.name for goal in goals]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BudgetError(f"two budgets are the same: {twice[0]}")
    sizes: dict[tuple[str, int], str] = {}
    for goal, text in zip(goals, budgets, strict=True):
        other = sizes.setdefault((goal.to, goal.floats), text)
        if other != text:
            raise BudgetError(f"{other} and {text} are the same budget, {goal.floats} numbers a token and layer")
    refuse(config, goals)
    return goals


@dataclass
class Tried:
    """What the models of a job are tried on."""

    tokenizer: PreTrainedTokenizerBase
    calibration: Tensor
    evaluation: Tensor
    second: Tensor | None
    text: dict[str, Any]
    notes: list[str]

    @classmethod
    def cut(
        cls, source: Source, own: str | None, files: Sequence[str], calibration: tuple[int, int],
        evaluation: tuple[int, int],
    ) -> Tried:  # fmt: skip
        cut, text, notes = cut_texts(source, own, files, calibration, evaluation)
        tokenizer, (count, length) = source.reader(), cut.evaluation.shape
        second = None
        if own is None:
            second = windows(tokenizer, second_text(), count=min(SECOND, count), length=length)
        told = {
            **text,
            "second": None if second is None else "docstrings of the standard library",
            "tokens_calibration": cut.calibration.numel(), "tokens_evaluation": cut.evaluation.numel(),
        }  # fmt: skip
        return cls(tokenizer, cut.calibration, cut.evaluation, second, told, notes)


def cut_texts(
    source: Source, own: str | None, files: Sequence[str], calibration: tuple[int, int], evaluation: tuple[int, int]
) -> tuple[Texts, dict[str, str], list[str]]:
    """The windows that a model is calibrated and evaluated on, what they are of, and notes.

    Args:
        own: text of `files`, instead of Python's help topics. calibration, evaluation: (windows, tokens in each).
    """
    tokenizer, notes = source.reader(), list[str]()
    limit = max_positions(source.model.config)
    (c, c_length), (e, e_length) = (fitting(cut, limit, notes) for cut in (calibration, evaluation))
    cut = Texts.from_text(
        tokenizer, own or default_text(), calibration_windows=c, calibration_length=c_length,
        evaluation_windows=e, evaluation_length=e_length,
    )  # fmt: skip
    name = "Python's help topics" if own is None else ", ".join(files)
    told = {
        "calibration": f"{name}, first 80 %: {c} windows of {c_length} tokens",
        "evaluation": f"{name}, last 20 %: {e} windows of {e_length} tokens",
    }
    return cut, told, notes


def _within(contexts: Sequence[int], config: ManyheadsConfig, notes: list[str]) -> tuple[int, ...]:
    """Contexts no longer than the model's positions, each once."""
    limit = max_positions(config)
    if limit is None or max(contexts, default=0) <= limit:
        return tuple(dict.fromkeys(contexts))
    notes.append(f"contexts above the model's {limit} positions are timed at {limit}")
    return tuple(dict.fromkeys(min(context, limit) for context in contexts))


# --- the work


class _Clock:
    """Passes progress on, and adds up the seconds of what has been done."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress, self._last = progress, time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        known = {name: name for name in ("load", "calibrate", "distil", "measure", "account")} | {"time": "measure"}
        known["probe"] = "calibrate"
        self.lap(known.get(stage.split()[0], "convert"))
        self._progress(stage, done, total)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now


def _stages(layers: InMemory, tokens: Tensor, goal: Goal, work: Path, clock: _Clock) -> dict[str, float] | None:
    """The calibration loss after each stage; a plan that mixes moves has none in common."""
    if goal.by_layer:
        return None
    last = {"heal": work / goal.name, "distil": work / HEALED / goal.name}
    losses = account(layers, tokens, goal, work, progress=clock)
    losses |= {name: quality(load_source(folder).model, tokens).nll for name, folder in last.items() if folder.exists()}
    return {name: loss for name, loss in losses.items() if name != "source"}


# --- healing end to end


def _end_to_end(
    training: Distil, teacher: PreTrainedModel, own: str | None, tried: Tried
) -> tuple[Distil, FileWindows]:
    """The options as the model allows them, and the text; refused here, where they do not fit."""
    limit = max_positions(teacher.config)
    training = replace(training, batch=fitting(training.batch, limit, tried.notes))
    check(teacher, teacher, training)
    text = FileWindows(tried.tokenizer, Text.of(split(own or default_text())[0]))
    text.held(training.batch[1])
    return training, text


def _distil(
    teacher: PreTrainedModel, goals: Sequence[Goal], work: Path, tokenizer: PreTrainedTokenizerBase, text: FileWindows,
    training: Distil, clock: _Clock,
) -> None:  # fmt: skip
    """Train each candidate to predict what the source predicts; the result lies beside it until the job ends."""
    for goal in goals:
        folder, scrap = work / HEALED / goal.name, work / TRAINING / goal.name
        student = None if folder.exists() else load_source(work / goal.name).model
        if student is not None and "healed" not in student.config.notes:
            with on_device(student, teacher):
                found = distil(
                    student, teacher, text, training, work=scrap,
                    progress=lambda *step, goal=goal: clock(f"distil {goal.name}", *step),
                )  # fmt: skip
            with new_folder(folder) as made:
                save_healed(student, tokenizer, made, found, training)
                shutil.copy(work / goal.name / "damage.json", made)  # by which a resumed job knows it as finished
        shutil.rmtree(scrap, ignore_errors=True)


def _candidate(work: Path, goal: Goal) -> Path:
    """What a job has made for a goal."""
    healed = work / HEALED / goal.name
    return healed if healed.exists() else work / goal.name


def _put_healed(work: Path, names: Sequence[str]) -> None:
    """What was healed end to end takes the place of what it was made from."""
    for name in names:
        healed = work / HEALED / name
        if healed.exists():
            shutil.rmtree(work / name, ignore_errors=True)
            healed.rename(work / name)


def _write(result: dict[str, Any], work: Path) -> None:
    """The figures as a file and as a page; both say where they will be."""
    try:
        write_report(result, work / "report.html")
    except ImportError as error:
        result["report"] = None
        result["notes"].append(f"no report.html: {error}")
    (work / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
