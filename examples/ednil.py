"""Environments that nobody named, found by heads that compete, and a learner that is right in each of them.

A digit stands for a bit, which the label is but for a quarter of the rows; its colour agrees with the label in nine
rows of ten, or eight. A learner that goes by the colour is right more often, until colours are reversed. Several heads
compete to explain each row: one comes to say "the label is the colour", another the contrary, and so rows fall into
environments in which colour helps unequally. A second model pays for every environment in which its answers would gain
by another scale. "Colour" and "digit" are each a few noisy numbers here. Printed: accuracies where colours are as they
were, and reversed.

Source: EDNIL (NeurIPS 2022).

    python examples/ednil.py [--seeds 3] [--steps 100]
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.multi import environments

HEADS, WIDTH, ROUNDS, BETA, GAMMA = 3, 24, 3, 3.0, 5.0


class Rows(NamedTuple):
    x: Tensor
    y: Tensor
    agrees: Tensor


def draw(rows: int, agreement: float, noise: float = 0.25) -> Rows:
    bit = torch.randint(2, (rows,))
    y = torch.where(torch.rand(rows) < noise, 1 - bit, bit)
    agrees = torch.rand(rows) < agreement
    colour = torch.where(agrees, y, 1 - y)
    shown = [(2.0 * each - 1)[:, None] + 0.3 * torch.randn(rows, 3) for each in (bit, colour)]
    return Rows(torch.cat(shown, 1), y, agrees)


def world(rows: int = 1000) -> Rows:
    """Two places with colours that agree in nine and in eight rows of ten, not told apart."""
    return Rows(*(torch.cat(each) for each in zip(draw(rows, 0.9), draw(rows, 0.8), strict=True)))


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


def plain(rows: Rows, steps: int) -> nn.Sequential:
    model = network(1)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(rows.x)[:, 0], rows.y.float()).backward()
        optimiser.step()
    return model


def losses(model: nn.Sequential, rows: Rows) -> Tensor:
    """`[rows, heads]`."""
    logits = model(rows.x)
    return F.binary_cross_entropy_with_logits(logits, rows.y[:, None].expand_as(logits).float(), reduction="none")


def alternate(rows: Rows, steps: int) -> tuple[nn.Sequential, Tensor]:
    """The invariant model, and p `[rows, HEADS]`."""
    found, model = network(HEADS), network(1)
    optimiser = torch.optim.Adam(found.parameters(), 5e-3)
    for _ in range(steps):  # the trunk first learns what is easy, through one head
        optimiser.zero_grad()
        losses(found, rows)[:, 0].mean().backward()
        optimiser.step()
    optimisers = [torch.optim.Adam(each.parameters(), 5e-3) for each in (found, model)]
    p = torch.empty(0)
    for turn in range(ROUNDS):
        with torch.no_grad():
            own = losses(model, rows)[:, 0]
        for _ in range(steps):
            p = environments.explained(losses(found, rows))
            loss = environments.diversity(p) + BETA * environments.independence(p, rows.y, 2)
            loss = loss + GAMMA * turn / (ROUNDS - 1) * environments.invariance(p, own)
            optimisers[0].zero_grad()
            loss.backward()
            optimisers[0].step()
        p = environments.explained(losses(found, rows)).detach()
        for _ in range(steps):
            optimisers[1].zero_grad()
            penalty = 100.0 if turn else 1.0
            environments.risk(model(rows.x)[:, 0], rows.y, p, penalty).backward()
            optimisers[1].step()
    return model, p


@torch.no_grad()
def accuracy(model: nn.Sequential, rows: Rows) -> float:
    return float(((model(rows.x)[:, 0] > 0) == rows.y.bool()).double().mean())


def told_apart(p: Tensor, agrees: Tensor) -> float:
    """How often rows are in an environment whose majority they are like, in whether the colour agrees."""
    which = p.argmax(-1)
    right = [max(int(agrees[which == e].sum()), int((~agrees[which == e]).sum())) for e in which.unique()]
    return sum(right) / len(agrees)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    print("accuracies where colours agree in nine rows of ten, and in one; the digit alone is right in 0.75 of either")
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        rows, same, reversed_ = world(), draw(2000, 0.9), draw(2000, 0.1)
        model, p = alternate(rows, given.steps)
        for name, each in (("plain", plain(rows, 2 * given.steps)), ("invariant", model)):
            print(f"seed {seed}, {name:>9}: {accuracy(each, same):.2f} and {accuracy(each, reversed_):.2f}")
        print(
            f"seed {seed}, environments tell in {told_apart(p, rows.agrees):.2f} of the rows whether the colour agrees"
        )


if __name__ == "__main__":
    main()
