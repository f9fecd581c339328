"""Several instances of every part of a network, and all networks that they make together.

L parts of n instances each, L·n in all, make n^L networks. In a step every instance is used once, in n networks that a
permutation for each part makes; the loss is the mean of theirs, and if asked a consistency term, the mean of
KL(p̄ ‖ p_i), p̄ the mean of the n networks' predictions. Three ways to predict: one network, the mean of all networks'
probabilities (never worse in log-likelihood than its networks are on average), and a single network whose parts are the
means of the instances' weights, which works where instances have stayed near each other.

Source: Deep Combinatorial Aggregation (NeurIPS 2022); how steps draw networks and the term's form are assumed.

    python examples/combinatorial_aggregation.py [--seeds 3] [--steps 200]
"""

from __future__ import annotations

import argparse
import copy
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH, PARTS = 4, 32, 3


def part(place: int) -> nn.Module:
    if place == PARTS - 1:
        return nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Linear(WIDTH if place else 2, WIDTH), nn.ReLU())


class Combined(nn.Module):
    """near: instances start as one (so that their weights may be averaged), else each for itself."""

    def __init__(self, instances: int, near: bool = False) -> None:
        super().__init__()
        self.instances = instances
        self.parts = nn.ModuleList()
        for place in range(PARTS):
            first = part(place)
            rest = [copy.deepcopy(first) if near else part(place) for _ in range(instances - 1)]
            self.parts.append(nn.ModuleList([first, *rest]))

    def forward(self, x: Tensor, choice: tuple[int, ...]) -> Tensor:
        """Logits of the network of these instances."""
        for instances, each in zip(self.parts, choice, strict=True):
            x = instances[each](x)
        return x

    def drawn(self) -> list[tuple[int, ...]]:
        """As many networks as there are instances, each instance in one."""
        return list(zip(*[torch.randperm(self.instances).tolist() for _ in self.parts], strict=True))

    def every(self) -> list[tuple[int, ...]]:
        return list(product(range(self.instances), repeat=PARTS))

    def averaged(self) -> Combined:
        """A network of the means of weights."""
        made = Combined(1)
        for mine, instances in zip(made.parts, self.parts, strict=True):
            states = [each.state_dict() for each in instances]
            mine[0].load_state_dict({key: torch.stack([s[key] for s in states]).mean(0) for key in states[0]})
        return made


def consistency(logits: Tensor) -> Tensor:
    """Mean KL(p̄ ‖ p_i) of logits `[n, B, classes]`."""
    mean = logits.softmax(-1).mean(0)
    return (mean * (mean.log() - logits.log_softmax(-1))).sum(-1).mean()


def draw(rows: int) -> tuple[Tensor, Tensor]:
    """Points about four centres, so wide that classes overlap."""
    y = torch.randint(CLASSES, (rows,))
    angle = y * torch.pi / 2
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.6 * torch.randn(rows, 2), y


def train(model: Combined, x: Tensor, y: Tensor, steps: int, weight: float = 0.0) -> Combined:
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        logits = torch.stack([model(x, choice) for choice in model.drawn()])
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)))
        optimiser.zero_grad()
        (loss + weight * consistency(logits)).backward()
        optimiser.step()
    return model


@torch.no_grad()
def measure(model: Combined, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Negative log-likelihoods: of networks on average, and of the mean of their probabilities."""
    logits = torch.stack([model(x, choice) for choice in model.every()])
    single = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)))
    return float(single), float(F.nll_loss(logits.softmax(-1).mean(0).log(), y))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    print("negative log-likelihoods of a network alone, of all networks' mean, and of the mean of weights")
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        train_on, test = draw(100), draw(2000)
        kinds = {
            "plain": (Combined(1), 0.0),
            "three instances": (Combined(3), 0.0),
            "three, consistent": (Combined(3), 1.0),
            "three, from one, consistent": (Combined(3, near=True), 1.0),
        }
        for name, (model, weight) in kinds.items():
            train(model, *train_on, given.steps, weight)
            (single, together), (averaged, _) = measure(model, *test), measure(model.averaged(), *test)
            print(f"seed {seed}, {name:>27}: {single:.3f}, {together:.3f}, {averaged:.3f}")


if __name__ == "__main__":
    main()
