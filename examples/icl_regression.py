"""Softmax attention learns linear regression in context: two opposite heads that make one step of gradient descent.

Each sequence is a regression of its own: x_1 … x_L and x_q ~ N(0, I_d), β ~ N(0, I/d), y = βᵀx + ε, Var ε = σ². One
layer reads z_l = [x_l; y_l] at z_q = [x_q; 0] and is trained to say y_q. Of each head, with A_h = K_hᵀ Q_h / √(d+1) and
the last row of O_h V_h, training finds A_h = diag(ω_h I, 0) and [0 … 0, μ_h]: ŷ = Σ_h μ_h Σ_l y_l softmax_l(ω_h
x_lᵀx_q), with Σ_h μ_h ≈ 0 and μ_h of ω_h's sign. Two heads (ω, -ω), (μ, -μ) are for small ω a step of gradient descent
without the mean's bias, (2 ω μ / L) Σ_l y_l (x_l - x̄)ᵀx_q; one head keeps the bias and does worse, more than two gain
little.

On the pattern the loss is nearly L(ω, μ) = 1 + σ² - 2 μᵀω + μᵀ(ωωᵀ + (1 + σ²)/L exp(d ωωᵀ)) μ, exp of each entry. Its
minimum is the prediction that is printed, beside the best single gradient step and ridge regression with λ = σ²d.

Source: 2025, arXiv 2503.12734. Sizes are the paper's, d = 5 and L = 40, but 1000 steps in place of 5·10⁵, at a rate
that falls from 2·10⁻².

    python examples/icl_regression.py [--seeds 2] [--steps 1000]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

import manyheads as mh

DIM, LENGTH, NOISE = 5, 40, 0.1


def draw(
    batch: int, length: int = LENGTH, dim: int = DIM, queries: int = 40, noise: float = NOISE
) -> tuple[Tensor, Tensor, Tensor]:
    """z `[B, L, d+1]`, z_q `[B, Q, d+1]`, y_q `[B, Q]`."""
    x, beta = torch.randn(batch, length + queries, dim), torch.randn(batch, dim, 1) / sqrt(dim)
    y = x @ beta + sqrt(noise) * torch.randn(batch, length + queries, 1)
    query = torch.cat([x[:, length:], torch.zeros(batch, queries, 1)], -1)
    return torch.cat([x, y], -1)[:, :length], query, y[:, length:, 0]


def layer(heads: int, dim: int = DIM) -> mh.Attention:
    """Heads as wide as the tokens; the query is no key."""
    site = mh.Site(causal=False, cross=True, context_dim=dim + 1)
    return mh.Attention(f"gqa(head_dim={dim + 1})", dim + 1, heads, site=site)


def guess(model: mh.Attention, z: Tensor, query: Tensor) -> Tensor:
    return model(query, context=z)[..., -1]


def maps(model: mh.Attention) -> tuple[Tensor, Tensor]:
    """A_h `[H, d+1, d+1]`, keys by queries, and the last row of O_h V_h `[H, d+1]`."""
    q, k, v, o = (model.project.get_parameter(f"{name}_proj.weight").detach() for name in "qkvo")
    q, k, v = (weight.unflatten(0, (model.heads, -1)) for weight in (q, k, v))
    return k.mT @ q / sqrt(q.shape[-1]), torch.einsum("he,hei->hi", o[-1].unflatten(0, (model.heads, -1)), v)


@dataclass(frozen=True)
class Pattern:
    """omega, mu `[H]`. apart: the share (of squares) of A and of the last row of O V that is not ω I and μ."""

    omega: Tensor
    mu: Tensor
    apart: float


def pattern(model: mh.Attention) -> Pattern:
    scores, label = maps(model)
    scores = scores.clone()
    scores[..., -1] = 0  # what meets the query's label, which is zero
    omega, mu = scores[:, :-1, :-1].diagonal(dim1=-2, dim2=-1).mean(-1), label[:, -1]
    found = omega.square().sum() * (scores.shape[-1] - 1), mu.square().sum()
    whole = scores.square().sum(), label.square().sum()
    return Pattern(omega, mu, max(1 - (part / all_).item() for part, all_ in zip(found, whole, strict=True)))


def law(omega: Tensor, length: int = LENGTH, dim: int = DIM, noise: float = NOISE) -> tuple[Tensor, Tensor]:
    """The best μ for ω `[H]`, and L there."""
    outer = omega[:, None] * omega
    mu = torch.linalg.solve(outer + (1 + noise) / length * (dim * outer).exp(), omega)
    return mu, 1 + noise - omega @ mu


def best(heads: int) -> float:
    """The least L of one head, or of pairs (ω, -ω), by a search over ω."""
    signs = torch.tensor([1.0] if heads == 1 else [1.0, -1.0], dtype=torch.float64)
    return min(law(float(omega) * signs)[1].item() for omega in torch.linspace(0.02, 1.0, 99))


def pair(omega: float, mu: float, z: Tensor, query: Tensor) -> Tensor:
    """Two opposite heads by hand, through the layer."""
    dim = z.shape[-1] - 1
    model = layer(2, dim).to(z.dtype)
    x, label = torch.eye(dim + 1, dtype=z.dtype), torch.zeros(dim + 1, dim + 1, dtype=z.dtype)
    x[-1, -1], label[-1, -1] = 0, 1
    weights = {"q": (sqrt(dim + 1) * omega * x, -sqrt(dim + 1) * omega * x), "k": (x, x), "v": (label, label)}
    for name, pieces in weights.items():
        model.project.get_parameter(f"{name}_proj.weight").data = torch.cat(pieces)
    model.project.get_parameter("o_proj.weight").data = torch.cat([mu * label, -mu * label], 1)
    return guess(model, z, query).detach()


def step(z: Tensor, query: Tensor, rate: float, centred: bool = True) -> Tensor:
    """A gradient step from zero, (η/L) Σ y_l (x_l - x̄)ᵀx_q; not centred: without x̄."""
    x, y = z[..., :-1], z[..., -1:]
    slope = (y * (x - centred * x.mean(1, keepdim=True))).mean(1)
    return rate * (query[..., :-1] @ slope[..., None])[..., 0]


def ridge(z: Tensor, query: Tensor, noise: float = NOISE) -> Tensor:
    """The best guess of all: the posterior mean."""
    x, y = z[..., :-1], z[..., -1:]
    gram = x.mT @ x + noise * x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype)
    return (query[..., :-1] @ torch.linalg.solve(gram, x.mT @ y))[..., 0]


def train(heads: int, seed: int, steps: int) -> mh.Attention:
    torch.manual_seed(seed)
    model = layer(heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        z, query, y = draw(32)
        optimizer.zero_grad()
        (guess(model, z, query) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def losses(model: mh.Attention, lengths: tuple[int, ...] = (LENGTH,), batch: int = 1000) -> list[float]:
    """On fresh tasks, the same ones for every model, by context length."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10_000)
        return [(guess(model, z, q) - y).square().mean().item() for z, q, y in (draw(batch, n) for n in lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    torch.manual_seed(10_000)
    z, query, y = draw(1000)
    one = step(z, query, 1.0)
    rate = (one.flatten() @ y.flatten() / one.square().sum()).item()
    print(f"best single gradient step: {(rate * one - y).square().mean():.4f}, ", end="")
    print(f"ridge: {(ridge(z, query) - y).square().mean():.4f}")
    print(f"heads   loss predicted  at L = {4 * LENGTH}  Σμ / Σ|μ|  apart  ω and μ by head")
    for seed in range(given.seeds):
        for heads in (1, 2, 4):
            model = train(heads, seed, given.steps)
            here, longer = losses(model, (LENGTH, 4 * LENGTH))
            found = pattern(model)
            balance = (found.mu.sum() / found.mu.abs().sum()).item()
            each = ", ".join(f"{w:.2f} {m:.2f}" for w, m in zip(found.omega, found.mu, strict=True))
            print(f"{heads:5} {here:6.4f} {best(heads):9.4f} {longer:11.4f} {balance:11.2f} {found.apart:6.3f}  {each}")


if __name__ == "__main__":
    main()
