"""Parity of a set: an operator of two elements, once learned, is right on sets of lengths not seen; a sum is not.

Elements are bits, the answer is their exclusive or, and training sets have 1 to 6 of them. `lcm` reduces them over a
tree by one operator that it learns, so a longer set is more of the same. A sum has to count, and a classifier behind it
has to know each count by itself: those it has never met are guesses. A maximum cannot tell two ones from one.

Source: learnable commutative monoids, arXiv 2212.08541.

    python examples/learned_monoid.py [--steps 600] [--seeds 2]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from manyheads.aggregate import build

WIDTH, SEEN, LENGTHS = 16, 6, (6, 12, 24, 48)
LINES = ("lcm(shuffle=true)", "lcm(operator=sum)", "lcm(operator=max)")


class Model(nn.Module):
    """Bits `[B, N]` with a mask to logits `[B, 2]`."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self.embed, self.pool = nn.Embedding(2, WIDTH), build(line, WIDTH)
        self.answer = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, bits: Tensor, mask: Tensor) -> Tensor:
        return self.answer(self.pool(self.embed(bits), mask).out[:, 0])


def draw(rows: int, least: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bits, the mask of sets of `least` to `most` of them, and their parity."""
    mask = torch.arange(most) < torch.randint(least, most + 1, (rows, 1))
    bits = torch.randint(2, (rows, most)) * mask
    return bits, mask, bits.sum(1) % 2


def train(line: str, seed: int, steps: int) -> Model:
    torch.manual_seed(seed)
    model = Model(line)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for step in range(steps):
        bits, mask, parity = draw(256, 1, min(SEEN, 2 + 8 * step // steps))  # short sets first
        loss = nn.functional.cross_entropy(model(bits, mask), parity)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Model, length: int) -> float:
    torch.manual_seed(1000)
    bits, mask, parity = draw(1000, length, length)
    return (model(bits, mask).argmax(-1) == parity).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    print(f"share of sets whose parity is right; trained on 1 to {SEEN} elements; chance is 0.5")
    print(f"{'elements':>20} " + " ".join(f"{length:5}" for length in LENGTHS))
    for line in LINES:
        for seed in range(given.seeds):
            model = train(line, seed, given.steps)
            print(f"{line:>20} " + " ".join(f"{accuracy(model, n):5.2f}" for n in LENGTHS), flush=True)


if __name__ == "__main__":
    main()
