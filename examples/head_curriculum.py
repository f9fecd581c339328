"""A head for every length of memory, added one by one, in a recurrent network whose units have a time of their own.

Bits come in one after another, and at the end the parity of the last N of them is asked for. With h the units,

    h_t = LeakyReLU((1 - 1/τ) ∘ h_{t-1} + (W h_{t-1} + b + U x_t + c) / τ),   τ >= 1 of each unit learned, diag W = 0

Tasks N = 2, 3, … join when the present ones are learned (`mh.multi.Curriculum`): all with heads of their own that go on
learning, or one head that passes from task to task. The source finds that the latter lengthens τ and forgets, and that
the former learns faster, keeps τ near 1 and has its long times in W. Printed here, at a toy size, are accuracies on
each task at the end; those of earlier tasks with the one head are chance.

Source: Khajehabdollahi et al. 2024 (ICLR).

    python examples/head_curriculum.py [--rounds 12] [--steps 60]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.multi import Classification, Curriculum, MultiHead

UNITS, TASKS = 64, (2, 3, 4)


class Leaky(nn.Module):
    """The last h `[B, UNITS]` of inputs `[B, T]`."""

    width = UNITS

    def __init__(self, units: int = UNITS) -> None:
        super().__init__()
        self.recurrent, self.input = nn.Linear(units, units), nn.Linear(1, units)
        self.tau_raw = nn.Parameter(1 + torch.rand(units))

    @property
    def tau(self) -> Tensor:
        return self.tau_raw.clamp(min=1)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        weight = self.recurrent.weight - torch.diag(self.recurrent.weight.diagonal())
        h = 0.1 * torch.rand(len(x), len(weight), dtype=x.dtype) if h is None else h
        for bit in x.unbind(1):
            drive = F.linear(h, weight, self.recurrent.bias) + self.input(bit[:, None])
            h = F.leaky_relu((1 - 1 / self.tau) * h + drive / self.tau)
        return h


def parity(bits: Tensor, n: int) -> Tensor:
    """Of the last n bits `[B]`."""
    return bits[:, -n:].sum(1) % 2


def match(bits: Tensor, n: int) -> Tensor:
    """Whether the bit n from the end is the last one (delayed match to sample)."""
    return (bits[:, -n] == bits[:, -1]).long()


def draw(most: int, rows: int = 64) -> Tensor:
    """Bits of one length a batch, their odds drawn for each row."""
    length = int(torch.randint(most + 2, 4 * most + 2, ()))
    return (torch.rand(rows, length) < torch.rand(rows, 1)).long()


@torch.no_grad()
def accuracies(model: MultiHead, plan: Curriculum, tasks: tuple[str, ...], rows: int = 512) -> dict[str, float]:
    bits = (torch.rand(rows, 3 * max(map(int, tasks))) < 0.5).long()
    out = model.eval()(bits.float(), heads=[plan.head(task) for task in tasks]).outputs
    return {task: float((out[plan.head(task)].argmax(-1) == parity(bits, int(task))).double().mean()) for task in tasks}


def train(plan: Curriculum, rounds: int, steps: int, seed: int = 0) -> tuple[MultiHead, list[tuple[str, ...]]]:
    """The model, and the tasks of each round."""
    torch.manual_seed(seed)
    heads = dict.fromkeys((plan.head(task) for task in plan.order), Classification(2))
    model = MultiHead(Leaky(), heads)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    active, history = plan.start(), []
    for _ in range(rounds):
        history.append(active)
        model.train()
        for _ in range(steps):
            bits = draw(max(map(int, active)))
            optimiser.zero_grad()
            model(bits.float(), targets={plan.head(task): parity(bits, int(task)) for task in active}).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimiser.step()
        active = plan.after(active, accuracies(model, plan, active))
    return model, history


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    order = [str(task) for task in TASKS]
    for name, plan in {
        "a head each": Curriculum(order), "one head": Curriculum(order, window=1, reuse=True),
    }.items():  # fmt: skip
        model, history = train(plan, given.rounds, given.steps)
        reached = tuple(dict.fromkeys(task for tasks in history for task in tasks))
        shown = ", ".join(f"parity of {task}: {each:.2f}" for task, each in accuracies(model, plan, reached).items())
        print(f"{name:>11}: in {given.rounds} rounds up to {reached[-1]}; {shown}; mean τ {model.trunk.tau.mean():.2f}")
        print(f"{'':>11}  tasks by round: {' '.join('+'.join(tasks) for tasks in history)}")


if __name__ == "__main__":
    main()
