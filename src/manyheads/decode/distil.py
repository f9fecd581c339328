"""Train Medusa heads beside a frozen model, on text that the model writes itself.

First the model continues beginnings of given texts; then the heads learn what it wrote. Head k at position t is asked
for the token at t + 2 + k counted from zero, weighted by 0.8^(k+1), where that token is the model's own. Every batch of
text and every step follows from the seed and its number, so a job that goes on after an interrupt ends with equal bits.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from manyheads.convert.resume import check_resume, whole_file
from manyheads.convert.text import windows
from manyheads.convert.training import load_state, readable, save_state
from manyheads.decode.identity import Identity
from manyheads.decode.medusa import DESCRIPTION, WEIGHTS, MedusaHeads
from manyheads.decode.steps import generate
from manyheads.decode.verify import head_inputs
from manyheads.stack.pretrained import ManyheadsForCausalLM

Progress = Callable[[str, int, int], object]
DECAY = 0.8
HELD = 8
"""One of so many texts is held out, and the odds are measured on it."""


@dataclass(frozen=True)
class Distillation:
    """How heads are made and trained: AdamW, the rate warmed up over a tenth of the steps and then a cosine to zero.

    texts: that the model writes, of `prompt` tokens given and `length` written. sample: it draws tokens (at
    temperature 1) instead of taking the likeliest. save_every: steps between checkpoints.
    """

    heads: int = 3
    layers: int = 1
    width: int = 10
    texts: int = 256
    prompt: int = 16
    length: int = 112
    sample: bool = False
    steps: int = 400
    batch: int = 8
    lr: float = 1e-3
    seed: int = 0
    save_every: int = 25

    def __post_init__(self) -> None:
        for name in ("heads", "layers", "width", "prompt", "length", "steps", "batch", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; at least 1")
        if self.texts < 2 * HELD:
            raise ValueError(f"texts={self.texts}; at least {2 * HELD}, one in {HELD} of which is held out")
        if self.length < self.heads + 1:
            raise ValueError(f"length={self.length} teaches {self.heads} heads nothing; at least {self.heads + 1}")

    def rate(self, step: int) -> float:
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.lr * (step + 1) / warm
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm)))


def train(
    model: ManyheadsForCausalLM, text: Tensor | str, out: Path, how: Distillation = Distillation(), *,
    tokenizer: PreTrainedTokenizerBase | None = None, name: str = "", progress: Progress = lambda *_: None,
) -> MedusaHeads:  # fmt: skip
    """Train heads and write them to `out`; goes on where an interrupted call with the same arguments stopped.

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
        heads = _Training(model, how, written[~held], work).go(progress)
        hidden = torch.cat([_hidden(model, rows) for rows in written[held].split(how.batch)])
        heads.measure(hidden[:, :-1], _targets(written[held], how.prompt))
    heads.eval()
    heads.save(out, model, tokenizer, name, training=asdict(how))
    shutil.rmtree(work)
    return heads


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


def _write(model: ManyheadsForCausalLM, begun: Tensor, how: Distillation, work: Path, progress: Progress) -> Tensor:
    """Texts `[texts, prompt + length]` of the model, batch by batch, each of which is a file once it is whole."""
    parts = begun.split(how.batch)
    progress("text", 0, len(parts))
    rows = []
    for number, part in enumerate(parts):
        file = work / f"text-{number:05d}.safetensors"
        if not file.exists():
            found = generate(
                model, part, None, how.length, sample=how.sample, seed=how.seed + number * how.batch, stop=()
            )
            new = torch.tensor(found.tokens)
            with whole_file(file) as partial:
                save_file({"tokens": torch.cat([part.cpu(), new], 1)}, partial)
        rows.append(load_file(file)["tokens"])
        progress("text", number + 1, len(parts))
    return torch.cat(rows)


def _hidden(model: ManyheadsForCausalLM, tokens: Tensor) -> Tensor:
    """What the language model head reads, `[B, T, D]`."""
    with torch.no_grad(), head_inputs(model, skip=True) as seen:
        cast(Any, model)(tokens.to(model.device), use_cache=False)
    return seen[-1]


def _targets(tokens: Tensor, prompt: int) -> Tensor:
    """The token after each position, -1 where the model did not write it."""
    targets = tokens[:, 1:].clone()
    targets[:, : prompt - 1] = -1
    return targets


class _Training:
    def __init__(self, model: ManyheadsForCausalLM, how: Distillation, texts: Tensor, work: Path) -> None:
        self.model, self.how, self.texts, self.file = model, how, texts, work / "training.pt"
        self.heads = MedusaHeads(model, how.heads, how.layers, how.width)
        self.optimiser = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.done = 0
        if self.file.exists():
            self._load()

    def go(self, progress: Progress) -> MedusaHeads:
        progress("heads", self.done, self.how.steps)
        while self.done < self.how.steps:
            self._step()
            self.done += 1
            if self.done % self.how.save_every == 0 or self.done == self.how.steps:
                self._save()
            progress("heads", self.done, self.how.steps)
        return self.heads

    def _step(self) -> None:
        how = self.how
        draws = torch.Generator().manual_seed(1_000_003 * (how.seed + 1) + self.done)
        tokens = self.texts[torch.randint(len(self.texts), (how.batch,), generator=draws)]
        hidden, targets = _hidden(self.model, tokens)[:, :-1], _targets(tokens, how.prompt).to(self.model.device)
        for group in self.optimiser.param_groups:
            group["lr"] = how.rate(self.done)
        self.optimiser.zero_grad()
        for head in range(how.heads):  # one at a time: logits are the largest tensors
            loss_of(self.heads, hidden, targets, head).mul(DECAY ** (head + 1)).backward()
        size = torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        if not math.isfinite(size.item()):
            raise FloatingPointError(
                f"the gradient of step {self.done} is not finite; a lower rate than {how.lr} helps"
            )
        self.optimiser.step()

    def _save(self) -> None:
        state = {"heads": self.heads.state_dict(), "optimiser": self.optimiser.state_dict(), "done": self.done}
        save_state(state, self.file)

    def _load(self) -> None:
        with readable(self.file):
            state = load_state(self.file)
            self.heads.load_state_dict(state["heads"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.done = state["done"]


def loss_of(heads: MedusaHeads, hidden: Tensor, targets: Tensor, head: int) -> Tensor:
    """Cross-entropy of one head. targets `[B, T]`: the token after each position; head k takes the one k + 1 later."""
    wanted = targets[:, head + 1 :]
    known = wanted >= 0
    return F.cross_entropy(heads(hidden[:, : wanted.shape[1]][known], head).float(), wanted[known])


__all__ = ["DESCRIPTION", "WEIGHTS", "Distillation", "loss_of", "train"]
