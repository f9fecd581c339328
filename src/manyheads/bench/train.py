"""One run of `compare`: a design and a seed in, a curve of losses on held-out text out.

What a step does follows from the seed and the number of the step alone (its windows of text, and what parts draw), so a
run that goes on after a checkpoint ends with the same bits as one that was never interrupted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.bench.design import VOCAB, Design
from manyheads.convert.resume import write_text
from manyheads.convert.training import load_state, rate, readable, save_state, step_seed
from manyheads.core.flow import Links

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
POINTS = 12
"""Intervals between evaluations."""
HELD = 16384
"""Held-out tokens that a loss is measured on, at most."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes that no model trains on."""

    train: bytes
    held: bytes

    def windows(self, context: int) -> Tensor:
        """Windows of held-out tokens `[N, context + 1]`, evenly over the text, the same for every model."""
        rows = torch.frombuffer(bytearray(self.held), dtype=torch.uint8).unfold(0, context + 1, context)
        count = max(1, min(len(rows), HELD // context))
        return rows[torch.linspace(0, len(rows) - 1, count).round().long()].long()


@dataclass(frozen=True)
class Training:
    """How every model is trained: AdamW, the rate warmed up and then a cosine to a tenth of `lr`.

    dtype: `bfloat16` computes matrix products in it, weights stay float32; the others hold for everything.
    aux_weight: factor of the auxiliary losses' mean. decay: of weight matrices. save_every: steps between checkpoints.
    """

    steps: int = 300
    batch: int = 8
    context: int = 256
    lr: float = 3e-3
    warmup: int = 30
    dtype: str = "float32"
    aux_weight: float = 0.01
    decay: float = 0.1
    save_every: int = 25

    @property
    def grid(self) -> tuple[int, ...]:
        """Steps after which the loss is measured; the first is 0, the last is the last."""
        return tuple(sorted({round(self.steps * point / POINTS) for point in range(POINTS + 1)}))

    def rate(self, step: int) -> float:
        return rate(step, self.steps, self.lr, self.warmup)


@dataclass(frozen=True)
class Run:
    """What a run found: the held-out loss, nats a token, at each step of the grid (NaN once it has diverged)."""

    curve: tuple[float, ...]
    seconds: float


class Trainer:
    """A model in training."""

    def __init__(self, design: Design, training: Training, corpus: Corpus, seed: int) -> None:
        self.training, self.seed = training, seed
        self.text = torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8)
        self.held = corpus.windows(training.context)
        torch.manual_seed(seed)
        half = training.dtype == "bfloat16"
        self.model = design.build().to(torch.float32 if half else DTYPES[training.dtype])
        self.autocast: Callable[[], Any] = (lambda: torch.autocast("cpu", torch.bfloat16)) if half else nullcontext
        kinds = [[p for p in self.model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
        groups = [{"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, (training.decay, 0.0))]  # noqa: B905
        self.optimiser = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))
        self.done, self.curve, self.seconds = 0, [], 0.0

    def batch(self, step: int) -> Tensor:
        """Windows `[batch, context + 1]` at random places."""
        generator = torch.Generator().manual_seed(step_seed(self.seed, step))
        width = self.training.context + 1
        starts = torch.randint(len(self.text) - width + 1, (self.training.batch, 1), generator=generator)
        return self.text[starts + torch.arange(width)].long()

    def step(self) -> bool:
        """One step; False if the loss is no number any more."""
        training, step = self.training, self.done
        torch.manual_seed(step_seed(self.seed, step) + 1)
        self.model.train()
        self.model.stack.on_step(min(1.0, step / max(1, training.steps - 1)))
        for group in self.optimiser.param_groups:
            group["lr"] = training.rate(step)
        links = Links()
        with self.autocast():
            loss = self._loss(self.batch(step), links)
            if links.aux:
                loss = loss + training.aux_weight * torch.stack(list(links.aux.values())).mean()
        self.optimiser.zero_grad()
        loss.backward()
        size = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.done += 1
        if not (math.isfinite(loss.item()) and math.isfinite(size.item())):
            return False
        self.optimiser.step()
        return True

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out windows."""
        self.model.eval()
        with self.autocast():
            parts = [(self._loss(rows).double(), len(rows)) for rows in self.held.split(4 * self.training.batch)]
        return float(sum(loss * rows for loss, rows in parts) / len(self.held))

    def _loss(self, tokens: Tensor, links: Links | None = None) -> Tensor:
        logits = self.model(tokens[:, :-1], links=links)
        return F.cross_entropy(logits.float().reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))

    def save(self, file: Path) -> None:
        """Whole or not at all."""
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "done": self.done}
        save_state(state | {"curve": self.curve, "seconds": self.seconds}, file)

    def load(self, file: Path) -> None:
        """Raises a ValueError for what is no checkpoint of this run."""
        state = load_state(file)
        with readable(file):
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.done, self.curve, self.seconds = state["done"], state["curve"], state["seconds"]


def train(
    design: Design, seed: int, training: Training, corpus: Corpus, file: Path, progress: Callable[[int, int], object]
) -> None:
    """Train, and leave the `Run` in `file`; goes on after the last checkpoint, which lies next to it.

    Args:
        progress: called with (steps done, steps in all).
    """
    checkpoint = file.with_suffix(".pt")
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(design, training, corpus, seed)
        if checkpoint.exists():
            trainer.load(checkpoint)
        progress(trainer.done, training.steps)
        start = time.perf_counter() - trainer.seconds
        fine = True
        if not trainer.done:
            trainer.curve.append(trainer.evaluate())
        while fine and trainer.done < training.steps:
            fine = trainer.step()
            if fine and trainer.done in training.grid:
                trainer.curve.append(trainer.evaluate())
            trainer.seconds = time.perf_counter() - start
            if fine and trainer.done % training.save_every == 0 and trainer.done < training.steps:
                trainer.save(checkpoint)
            if trainer.done < training.steps:
                progress(trainer.done, training.steps)
    curve = [*trainer.curve, *[math.nan] * (len(training.grid) - len(trainer.curve))]
    known = [loss if math.isfinite(loss) else None for loss in curve]
    write_text(json.dumps({"curve": known, "seconds": round(trainer.seconds, 3)}), file)
    checkpoint.unlink(missing_ok=True)
    progress(training.steps, training.steps)


def read_run(file: Path) -> Run:
    """Raises a ValueError for what `train` has not written."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Run(tuple(math.nan if loss is None else float(loss) for loss in found["curve"]), float(found["seconds"]))
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} cannot be read as a finished run; remove it, and the run is made anew") from error
