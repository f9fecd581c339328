"""One head of full rank finds the nearest point; heads of low rank would have to be exponentially many.

Points x_1 … x_N and a query y are uniform on the unit sphere of R^d, and the target is the x_i nearest to y. A head has
scores y Q_hᵀ K_h x of rank r and a value map of its own, d × d. One head with r = d is exact as its scores grow, Q =
βI, K = I, V O = I, β → ∞. Errors are summed over coordinates, so that predicting zero scores 1.

Three tables: the exact head by β; layers trained for each r and number of heads H; and what the best mixture of H
random heads of rank 1 with hard attention expects for N = 2, in closed form. A head with (q_h, k_h) picks one of two
points; with C_gh = ½ + (2/π²) arcsin(q_g·q_h) arcsin(k_g·k_h), how often two heads agree, and b_h, how often a head is
right, the error is 1 - bᵀ C⁻¹ b. The heads needed for one error grow by a factor with each dimension.

Source: On the Benefits of Rank in Attention Layers 2024, arXiv 2407.16153. The paper trains encoders of up to five
layers at d = 64, N = 16, with feed-forwards and H·r free of d; here it is one layer of attention alone, d = 8, N = 4.

    python examples/rank_vs_heads.py [--seeds 3] [--steps 600]
"""

from __future__ import annotations

import argparse
from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

import manyheads as mh

DIM, POINTS = 8, 4
RANKS, HEADS = (1, 2, 4, 8), (1, 4, 16)


def draw(batch: int, points: int, dim: int, queries: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """y `[B, Q, d]`, points `[B, N, d]`, and the nearest of them to each query `[B, Q, d]`."""
    y, x = (F.normalize(torch.randn(batch, n, dim), dim=-1) for n in (queries, points))
    nearest = (y @ x.mT).argmax(-1)
    return y, x, x.gather(1, nearest[..., None].expand(-1, -1, dim))


def layer(dim: int, rank: int, heads: int) -> mh.Attention:
    site = mh.Site(causal=False, cross=True, context_dim=dim)
    return mh.Attention(f"gqa(head_dim={rank}, v_dim={dim})", dim, heads, site=site)


def exact(dim: int, beta: float) -> mh.Attention:
    """The solution by hand: one head that compares y and x as they are, β times as large."""
    made = layer(dim, dim, 1)
    for name, size in (("q", beta * sqrt(dim)), ("k", 1.0), ("v", 1.0), ("o", 1.0)):  # scores are divided by √d
        made.project.get_parameter(f"{name}_proj.weight").data = size * torch.eye(dim)
    return made


@torch.no_grad()
def error(model: mh.Attention, dim: int = DIM, points: int = POINTS, batch: int = 512) -> float:
    y, x, target = draw(batch, points, dim)
    return (model(y, context=x) - target).square().sum(-1).mean().item()


def trained(rank: int, heads: int, seed: int, steps: int, dim: int = DIM, points: int = POINTS) -> float:
    """The error of a layer that learned the target."""
    torch.manual_seed(seed)
    model = layer(dim, rank, heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        y, x, target = draw(16, points, dim)
        optimizer.zero_grad()
        (model(y, context=x) - target).square().sum(-1).mean().backward()
        optimizer.step()
        schedule.step()
    return error(model, dim, points)


def right(cosine: Tensor, dim: int, degrees: int = 201) -> Tensor:
    """How often a head of rank 1 picks the nearer of two points, by q·k.

    That is (1 + E_z[(2/π) arcsin(q·z) sign(k·z)]) / 2 for z uniform on the sphere, a sum over spherical harmonics (the
    theorem of Funk and Hecke) with Legendre polynomials P_l of dimension d.
    """
    angle = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000 * pi
    t, weight = angle.cos(), angle.sin() ** (dim - 2)
    weight = weight / weight.sum()
    arcsin, sign = weight * (pi / 2 - angle) * 2 / pi, weight * t.sign()
    total, here, past, there, earlier = torch.zeros_like(cosine), t, torch.ones_like(t), cosine, torch.ones_like(cosine)
    for l in range(1, degrees):
        total = total + (arcsin @ here) * (sign @ here) / (weight @ here.square()) * there
        here, past = ((2 * l + dim - 2) * t * here - l * past) / (l + dim - 2), here
        there, earlier = ((2 * l + dim - 2) * cosine * there - l * earlier) / (l + dim - 2), there
    return (1 + total) / 2


def random_heads(dim: int, heads: int, seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.randn(2, heads, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, k = F.normalize(draws, dim=-1)
    return q, k


def agreement(q: Tensor, k: Tensor) -> Tensor:
    """C `[H, H]`."""
    angles = ((x @ x.T).clamp(-1, 1).arcsin() for x in (q, k))
    return 0.5 + 2 / pi**2 * next(angles) * next(angles)


def expected(dim: int, heads: int, seed: int) -> Tensor:
    """The error of the best mixture of the first 1 … H of H random heads `[H]`."""
    q, k = random_heads(dim, heads, seed)
    factor = torch.linalg.cholesky(agreement(q, k))
    b = right((q * k).sum(-1), dim)
    return 1 - torch.linalg.solve_triangular(factor, b[:, None], upper=False)[:, 0].square().cumsum(0)


def needed(dim: int, below: float, seed: int, heads: int = 1024) -> int | None:
    """How many random heads of rank 1 have an error below a number; None if not `heads` of them."""
    found = (expected(dim, heads, seed) < below).nonzero()
    return int(found[0]) + 1 if len(found) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    torch.manual_seed(0)
    print("error of the exact head, predicted to fall to 0 with β")
    print(" | ".join(f"β {beta:g}: {error(exact(DIM, beta)):.4f}" for beta in (1, 10, 100, 1000)))
    print(f"\nerror of a trained layer, d = {DIM}, N = {POINTS}; predicted: near 0 in the last row alone, whatever H")
    print("   r " + "".join(f"{f'H = {heads}':>9}" for heads in HEADS))
    for rank in RANKS:
        means = (sum(trained(rank, heads, s, given.steps) for s in range(given.seeds)) / given.seeds for heads in HEADS)
        print(f"{rank:4} " + "".join(f"{mean:9.4f}" for mean in means), flush=True)
    print("\nrandom heads of rank 1 for an error below a number, N = 2; predicted: a factor for each dimension")
    for below in (0.3, 0.2):
        rows = []
        for dim in range(2, 8):
            each = [needed(dim, below, seed) for seed in range(given.seeds)]
            rows.append(f"d = {dim}: {'over 1024' if None in each else sorted(each)[len(each) // 2]}")  # type: ignore[type-var]
        print(f"below {below}: " + " | ".join(rows), flush=True)


if __name__ == "__main__":
    main()
