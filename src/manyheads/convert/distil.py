"""End-to-end healing: a converted model is trained to predict what its source predicts.

What a step does follows from the seed and the number of the step alone, so a training that goes on after a checkpoint
ends with the same bits as one that was never interrupted. The loss is in `manyheads.convert.beside`.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.convert.beside import Beside
from manyheads.convert.corpus import TrainingText
from manyheads.convert.devices import fast_in_half
from manyheads.convert.lora import put_lora
from manyheads.convert.place import Alone, here
from manyheads.convert.ranks import Ranks
from manyheads.convert.relations import Relations
from manyheads.convert.resume import check_resume
from manyheads.convert.text import max_positions
from manyheads.convert.training import load_state, rate, readable, save_state, step_seed, unbroken
from manyheads.core.part import OptionError
from manyheads.stack.pretrained import ManyheadsForCausalLM

_SAMPLE = 256  # numbers of each tensor that a digest looks at


@dataclass(frozen=True)
class Distil:
    """Options of the training.

    steps of `batch` (windows, tokens in each) over all processes, each process's share in `accumulate` passes. The loss
    is ce · cross-entropy + kl · T² KL(teacher ‖ student at temperature T) + relations (see `Relations`; None: without).
    train: the `attention` layers, or `all` weights. lora: rank of peft's adapters, trained in their place and merged at
    the end (0: none). AdamW, the rate relative to each weight's own size, warmed up (default: a tenth of the steps) to
    `lr`, then a cosine to a tenth of it; gradients longer than `clip` are cut. every: steps between evaluations, each
    of which leaves a checkpoint; patience: evaluations without a better held-out loss after which it stops (0: never).
    bfloat16: matrix products in half precision, weights stay as they are (None: where the processor is fast at it, or
    as accelerate says).
    """

    steps: int = 300
    batch: tuple[int, int] = (2, 512)
    accumulate: int = 1
    ce: float = 0.1
    kl: float = 1.0
    temperature: float = 1.0
    relations: Relations | None = None
    train: Literal["attention", "all"] = "attention"
    lora: int = 0
    lr: float = 3e-4
    warmup: int | None = None
    decay: float = 0.0
    clip: float = 1.0
    every: int = 25
    patience: int = 3
    bfloat16: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "accumulate": 1, "every": 1, "patience": 0, "lora": 0, "warmup": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise OptionError(f"healing: {name}={value}; at least {low}")
        rows, length = self.batch
        if rows < 1 or length < 2:
            raise OptionError(f"healing: a batch is windows x tokens, at least 1x2, not {rows}x{length}")
        if rows % self.accumulate:
            raise OptionError(f"healing: {rows} windows do not make accumulate={self.accumulate} equal passes")
        for name in ("ce", "kl", "temperature", "lr", "decay", "clip"):
            value, above = getattr(self, name), name in ("temperature", "lr", "clip")
            if not (math.isfinite(value) and (value > 0 if above else value >= 0)):
                raise OptionError(f"healing: {name}={value}; it must be {'positive' if above else 'zero or more'}")
        if not self.ce + self.kl:
            raise OptionError("healing: ce and kl are both 0; one of them is what a held-out loss is made of")
        if self.train not in ("attention", "all"):
            raise OptionError(f"healing: train={self.train!r}; it may be attention or all")


class Held(NamedTuple):
    """A held-out measure, nats a token: the loss that is trained, its cross-entropy and its KL."""

    step: int
    loss: float
    ce: float
    kl: float


@dataclass(frozen=True)
class Distilled:
    """What a training found. `steps` were made; the student has the weights of step `best`, of the curve's least loss.

    seconds: of everything; stepping: of the steps alone. tokens: trained on. file: the best trained weights, where a
    work folder was given.
    """

    curve: tuple[Held, ...]
    steps: int
    best: int
    seconds: float
    stepping: float
    tokens: int
    file: Path | None


def distil(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    text: TrainingText,
    options: Distil | None = None,
    *,
    work: Path | None = None,
    record: dict[str, Any] | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Distilled:
    """Train a student in place to predict what a teacher predicts.

    Under `accelerate launch` processes share each step's windows; one process or several, the losses are the same.
    With FSDP 2 the student is sharded and stays so; its best weights are in `Distilled.file`.

    Args:
        student: of ours where only its attention is trained; weights in float32 (or float64).
        teacher: of the same vocabulary, on the same device; it is only read.
        text: see `manyheads.convert.corpus`.
        work: folder for checkpoints; what an interrupted run with the same options left there is gone on with.
        record: anything else that the result depends on; to check a resume.
        progress: called with (steps done, steps in all).

    Raises:
        OptionError, ValueError: models, text or options that do not fit, before any work.
        ResumeError: `work` holds a run with other options. FloatingPointError: the loss is no number any more.
        ImportError: LoRA without peft, several processes without accelerate.
    """
    options = options or Distil()
    check(student, teacher, options)
    place = here(student.device, lambda device: _fast(device, options.bfloat16))
    if place.world > 1 and work is None:
        raise ValueError("several processes need a work folder that all of them see")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if work is None else work
        stack.enter_context(_apart(place, student, teacher))
        trainer = Trainer(student, teacher, text, options, place, folder)
        trainer.begin({} if record is None else record)
        found = trainer.run(progress)
    return found if work is not None else replace(found, file=None)


def check(student: PreTrainedModel, teacher: PreTrainedModel, options: Distil) -> None:
    """Raises what `distil` would, of models and options, before any work."""
    ours, theirs = (model.config.get_text_config().vocab_size for model in (student, teacher))
    if ours != theirs:
        raise ValueError(f"the student predicts {ours:,} tokens, the teacher {theirs:,}; they need one vocabulary")
    length = options.batch[1]
    for who, model in (("student", student), ("teacher", teacher)):
        limit = max_positions(model.config)
        if limit is not None and length > limit:
            raise ValueError(f"windows of {length} tokens are longer than the {who}'s {limit} positions")
    world = Ranks.here().world
    if options.batch[0] % (world * options.accumulate):
        raise OptionError(
            f"healing: {options.batch[0]} windows a step do not make equal shares for {world} processes with "
            f"accumulate={options.accumulate}; give a multiple of {world * options.accumulate}"
        )
    if student.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"weights are trained in float32, not {student.dtype}; bfloat16=True computes in half precision"
        )
    if options.train == "attention" and not isinstance(student, ManyheadsForCausalLM):
        raise ValueError(f"the attention of a {type(student).__name__} is not known; adopt it, or train=all")
    if options.relations is not None:
        for who, model in (("student", student), ("teacher", teacher)):
            if not isinstance(model, ManyheadsForCausalLM):
                raise ValueError(
                    f"relations are between layers of ours; the {who} is a {type(model).__name__}: adopt it"
                )
        options.relations.check(*options.relations.layers(student, teacher))


def _fast(device: torch.device, asked: bool | None) -> bool:
    return fast_in_half(device) if asked is None else asked


@contextmanager
def _apart(place: Alone, student: PreTrainedModel, teacher: PreTrainedModel) -> Iterator[None]:
    """Training leaves no mark but the weights: modes, gradients and random numbers are then what they were."""
    kept = [(model, model.training) for model in (student, teacher)]
    wanted = {parameter: parameter.requires_grad for model, _ in kept for parameter in model.parameters()}
    cuda = [place.device] if place.device.type == "cuda" else []
    teacher.eval().requires_grad_(False).to(place.device)  # type: ignore[arg-type]
    student.to(place.device)  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            for model, training in kept:
                model.train(training)
            for parameter, grad in wanted.items():
                parameter.requires_grad_(grad)
                parameter.grad = None


# --- the training


class Trainer:
    """A student in training. Checkpoints are folders `step-000025` of `work`: the newest, and the best one."""

    def __init__(
        self, student: PreTrainedModel, teacher: PreTrainedModel, text: TrainingText, options: Distil, place: Alone,
        work: Path,
    ) -> None:  # fmt: skip
        rows, self.length = options.batch
        if place.sharded and (options.lora or options.relations is not None):
            raise ValueError("with sharded weights (FSDP) there is neither LoRA nor a loss of relations")
        self.student, self.text, self.options, self.place, self.work = student, text, options, place, work
        own = rows // place.world
        self.rows, self.passes = slice(place.rank * own, (place.rank + 1) * own), options.accumulate
        self.digest = [_digest(student), _digest(teacher)]
        self.held = text.held(self.length)
        self.warmup = options.steps // 10 if options.warmup is None else options.warmup
        self.adapted = self._choose()
        self.beside: nn.Module = Beside(student, teacher, options)
        groups = [
            {"params": [weight], "size": _size(weight), "weight_decay": options.decay if weight.ndim > 1 else 0.0}
            for weight in student.parameters()
            if weight.requires_grad
        ]
        optimiser = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), eps=1e-12)
        self.beside, self.optimiser = place.prepare(self.beside, optimiser)
        self.done, self.seconds, self.stepping = 0, 0.0, 0.0
        self.curve: list[Held] = []

    def _choose(self) -> Any:
        """Say which weights are trained."""
        student, options = self.student, self.options
        student.requires_grad_(False)
        inside: list[nn.Module] = [student]
        if isinstance(student, ManyheadsForCausalLM) and options.train == "attention":
            inside = [*student.attentions]
            inside += [module for name, module in student.named_modules() if name.rpartition(".")[2] == "bank"]
        if options.lora:
            torch.manual_seed(step_seed(options.seed, 0) + 1)
            return put_lora(student, inside, options.lora)
        for module in inside:
            module.requires_grad_()
        return None

    @property
    def best(self) -> Held:
        return min(self.curve, key=lambda held: held.loss)

    @property
    def finished(self) -> bool:
        options = self.options
        stale = bool(self.curve) and self.done - self.best.step >= options.patience * options.every
        return self.done >= options.steps or (options.patience > 0 and stale)

    def begin(self, record: dict[str, Any]) -> None:
        """Start, or go on after the last checkpoint."""
        student, teacher = self.digest
        known = {"student": student, "teacher": teacher, "text": self.text.digest, "heal": asdict(self.options)}
        known["heal"] |= {"bfloat16": self.place.bfloat16}
        if self.place.rank == 0:
            check_resume(self.work, record | known)
        self.place.wait()
        if folders := sorted(self.work.glob("step-??????")):
            self._load(folders[-1])

    def run(self, progress: Callable[[int, int], object]) -> Distilled:
        """Train until the steps are made or nothing gets better; the student then has the best weights."""
        options, began = self.options, time.perf_counter() - self.seconds
        try:
            progress(self.done, options.steps)
            while True:
                due = self.done % options.every == 0 or self.done == options.steps
                if due and (not self.curve or self.curve[-1].step < self.done):
                    self._evaluate()
                    self.seconds = time.perf_counter() - began
                    self._save()
                if self.finished:
                    break
                start = time.perf_counter()
                self._step()
                self.stepping += time.perf_counter() - start
                progress(self.done, options.steps)
        except KeyboardInterrupt:
            self.seconds = time.perf_counter() - began
            if self.curve and not self.place.sharded:  # to gather shards takes all processes, which may be anywhere
                self._save()
            raise
        best = self._folder(self.best.step)
        if self.done != self.best.step:
            self.place.restore(self.beside, self.optimiser, load_file(best / "weights.safetensors"))
        if self.adapted is not None:
            self.adapted.merge_and_unload()
        if self.done < options.steps:
            progress(options.steps, options.steps)
        tokens = self.done * math.prod(options.batch)
        return Distilled(
            tuple(self.curve),
            self.done,
            self.best.step,
            round(self.seconds, 3),
            round(self.stepping, 3),
            tokens,
            best / "weights.safetensors",
        )

    def _step(self) -> None:
        options, place, step = self.options, self.place, self.done
        torch.manual_seed(step_seed(options.seed, step) + 1 + 2 * place.rank)
        self.beside.train()
        if isinstance(self.student, ManyheadsForCausalLM):
            self.student.on_step(min(1.0, step / max(1, options.steps - 1)))
        for group in self.optimiser.param_groups:
            group["lr"] = group["size"] * rate(step, options.steps, options.lr, self.warmup)
        mine = self.text.batch(options.seed, step, options.batch[0], self.length, self.rows).to(place.device)
        self.optimiser.zero_grad()
        total = torch.zeros((), device=place.device)
        parts = mine.chunk(self.passes)
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            with nullcontext() if last else place.accumulating(self.beside):
                with place.compute():
                    loss = self.beside(part).loss / len(parts)
                place.backward(loss)
            total += loss.detach()
        size = place.clip(self.beside, options.clip)
        if not torch.isfinite(place.total(total + size.to(total.device))).item():
            raise FloatingPointError(f"the loss is no number any more at step {step + 1}; a smaller lr may help")
        with unbroken():
            self.optimiser.step()
            self.done += 1

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The held-out losses, of windows that processes share (the same number each; some count for nothing)."""
        place, count = self.place, len(self.held)
        self.beside.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=place.device)
        for first in range(0, count, place.world):
            row = first + place.rank
            with place.compute():
                found = self.beside(self.held[min(row, count - 1)][None].to(place.device))
            if row < count:
                sums += torch.stack([*found, torch.ones_like(found.loss)]).to(sums)
        *means, _ = (place.total(sums) / count).tolist()
        if not all(map(math.isfinite, means)):
            raise FloatingPointError(f"the held-out loss is no number any more after step {self.done}")
        self.curve.append(Held(self.done, *means))

    def _folder(self, step: int) -> Path:
        return self.work / f"step-{step:06d}"

    def _save(self) -> None:
        """A checkpoint, whole or not at all; older ones but the best go."""
        folder = self._folder(self.done)
        weights, optimiser = self.place.state(self.beside, self.optimiser)
        if self.place.rank == 0 and not folder.exists():
            partial = folder.with_suffix(".tmp")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                save_file({name: t.contiguous() for name, t in weights.items()}, partial / "weights.safetensors")
                curve = [list(held) for held in self.curve]
                known = {"optimiser": optimiser, "text": self.text.state(), "curve": curve, "done": self.done}
                spent = {"seconds": self.seconds, "stepping": self.stepping}
                save_state(known | spent, partial / "state.pt")
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            for old in self.work.glob("step-??????"):
                if old not in (folder, self._folder(self.best.step)):
                    shutil.rmtree(old)

    def _load(self, folder: Path) -> None:
        state = load_state(folder / "state.pt")
        with readable(folder):
            self.done, self.seconds, self.stepping = state["done"], state["seconds"], state["stepping"]
            self.curve = [Held(*entry) for entry in state["curve"]]
            self.text.restore(state["text"])
            weights = load_file(folder / "weights.safetensors")
            self.place.restore(self.beside, self.optimiser, weights, state["optimiser"])


def _size(weight: Tensor) -> float:
    """Root of its mean square, which rates are relative to; what starts at zero (LoRA's) has none."""
    return weight.detach().float().pow(2).mean().sqrt().item() or 1.0


def _digest(model: nn.Module) -> str:
    """Of a sample of every weight, quick also where the model is large."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        some = weight.detach().flatten()
        some = some[:: max(1, len(some) // _SAMPLE)].float().cpu().contiguous()
        digest.update(f"{name}{[*weight.shape]}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]
