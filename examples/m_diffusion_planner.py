"""One planner becomes several: heads that are one while it learns to drive, then each follows a reward of its own.

A denoiser makes plans, a speed for each of the next moments, that suit a scene (how far the road is free). First all
heads are one set of weights, and learn what drivers did. Then they come apart as copies, the trunk is frozen, and each
head is trained alone on its own plans: in a group of G plans for one scene

    A = (R - mean R) / (std R + ε),   L = -mean min(ρ A, clip(ρ, 1 ± 0.2) A) + β KL(π ‖ π of the first stage)

ρ is the ratio of the likelihoods of a denoising step, a Gaussian of fixed width. A word then chooses the head that
plans. The source gives this in outline; rewards, G, β and the frozen trunk are assumed.

Source: Drive As You Like, arXiv 2508.16947.

    python examples/m_diffusion_planner.py [--steps 60]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

MOMENTS, TIMES, WIDTH, GROUP, BETA = 4, 6, 48, 16, 0.05
NOISE = torch.linspace(0.05, 0.6, TIMES)
KEPT = (1 - NOISE).cumprod(0)
BEFORE = torch.cat([torch.ones(1), KEPT[:-1]])
SIGMA = (NOISE * (1 - BEFORE) / (1 - KEPT)).sqrt().clamp_min(0.05)
REWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fast": lambda plan, free: plan.mean(-1) - 5 * (plan.amax(-1) > free + 1.5),  # progress, unless it ends in a crash
    "normal": lambda plan, free: -(plan.mean(-1) - free).abs(),
    "gentle": lambda plan, free: -plan.diff(dim=-1).square().sum(-1) - (plan.mean(-1) - free + 0.5).abs(),
}


class Planner(nn.Module):
    """Clean plans `[B, MOMENTS]` of noisy ones, by a trunk and one head a name, which are one head at first."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(MOMENTS + 2, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        head = nn.Linear(WIDTH, MOMENTS)
        self.heads = nn.ModuleDict(dict.fromkeys(names, head))

    def forward(self, plan: Tensor, time: Tensor, free: Tensor, head: str) -> Tensor:
        return self.heads[head](self.trunk(torch.cat([plan, time[:, None] / TIMES, free[:, None]], -1)))

    def untie(self) -> None:
        """Heads of their own from here on, which say what they said."""
        self.heads = nn.ModuleDict({name: copy.deepcopy(head) for name, head in self.heads.items()})
        self.trunk.requires_grad_(False)


def mean(model: Planner, plan: Tensor, time: Tensor, free: Tensor, head: str) -> Tensor:
    """Of the denoising step at `time`, `[B, MOMENTS]`."""
    clean, keep, before, noise = model(plan, time, free, head), KEPT[time], BEFORE[time], NOISE[time]
    first, second = before.sqrt() * noise / (1 - keep), (1 - noise).sqrt() * (1 - before) / (1 - keep)
    return first[:, None] * clean + second[:, None] * plan


@torch.no_grad()
def plans(model: Planner, free: Tensor, head: str) -> list[Tensor]:
    """From noise to a plan, all steps on the way."""
    path = [torch.randn(len(free), MOMENTS)]
    for step in reversed(range(TIMES)):
        time = torch.full((len(free),), step)
        path.append(mean(model, path[-1], time, free, head) + SIGMA[step] * torch.randn(len(free), MOMENTS))
    return path


def log_probability(plan: Tensor, centre: Tensor, sigma: Tensor) -> Tensor:
    """Of a Gaussian step, but for a constant, `[B]`."""
    return -(plan - centre).square().sum(-1) / (2 * sigma**2)


def advantages(rewards: Tensor) -> Tensor:
    """Of rewards `[scenes, G]`; 0 where all of a group are equal."""
    off = rewards - rewards.mean(-1, keepdim=True)
    return off / (rewards.std(-1, correction=0, keepdim=True) + 1e-6)


def clipped(now: Tensor, old: Tensor, gain: Tensor, clip: float = 0.2) -> Tensor:
    """-min(ρ A, clip(ρ) A), the mean."""
    ratio = (now - old).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()


def imitate(model: Planner, head: str, steps: int) -> None:
    """What drivers did: they keep to the free speed, more or less, and speed up a little."""
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        free, time = 1 + torch.rand(128), torch.randint(TIMES, (128,))
        clean = (
            free[:, None] + 0.3 * torch.randn(128, 1) + 0.1 * torch.arange(MOMENTS) + 0.1 * torch.randn(128, MOMENTS)
        )
        noisy = KEPT[time].sqrt()[:, None] * clean + (1 - KEPT[time]).sqrt()[:, None] * torch.randn_like(clean)
        optimiser.zero_grad()
        (model(noisy, time, free, head) - clean).square().mean().backward()
        optimiser.step()


def reinforce(model: Planner, first: Planner, head: str, steps: int, beta: float = BETA, updates: int = 2) -> None:
    """One head after its reward."""
    optimiser = torch.optim.Adam(model.heads[head].parameters(), 3e-3)
    for _ in range(steps):
        free = (1 + torch.rand(8)).repeat_interleave(GROUP)
        path = plans(model, free, head)
        gain = advantages(REWARDS[head](path[-1], free).view(-1, GROUP)).flatten()
        times = [torch.full((len(free),), step) for step in reversed(range(TIMES))]
        with torch.no_grad():
            before = [mean(model, x, t, free, head) for x, t in zip(path, times, strict=False)]
            anchor = [mean(first, x, t, free, head) for x, t in zip(path, times, strict=False)]
        for _ in range(updates):
            loss = torch.zeros(())
            for x, after, t, was, kept in zip(path, path[1:], times, before, anchor, strict=False):
                centre, sigma = mean(model, x, t, free, head), SIGMA[t]
                old = log_probability(after, was, sigma)
                loss = loss + clipped(log_probability(after, centre, sigma), old, gain)
                loss = loss - beta * log_probability(kept, centre, sigma).mean()  # the KL of two Gaussians of one width
            optimiser.zero_grad()
            (loss / TIMES).backward()
            optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Planner(list(REWARDS))
    print(f"one head under {len(REWARDS)} names: {sum(p.numel() for p in model.heads.parameters())} weights")
    imitate(model, "normal", 10 * given.steps)
    first = copy.deepcopy(model)
    model.untie()
    print(f"heads of their own: {sum(p.numel() for p in model.heads.parameters())} weights, and the same plans")
    free = torch.full((512,), 1.5)
    for head in REWARDS:
        reinforce(model, first, head, given.steps)
        before, after = plans(first, free, head)[-1], plans(model, free, head)[-1]
        rewards = [REWARDS[head](each, free).mean().item() for each in (before, after)]
        rough = after.diff(dim=-1).square().sum(-1).mean().item()
        print(f"{head:>7}: speed {after.mean():.2f} (first {before.mean():.2f}), roughness {rough:.3f}, reward "
              f"{rewards[0]:.2f} -> {rewards[1]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
