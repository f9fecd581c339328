"""How many examples one layer can fit: about H (n - 1) with contexts of n tokens, whatever the kind of attention.

An example is a context `[n, d]`, a query `[d]`, and a label; the output is read at the query, linearly. With random W_Q
and W_K left as they are, what can be fitted are labels in the span of the features Φ = concat_h Σ_j α_hj E_j `[T, H
d]`: T examples with any labels if and only if rank Φ = T. With one context for all of them, weights that sum to one
give rank Φ = H (n - 1) + 1 (while n ≤ d), with a context each min(T, H d). Weights whose sum is free give one more a
head.

It holds of any spec: weights are captured, and need not come from `mha`. Heads that share keys, or read a latent, are
as good; heads that are copies add nothing, nor does uniform attention. Last, W_Q grows: the share of weights above 0.99
goes towards 1, as in trained layers, a head then sees one key, and keys that no query chooses are lost to the rank.

Source: ICLR 2024, arXiv 2306.02010. The paper trains all weights on up to 1.3·10⁵ examples (n = 32, d = 64, H up to 60,
days of GPUs) and proves Ω(H min(n, d_h)); here W_Q and W_K are random, labels a linear solve, in seconds.

    python examples/memorization_capacity.py [--seeds 3] [--dim 32]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import manyheads as mh

SPECS = ("mha", "mqa", "mla(rank=16)", "mha + entmax", "mha + cog-attention(soft_ends=false)", "mha + talking_heads")
HEADS, LENGTHS = (1, 2, 4), (2, 4, 8)


def draw(examples: int, length: int, dim: int, fixed: bool = True) -> tuple[Tensor, Tensor]:
    """Queries `[T, 1, d]` and contexts `[T, n, d]`, one for all or one each, uniform in [0, 1]."""
    queries = torch.rand(examples, 1, dim, dtype=torch.float64)
    context = torch.rand(1 if fixed else examples, length, dim, dtype=torch.float64)
    return queries, context.expand(examples, -1, -1)


def layer(spec: str, dim: int, heads: int, scale: float = 4.0) -> mh.Attention:
    """A layer whose scores are `scale` times as spread out as those of first weights."""
    made = mh.Attention(spec, dim, heads, site=mh.Site(causal=False, cross=True, context_dim=dim)).double()
    with torch.no_grad():
        made.project.get_parameter("q_proj.weight").mul_(scale)
    return made


def weights(model: mh.Attention, queries: Tensor, context: Tensor) -> Tensor:
    """`[T, H, n]`"""
    with torch.no_grad(), mh.capture(model) as tape:
        model(queries, context=context)
    found = tape[0].weights
    assert found is not None
    return found[:, :, 0]


def features(model: mh.Attention, queries: Tensor, context: Tensor) -> Tensor:
    """Φ `[T, H d]`."""
    return (weights(model, queries, context) @ context).flatten(1)


def rank(features: Tensor) -> int:
    """Of columns of unit length, so that heads of small features count as others do."""
    columns = features / features.norm(dim=0).clamp_min(1e-300)
    return int(torch.linalg.matrix_rank(columns, rtol=1e-10))


def capacity(spec: str, heads: int, length: int, dim: int, seed: int, fixed: bool = True, examples: int = 0) -> int:
    """How many examples of any labels can be fitted, of as many as there could be by the law and 20 more."""
    torch.manual_seed(seed)
    model = layer(spec, dim, heads)
    return rank(features(model, *draw(examples or heads * length + 20, length, dim, fixed)))


def misfit(spec: str, heads: int, length: int, dim: int, seed: int, examples: int) -> float:
    """What is left of random labels by the best linear decoder, a share of their squares."""
    torch.manual_seed(seed)
    made = features(layer(spec, dim, heads), *draw(examples, length, dim))
    labels = torch.randn(examples, 1, dtype=torch.float64)
    fitted = made @ torch.linalg.lstsq(made, labels, driver="gelsd", rcond=1e-12).solution
    return ((labels - fitted).square().sum() / labels.square().sum()).item()


def saturation(scale: float, heads: int, length: int, dim: int, seed: int) -> tuple[float, int]:
    """The share of examples and heads with a weight above 0.99, and rank Φ."""
    torch.manual_seed(seed)
    model, (queries, context) = layer("mha", dim, heads, scale), draw(200, length, dim)
    largest = weights(model, queries, context).amax(-1)
    return (largest > 0.99).double().mean().item(), rank(features(model, queries, context))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dim", type=int, default=32)
    given = parser.parse_args()
    grid = [(heads, length) for heads in HEADS for length in LENGTHS]
    print(f"examples that a layer fits, d = {given.dim}, one context for all")
    print(f"{'heads H':>36} " + " ".join(f"{heads:3}" for heads, _ in grid))
    print(f"{'context n':>36} " + " ".join(f"{length:3}" for _, length in grid))
    print(f"{'predicted: H (n - 1) + 1':>36} " + " ".join(f"{heads * (n - 1) + 1:3}" for heads, n in grid))
    for spec in SPECS:
        found = ([capacity(spec, *case, given.dim, seed) for seed in range(given.seeds)] for case in grid)
        print(f"{spec:>36} " + " ".join(f"{sorted(each)[len(each) // 2]:3}" for each in found), flush=True)
    heads, length, limit = 4, 8, 4 * 7 + 1
    left = (
        f"{t}: {misfit('mha', heads, length, given.dim, 0, t):.1e}" for t in (limit - 1, limit, limit + 1, 2 * limit)
    )
    print(f"\nshare of random labels unfitted by T, H = {heads}, n = {length}, limit {limit}: " + " | ".join(left))
    own = capacity("mha", 2, 4, 8, 0, fixed=False, examples=40)
    print(f"a context for each example, H = 2, d = 8: {own} fitted; predicted H d = 16")
    print("saturated heads and rank as W_Q grows: ", end="")
    each = ((scale, *saturation(scale, heads, length, given.dim, 0)) for scale in (1, 10, 100, 1000))
    print(" | ".join(f"×{scale}: {100 * share:.0f} %, {found}" for scale, share, found in each))


if __name__ == "__main__":
    main()
