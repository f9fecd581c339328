"""Linear attention over examples makes a gradient step from zero; a first guess of the answer makes it start elsewhere.

A task is w ~ N(m, I_d) with m ≠ 0; C examples x_i ~ N(0, I), y_i = w·x_i, and a query x_q. Tokens are e = [x; y], the
query's y being a first guess y_q. With H heads of linear attention and a residual,

    ŷ = y_q + (1/C) Σ_h p_hᵀ (Σ_i e_i e_iᵀ) K_h e_q,

the sum over the examples alone. It is linear in T = Σ_h p_h ⊗ K_h, of which d + 1 heads reach every one; so least
squares on its features gives what no number of heads can be below. One gradient step from w₀ with rate η says w₀·x_q +
(η/C) Σ_i (y_i - w₀·x_i) x_i·x_q, and is at its best with w₀ = m, η = C / (C + d + 1): its loss is then d (d + 1) / (C +
d + 1). With y_q = 0 there is a gap whatever H. One head with y_q = w₀·x_q, w₀ trained, is the step itself: K = [[η I,
0], [0, 0]] and p = [-w₀; 1].

The layer is `linear` without its normaliser. It also reads the query's own token, which is no example; being linear,
that is taken off by a pass of the query alone.

Source: 2025, arXiv 2512.04268, whose abstract and summaries alone were read: E, the mask and the bound of d + 1 heads
are the field's standard form. Here d = 3, C = 10, |m| = 3.

    python examples/yq_lsa.py [--seeds 2] [--steps 800]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import manyheads as mh

DIM, EXAMPLES, SIZE = 3, 10, 3.0


def draw(batch: int, mean: Tensor, examples: int = EXAMPLES) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens `[B, C, d+1]`, x_q `[B, d]`, y_q `[B]`."""
    x = torch.randn(batch, examples + 1, len(mean), dtype=mean.dtype)
    w = mean + torch.randn(batch, len(mean), dtype=mean.dtype)
    y = x @ w[..., None]
    return torch.cat([x, y], -1)[:, :-1], x[:, -1], y[:, -1, 0]


def prior(dim: int = DIM, size: float = SIZE) -> Tensor:
    return torch.full((dim,), size / dim**0.5, dtype=torch.float64)


class LSA(nn.Module):
    """ŷ from tokens `[B, C, d+1]` and x_q `[B, d]`. guesses: with y_q = w₀·x_q, w₀ trained; else y_q = 0."""

    def __init__(self, dim: int, heads: int, guesses: bool) -> None:
        super().__init__()
        spec = f"gqa(head_dim={dim + 1}, scale=1.0) + rope(none) + linear(normaliser=false)"
        self.attention = mh.Attention(spec, dim + 1, heads)
        self.first = nn.Parameter(torch.zeros(dim), requires_grad=guesses)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        guess = x @ self.first
        query = torch.cat([x, guess[:, None]], -1)[:, None]
        read = self.attention(torch.cat([tokens, query], 1))[:, -1] - self.attention(query)[:, 0]
        return guess + read[:, -1] / tokens.shape[1]


def by_hand(first: Tensor, rate: float) -> LSA:
    """The head that is a gradient step."""
    dim = len(first)
    model = LSA(dim, 1, guesses=True).double()
    eye, weights = torch.eye(dim + 1, dtype=torch.float64), model.attention.project
    compare = eye.clone()
    compare[-1, -1] = 0
    out = torch.zeros_like(eye)
    out[-1] = torch.cat([-first, first.new_ones(1)])
    for name, weight in (("q", rate * compare), ("k", compare), ("v", eye), ("o", out)):
        weights.get_parameter(f"{name}_proj.weight").data = weight
    model.first.data = first.clone()
    return model


def gradient_step(tokens: Tensor, x: Tensor, first: Tensor, rate: float) -> Tensor:
    inputs, y = tokens[..., :-1], tokens[..., -1]
    missed = y - inputs @ first
    return x @ first + rate * (missed[..., None] * inputs).mean(1).mul(x).sum(-1)


def best_step(dim: int = DIM, examples: int = EXAMPLES) -> float:
    """The loss of the best gradient step."""
    return dim * (dim + 1) / (examples + dim + 1)


def any_heads(mean: Tensor, examples: int = EXAMPLES, batch: int = 200_000) -> float:
    """The least loss that heads can have with y_q = 0, of any number: least squares over T, tested on fresh tasks."""

    def features() -> tuple[Tensor, Tensor]:
        tokens, x, y = draw(batch, mean, examples)
        gram = tokens.mT @ tokens / examples
        rows, columns = torch.triu_indices(*gram.shape[1:])
        return (gram[:, rows, columns, None] * x[:, None]).flatten(1), y

    made, y = features()
    solution = torch.linalg.solve(made.T @ made, made.T @ y)
    made, y = features()
    return (made @ solution - y).square().mean().item()


def train(heads: int, guesses: bool, mean: Tensor, seed: int, steps: int) -> float:
    """The loss of a trained model on fresh tasks."""
    torch.manual_seed(seed)
    model = LSA(len(mean), heads, guesses)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        tokens, x, y = draw(256, mean.float())
        optimizer.zero_grad()
        (model(tokens, x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        tokens, x, y = draw(100_000, mean.float())
        return (model(tokens, x) - y).square().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    given = parser.parse_args()
    mean, step, others = prior(), f"{best_step():.3f} (one gradient step)", {}
    torch.manual_seed(0)
    others[False] = f"no less than {any_heads(mean):.2f} (least squares), with m = 0 {any_heads(0 * mean):.2f}"
    others[True] = step
    print(f"loss, d = {DIM}, C = {EXAMPLES}, |m| = {SIZE:g}")
    print("guess    heads  trained           predicted")
    for guesses, heads in ((False, 1), (False, 2), (False, DIM + 1), (False, 2 * DIM), (True, 1)):
        found = [train(heads, guesses, mean, seed, given.steps) for seed in range(given.seeds)]
        each = " ".join(f"{loss:.3f}" for loss in found)
        print(f"{'w₀·x_q' if guesses else '0':8} {heads:4}   {each:17} {others[guesses]}", flush=True)


if __name__ == "__main__":
    main()
