"""How many relations the keys and queries of a layer can hold, and how one budget of channels is best cut into heads.

A graph has m vertices, each an embedding e_i, random of unit length in R^D, and edges: here a random permutation, i →
π(i). Heads score pairs by s^h_ij = e_iᵀ W_Q^h W_K^hᵀ e_j, and an edge is said where max_h s^h_ij > τ. The budget is D_K
= h·d_k channels of keys in all. Capacity is the smallest D_K with which a layer learns the graph, F1 ≥ 0.99. The law:
D_K = Θ(m log m / D) for m edges. With D < m, embeddings overlap and one head is not the best cut; with m = D
orthonormal ones W_Q = I and W_K = P_πᵀ are one head that is exact, and needs d_k = m.

Heads whose scores add up are one head of the whole width, so what is gained comes from the maximum. One head gains
nothing from channels beyond D.

Source: ICML 2026, arXiv 2509.22840, of which abstracts alone were read: read-out, loss and sizes are choices. Trained
by the logistic loss of the maximum (its smooth form, log Σ_h exp) with a learned τ, over all pairs, edges weighed up.

    python examples/rgr_capacity.py [--seeds 1] [--steps 300]
"""

from __future__ import annotations

import argparse
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

import manyheads as mh

DIM = 16
SIZES, BUDGETS, HEADS = (32, 64, 128), (8, 16, 32, 64, 128), (1, 2, 4, 8)


def graph(vertices: int, dim: int) -> tuple[Tensor, Tensor]:
    """Embeddings `[m, D]` and adjacency `[m, m]` of a permutation."""
    order = torch.randperm(vertices)
    return F.normalize(torch.randn(vertices, dim), dim=-1), torch.eye(vertices)[order]


def layer(dim: int, heads: int, width: int) -> mh.Attention:
    return mh.Attention(f"gqa(head_dim={width}, scale=1.0)", dim, heads, site=mh.Site(causal=False))


def scores(model: mh.Attention, embeddings: Tensor) -> Tensor:
    """s `[h, m, m]`, as the layer's softmax would take them."""
    with mh.capture(model, what="scores", grad=True) as tape:
        model(embeddings[None])
    found = tape[0].scores
    assert found is not None
    return found[0]


def f1(scores: Tensor, edges: Tensor) -> float:
    """At the best threshold."""
    hits = edges.flatten()[scores.flatten().argsort(descending=True)].cumsum(0)
    said = torch.arange(1, len(hits) + 1)
    return (2 * hits / (said + edges.sum())).max().item()


def reference(vertices: int) -> tuple[mh.Attention, Tensor]:
    """The head that is exact for orthonormal embeddings, and its edges."""
    _, edges = graph(vertices, vertices)
    model = layer(vertices, 1, vertices)
    model.project.get_parameter("q_proj.weight").data = torch.eye(vertices)
    model.project.get_parameter("k_proj.weight").data = edges
    return model, edges


def learned(vertices: int, budget: int, heads: int, seed: int, steps: int, dim: int = DIM) -> float:
    """F1 after training. A context's pairs are a random choice of all pairs, so these stand for any context."""
    torch.manual_seed(seed)
    embeddings, edges = graph(vertices, dim)
    model, threshold = layer(dim, heads, budget // heads), torch.zeros((), requires_grad=True)
    weights = [model.project.get_parameter(f"{name}_proj.weight") for name in "qk"]
    optimizer = torch.optim.Adam([*weights, threshold], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    heavy = torch.tensor(vertices**0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = scores(model, embeddings).logsumexp(0) - threshold
        F.binary_cross_entropy_with_logits(logits, edges, pos_weight=heavy).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return f1(scores(model, embeddings).amax(0), edges)


def capacity(found: dict[int, float], enough: float = 0.99) -> int | None:
    """The smallest budget of those that are enough; None if none is."""
    return next((budget for budget, reached in sorted(found.items()) if reached >= enough), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    print(f"mean F1 of a layer trained on a permutation of m vertices, embeddings in R^{DIM}")
    for vertices in SIZES:
        print(f"m = {vertices}; m log m / D = {vertices * log(vertices) / DIM:.0f}")
        print("heads " + "".join(f"{f'D_K = {budget}':>11}" for budget in BUDGETS) + "   capacity")
        for heads in HEADS:
            found = {}
            for budget in (budget for budget in BUDGETS if budget >= heads):
                each = [learned(vertices, budget, heads, seed, given.steps) for seed in range(given.seeds)]
                found[budget] = sum(each) / len(each)
            row = "".join(f"{found[budget]:11.3f}" if budget in found else f"{'':11}" for budget in BUDGETS)
            print(f"{heads:5} {row}   {capacity(found) or f'over {BUDGETS[-1]}'}", flush=True)
    model, edges = reference(32)
    print(f"one exact head, orthonormal embeddings, d_k = m = 32: F1 {f1(scores(model, torch.eye(32))[0], edges):.3f}")


if __name__ == "__main__":
    main()
