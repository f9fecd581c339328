"""Train a drafter beside a frozen model, on text that the model writes itself.

First the model continues beginnings of given texts, and what its head reads meanwhile is kept, so that training runs
the drafter alone; then the drafter learns what was written. Every batch of text and every step follows from the seed
and its number, so a job that goes on after an interrupt ends with equal bits.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from manyheads.convert.resume import check_resume, whole_file
from manyheads.convert.text import windows
from manyheads.convert.training import load_state, readable, save_state, step_seed
from manyheads.core.check import check_whole
from manyheads.decode.identity import Identity
from manyheads.decode.jakiro import Jakiro
from manyheads.decode.learned import LearnedDrafter
from manyheads.decode.medusa import MedusaHeads
from manyheads.decode.mtp import MTP
from manyheads.decode.steps import generate
from manyheads.decode.verify import head_inputs
from manyheads.stack.pretrained import ManyheadsForCausalLM

Progress = Callable[[str, int, int], object]
HELD = 8
"""One of so many texts is held out, and the odds are measured on it."""


class Written(NamedTuple):
    """Texts of a model: tokens `[N, T]`, and what its head read when it chose each, `[N, T, D]`."""

    tokens: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Distillation:
    """How a drafter is made and trained: AdamW, the rate warmed up over a tenth of the steps and then a cosine to zero.

    heads: tokens drafted at most. layers: of a Medusa head. contrast: of `Jakiro`. words: the tokens most frequent in
    what the model wrote, which alone are drafted. texts: that the model writes, of `prompt` tokens given and `length`
    written, `together` of them at a time. sample: it draws tokens (at temperature 1) instead of taking the likeliest.
    batch: texts a step. save_every: steps between checkpoints.
    """

    drafter: Literal["medusa", "jakiro", "mtp"] = "medusa"
    heads: int = 3
    layers: int = 1
    width: int = 10
    contrast: bool = True
    words: int = 8192
    texts: int = 256
    prompt: int = 16
    length: int = 112
    together: int = 32
    sample: bool = False
    steps: int = 400
    batch: int = 8
    lr: float = 1e-3
    seed: int = 0
    save_every: int = 25

    def __post_init__(self) -> None:
        if self.drafter not in LearnedDrafter.kinds:
            raise ValueError(f"drafter={self.drafter!r}; known: {', '.join(sorted(LearnedDrafter.kinds))}")
        whole = ("heads", "layers", "width", "words", "prompt", "length", "together", "steps", "batch", "save_every")
        check_whole(**{name: getattr(self, name) for name in whole})
        for name, usual, of in (("layers", 1, "medusa"), ("contrast", True, "jakiro")):
            if self.drafter != of and getattr(self, name) != usual:
                raise ValueError(f"{name}={getattr(self, name)} is an option of {of}; drafter={self.drafter!r}")
        if self.texts < 2 * HELD:
            raise ValueError(f"texts={self.texts}; at least {2 * HELD}, one in {HELD} of which is held out")
        if self.length < self.heads + 2:
            raise ValueError(f"length={self.length} teaches {self.heads} heads nothing; at least {self.heads + 2}")

    def rate(self, step: int) -> float:
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))

    def make(self, model: ManyheadsForCausalLM, tokens: Tensor | None) -> LearnedDrafter:
        """The drafter before training."""
        torch.manual_seed(self.seed)
        if self.drafter == "medusa":
            return MedusaHeads(model, self.heads, self.layers, self.width, tokens)
        if self.drafter == "mtp":
            return MTP(model, self.heads, self.width, tokens=tokens)
        return Jakiro(model, self.heads, self.width, contrast=self.contrast, tokens=tokens)


def train(
    model: ManyheadsForCausalLM, text: Tensor | str, out: Path, how: Distillation = Distillation(), *,
    tokenizer: PreTrainedTokenizerBase | None = None, name: str = "", progress: Progress = lambda *_: None,
) -> LearnedDrafter:  # fmt: skip
    """Train a drafter and write it to `out`; goes on where an interrupted call with the same arguments stopped.

    Args:
        model: frozen; it comes back as it was.
        text: beginnings `[texts, prompt]`, or a text to cut them from with the tokenizer.

    Raises:
        FileExistsError: `out` holds something else.
        ResumeError: an interrupted job with other options.
    """
    work = out / "work"
    if out.exists() and not (work / "job.json").is_file() and any(out.iterdir()):
        raise FileExistsError(f"{out} exists already; remove it or choose another folder")
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("a text needs a tokenizer")
        text = windows(tokenizer, text, count=how.texts, length=how.prompt, spread=True)
    if text.shape != (how.texts, how.prompt):
        raise ValueError(f"beginnings {[*text.shape]}; {how.texts} of {how.prompt} tokens are wanted")
    made_for = Identity.of(model, tokenizer, name)
    begun = hashlib.sha256(text.cpu().numpy().tobytes()).hexdigest()
    check_resume(work, asdict(how) | {"model": made_for.weights, "text": begun})
    with torch.random.fork_rng(devices=[]), _frozen(model):
        written = _write(model, text, how, work, progress)
        held = torch.arange(how.texts) % HELD == HELD - 1
        drafter = _Training(model, how, Written(*(each[~held] for each in written)), work).go(progress)
        tokens, hidden = (each[held].to(model.device) for each in written)
        drafter.eval().measure(hidden, tokens)
    drafter.save(out, model, tokenizer, name, training=asdict(how))
    shutil.rmtree(work)
    return drafter


@contextmanager
def _frozen(model: ManyheadsForCausalLM) -> Iterator[None]:
    before = [parameter.requires_grad for parameter in model.parameters()]
    was = model.training
    try:
        model.requires_grad_(False).eval()
        yield
    finally:
        model.train(was)
        for parameter, wanted in zip(model.parameters(), before, strict=True):
            parameter.requires_grad_(wanted)


def _write(model: ManyheadsForCausalLM, begun: Tensor, how: Distillation, work: Path, progress: Progress) -> Written:
    """Texts of the model, batch by batch, each of which is a file once it is whole."""
    parts = begun.split(how.together)
    progress("text", 0, len(parts))
    rows = []
    for number, part in enumerate(parts):
        file = work / f"text-{number:05d}.safetensors"
        if not file.exists():
            seed = how.seed + number * how.together
            with head_inputs(model) as seen:
                found = generate(model, part, None, how.length, sample=how.sample, seed=seed, stop=())
            hidden = torch.cat([each[:, -1:] for each in seen], 1)  # a pass for each token that was chosen
            with whole_file(file) as partial:
                save_file({"tokens": torch.tensor(found.tokens), "hidden": hidden.cpu().contiguous()}, partial)
        with readable(file):
            rows.append(load_file(file))
        progress("text", number + 1, len(parts))
    return Written(*(torch.cat([each[name] for each in rows]) for name in Written._fields))


def frequent(tokens: Tensor, vocab: int, words: int) -> Tensor | None:
    """The tokens that come most often, smaller ones first among equals; None for all."""
    if words >= vocab:
        return None
    return torch.bincount(tokens.flatten(), minlength=vocab).argsort(descending=True, stable=True)[:words].sort().values


class _Training:
    def __init__(self, model: ManyheadsForCausalLM, how: Distillation, texts: Written, work: Path) -> None:
        self.how, self.texts, self.file, self.device = how, texts, work / "training.pt", model.device
        tokens = frequent(texts.tokens, model.config.get_text_config().vocab_size, how.words)
        self.drafter = how.make(model, tokens).train()
        self.optimiser = torch.optim.AdamW(self.drafter.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.done = 0
        if self.file.exists():
            self._load()

    def go(self, progress: Progress) -> LearnedDrafter:
        progress("heads", self.done, self.how.steps)
        while self.done < self.how.steps:
            self._step()
            self.done += 1
            if self.done % self.how.save_every == 0 or self.done == self.how.steps:
                self._save()
            progress("heads", self.done, self.how.steps)
        return self.drafter

    def _step(self) -> None:
        how = self.how
        torch.manual_seed(step_seed(how.seed, self.done))
        rows = torch.randint(len(self.texts.tokens), (how.batch,))
        tokens, hidden = (each[rows].to(self.device) for each in self.texts)
        for group in self.optimiser.param_groups:
            group["lr"] = how.rate(self.done)
        self.optimiser.zero_grad()
        for loss in self.drafter.losses(hidden, tokens):  # one at a time: logits are the largest tensors
            loss.backward()
        size = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        if not math.isfinite(size.item()):
            raise FloatingPointError(
                f"the gradient of step {self.done} is not finite; a lower rate than {how.lr} helps"
            )
        self.optimiser.step()

    def _save(self) -> None:
        state = {"heads": self.drafter.state_dict(), "optimiser": self.optimiser.state_dict(), "done": self.done}
        save_state(state, self.file)

    def _load(self) -> None:
        with readable(self.file):
            state = load_state(self.file)
            self.drafter.load_state_dict(state["heads"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.done = state["done"]
