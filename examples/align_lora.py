"""One low-rank adapter for several tasks, whose codes of the tasks are made alike, beside adapters with several heads.

y = W x + (α/r) B a, a = A x the code. In a batch with samples of each task R is the mean over pairs of tasks of

    kl     Σ_d ½ [KL(N_t ‖ N_u) + KL(N_u ‖ N_t)], the means and variances of a's channels over the samples of a task
    mmd    mean k(a_t, a_t) + mean k(a_u, a_u) - 2 mean k(a_t, a_u), k a sum of 19 Gaussians from 1e-6 to 1e6 wide

and the loss is that of the tasks + λ R. Statistics are over samples and valid positions together (assumed: by position
two samples a task would be too few). Heads B_1..B_n on one A without a router are their mean: no more than one adapter.

Source: Align-LoRA, arXiv 2508.05078.

    python examples/align_lora.py [--steps 300]
"""

from __future__ import annotations

import argparse
import copy
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, RANK, ALPHA, TASKS, CLASSES = 24, 8, 16.0, 3, 6
WIDTHS = torch.logspace(-6, 6, 19)


class Lora(nn.Module):
    """A linear layer with an adapter of `heads` matrices B on one A; `code` is that of the last pass, `[B, rank]`."""

    def __init__(self, base: nn.Linear, rank: int = RANK, heads: int = 1) -> None:
        super().__init__()
        self.base, self.scale, self.code = base.requires_grad_(False), ALPHA / rank, torch.empty(0)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Parameter(torch.zeros(heads, base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        self.code = self.a(x)
        return self.base(x) + self.scale * torch.einsum("hor,...r->h...o", self.b, self.code).mean(0)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        layer = copy.deepcopy(self.base)
        layer.weight += self.scale * self.b.mean(0) @ self.a.weight
        return layer


def likeness(b: Tensor) -> Tensor:
    """The mean cosine of pairs of heads `[n, out, rank]`."""
    flat = F.normalize(b.flatten(1), dim=-1)
    return torch.stack([flat[i] @ flat[j] for i, j in combinations(range(len(b)), 2)]).mean()


def kl_apart(a: Tensor, b: Tensor) -> Tensor:
    """Of codes `[n, rank]` and `[m, rank]`, at least two of each."""
    m1, m2, v1, v2 = a.mean(0), b.mean(0), a.var(0, correction=0) + 1e-8, b.var(0, correction=0) + 1e-8
    there = (v2 / v1).log() + v1 / v2 + (m2 - m1).square() / v2 - 1
    back = (v1 / v2).log() + v2 / v1 + (m2 - m1).square() / v1 - 1
    return (there + back).sum() / 4


def mmd_apart(a: Tensor, b: Tensor) -> Tensor:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        square = (x[:, None] - y).square().sum(-1)
        return (-square[..., None] / (2 * WIDTHS.to(x.dtype))).exp().sum(-1).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def apart(code: Tensor, tasks: Tensor, form: str = "kl", valid: Tensor | None = None) -> Tensor:
    """R of codes `[B, rank]` or `[B, T, rank]` of samples of these tasks `[B]`; valid: bool `[B, T]`."""
    if code.dim() == 3:
        valid = torch.ones(code.shape[:2], dtype=torch.bool) if valid is None else valid
        tasks, code = tasks[:, None].expand(valid.shape)[valid], code[valid]
    groups = [code[tasks == task] for task in tasks.unique()]
    if min(map(len, groups)) < 2:
        raise ValueError(f"R needs two samples of each task; the batch has {[len(each) for each in groups]}")
    pairs = [(kl_apart if form == "kl" else mmd_apart)(*pair) for pair in combinations(groups, 2)]
    return torch.stack(pairs).mean() if pairs else code.new_zeros(())


class Tasks:
    """One way to tell classes in all tasks; each task has its rows about a place of its own."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.teacher, self.places = torch.randn(CLASSES, DIM, generator=g), torch.randn(TASKS, DIM, generator=g)

    def draw(self, each: int = 16) -> tuple[Tensor, Tensor, Tensor]:
        task = torch.arange(TASKS).repeat_interleave(each)
        x = torch.randn(len(task), DIM)
        return x + self.places[task], (x @ self.teacher.T).argmax(-1), task


def train(
    kind: Tasks, steps: int, weight: float, *, rank: int = RANK, heads: int = 1, form: str = "kl", seed: int = 0
) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(DIM, DIM), rank, heads), nn.ReLU(), nn.Linear(DIM, CLASSES))
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 5e-3)
    for _ in range(steps):
        x, y, task = kind.draw()
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss + weight * apart(model[0].code, task, form) if weight else loss).backward()
        optimiser.step()
    return model


@torch.no_grad()
def measure(model: nn.Sequential, kind: Tasks) -> tuple[float, float]:
    """Accuracy, and how far the codes of tasks are apart (kl)."""
    x, y, task = kind.draw(400)
    right = float((model(x).argmax(-1) == y).double().mean())
    return right, float(apart(model[0].code, task))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    kind = Tasks(0)
    kinds = {
        "one adapter": dict(weight=0.0),
        "one adapter, kl": dict(weight=0.2),
        "one adapter, mmd": dict(weight=0.2, form="mmd"),
        "four heads": dict(weight=0.0, heads=4, rank=RANK // 2),
    }
    for name, options in kinds.items():
        model = train(kind, given.steps, **options)
        right, far = measure(model, kind)
        own = f", heads alike by {likeness(model[0].b):.2f}" if len(model[0].b) > 1 else ""
        print(f"{name:>16}: accuracy {right:.3f}, codes of tasks apart by {far:.3f}{own}")


if __name__ == "__main__":
    main()
