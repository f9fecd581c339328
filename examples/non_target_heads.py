"""What a head says of inputs that it was never taught.

Rows are bags of numbers, two of them marked. A task "sum" asks for the sum of the two, a task "copy" for the marked
tokens and their numbers; the marks of the tasks are unlike. One trunk shares a gate out among tokens, and heads read
what goes through it. Its span head learns "copy" alone, yet on "sum" rows it should point at what the other head adds
up, because both read through the same gate.

Printed: recall, precision and F1 of the span head on either task, beside those of controls (a head that learned "copy"
with no "sum" head there, and one that learned it on the frozen trunk of that, of both tasks, or of nothing); then how
often the sum is right when the tokens pointed at are hidden, and when as many others are.

Source: What's in your Head?, arXiv 2104.06129; the measures here are general ones (assumed).

    python examples/non_target_heads.py [--steps 400]
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn

import manyheads as mh

NUMBERS, LENGTH, WIDTH = 6, 8, 32
HEADS = {
    "sum": mh.multi.Classification(2 * NUMBERS - 1, pool="mean", hidden=64),
    "copy": mh.multi.Tokens(NUMBERS + 1),
}


class Rows(NamedTuple):
    """Token features `[B, LENGTH, ·]`: a number, a mark of "sum", a mark of "copy", a mark that means nothing."""

    x: Tensor
    marked: Tensor
    total: Tensor
    copied: Tensor


def draw(task: str, rows: int = 64) -> Rows:
    numbers, marked = torch.randint(NUMBERS, (rows, LENGTH)), torch.zeros(rows, LENGTH, dtype=torch.long)
    marked.scatter_(1, torch.rand(rows, LENGTH).argsort(1)[:, :2], 1)
    # As many unmarked tokens have a label as marked ones: a majority would make "nothing passes" mean "marked".
    copied = torch.where(torch.rand(rows, LENGTH) < 1 / 3, 0, -100)
    copied = torch.where(marked.bool(), numbers + 1, copied)
    marks = torch.zeros(rows, LENGTH, 3)
    marks[..., ("sum", "copy").index(task)] = marked.float()
    marks[..., 2] = (torch.rand(rows, LENGTH) < 0.3).float()
    return Rows(
        torch.cat([nn.functional.one_hot(numbers, NUMBERS), marks], -1), marked, (numbers * marked).sum(1), copied
    )


class Gated(nn.Module):
    """Features `[B, T, WIDTH]` of tokens, each by its share of a gate that has one to give."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(NUMBERS, WIDTH), nn.Linear(NUMBERS + 3, 1)
        with torch.no_grad():  # any mark counts a little at first, so that tasks need not take opposite ways
            self.gate.weight.copy_(torch.cat([torch.zeros(NUMBERS), torch.full((3,), 0.3)])[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(1) * self.value(x[..., :NUMBERS]) * LENGTH


def train(tasks: tuple[str, ...], steps: int, trunk: nn.Module | None = None, seed: int = 0) -> mh.multi.MultiHead:
    """A model of both heads that learns these tasks; on a given trunk, which stays, its heads alone."""
    torch.manual_seed(seed)
    model = mh.multi.MultiHead(Gated() if trunk is None else trunk, HEADS)
    learned = [*model.nets.parameters(), *(model.trunk.parameters() if trunk is None else [])]
    optimiser = torch.optim.Adam(learned, 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        for task in tasks:
            rows = draw(task)
            model(rows.x, targets={task: rows.total if task == "sum" else rows.copied}).loss.backward()
        optimiser.step()
    return model.eval()


class Found(NamedTuple):
    recall: float
    precision: float
    f1: float


@torch.no_grad()
def found(model: mh.multi.MultiHead, rows: Rows) -> Found:
    """Of the tokens that the span head points at, against the marked ones."""
    said = model(rows.x, heads=["copy"]).outputs["copy"].argmax(-1).sign()
    right = float((said & rows.marked).sum())
    recall, precision = right / float(rows.marked.sum()), right / max(float(said.sum()), 1.0)
    return Found(recall, precision, 2 * recall * precision / max(recall + precision, 1e-9))


@torch.no_grad()
def accuracy(model: mh.multi.MultiHead, rows: Rows, hidden: Tensor | None = None) -> float:
    """Of the sum, with the tokens `hidden` `[B, LENGTH]` blank."""
    x = rows.x if hidden is None else rows.x.masked_fill(hidden[..., None].bool(), 0)
    return float((model(x, heads=["sum"]).outputs["sum"].argmax(-1) == rows.total).double().mean())


@torch.no_grad()
def causal(model: mh.multi.MultiHead, rows: Rows) -> tuple[float, float, float]:
    """Accuracies of the sum: as it is, without what the span head points at, without as many other tokens."""
    said = model(rows.x, heads=["copy"]).outputs["copy"].argmax(-1).sign()
    order = (torch.rand(said.shape) + said).argsort(1)  # tokens not pointed at first
    others = torch.zeros_like(said).scatter_(1, order, (torch.arange(LENGTH) < said.sum(1, keepdim=True)).long())
    return accuracy(model, rows), accuracy(model, rows, said), accuracy(model, rows, others)


def models(steps: int, seed: int = 0) -> dict[str, mh.multi.MultiHead]:
    both, alone = train(("sum", "copy"), steps, seed=seed), train(("copy",), steps, seed=seed)
    torch.manual_seed(seed)
    nothing = Gated()
    return {
        "both tasks": both, "copy alone": alone,
        "copy, trunk of both": train(("copy",), steps, both.trunk, seed),
        "copy, trunk of none": train(("copy",), steps, nothing, seed),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    every = models(given.steps)
    torch.manual_seed(1)
    tests = {task: draw(task, 1000) for task in HEADS}
    for name, model in every.items():
        own, other = found(model, tests["copy"]), found(model, tests["sum"])
        recall, precision, f1 = other
        print(
            f"{name:>20}: F1 on copy {own.f1:.2f}; on sum recall {recall:.2f}, precision {precision:.2f}, F1 {f1:.2f}"
        )
    whole, pointed, others = causal(every["both tasks"], tests["sum"])
    print(f"sums right: {whole:.2f}; without the tokens pointed at {pointed:.2f}, without as many others {others:.2f}")


if __name__ == "__main__":
    main()
