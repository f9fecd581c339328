"""A layer with random weights, wide enough, contains any smaller layer: zeros in the right places bring it out.

The target has H heads with merged maps M_h = W_Q^h W_K^hᵀ and N_h = W_V^h W_O^h, D × D. The source has W_Q, W_K `[D,
n]` and W_V, W_O for each head, n = D·g, all drawn from U(-1, 1) and never changed; a ticket is a mask of each. In
channel group i (g of n) W_Q keeps its row i alone, so that masks of W_K decide Σ_m q_im k_jm s_ijm ≈ M_ij: a subset sum
of g random products for each entry, here by looking at all 2^g; likewise V and O. The error falls exponentially in g =
n/D, and does not depend on the length of the sequence.

The 2^g sums are near a normal law of variance g/36, 2^g / √(2π g/36) of them for each unit of length around zero, so
the median distance of a small M_ij to the nearest is ln 2 √(2π g/36) / 2^{g+1}: that is the prediction. A few entries
at the ends of the law are much farther off. The ticket is a layer of ours with zeros among its weights.

Source: Strong lottery tickets in multi-head attention 2025, arXiv 2511.04217, whose abstract and summaries alone were
read: this construction meets its bound n = O(D log(H D^{3/2}/ε)); the distribution is a choice. Here D = 4, H = 2.

    python examples/slt_mha.py [--seeds 3]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import log, log2, pi, sqrt

import torch
from torch import Tensor

import manyheads as mh

DIM, HEADS, GROUPS = 4, 2, (4, 6, 8, 10, 12, 14)


def layer(width: int, dim: int = DIM, heads: int = HEADS) -> mh.Attention:
    return mh.Attention(f"gqa(head_dim={width}, scale=1.0)", dim, heads, site=mh.Site(causal=False)).double()


def draw(model: mh.Attention, bound: float = 1.0) -> mh.Attention:
    for weight in model.parameters():
        torch.nn.init.uniform_(weight, -bound, bound).requires_grad_(False)
    return model


def factors(model: mh.Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V and W_Oᵀ of each head, `[H, D, n]`; M = W_Q W_Kᵀ, and N = W_V W_O."""
    q, k, v, o = (model.project.get_parameter(f"{name}_proj.weight").detach() for name in "qkvo")
    q, k, v = (weight.unflatten(0, (model.heads, -1)).mT for weight in (q, k, v))
    return q, k, v, o.unflatten(1, (model.heads, -1)).transpose(0, 1)


def products(model: mh.Attention) -> tuple[Tensor, Tensor]:
    """M and N `[H, D, D]`."""
    q, k, v, o = factors(model)
    return q @ k.mT, v @ o.mT


def subset(products: Tensor, target: Tensor) -> Tensor:
    """Which of g numbers `[N, g]` sum to a target `[N]` as nearly as any of them do, bool `[N, g]`."""
    g = products.shape[1]
    choices = (torch.arange(2**g)[:, None] >> torch.arange(g)) & 1
    return choices[(products @ choices.T.to(products.dtype) - target[:, None]).abs().argmin(-1)].bool()


def masks(left: Tensor, right: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of left and right `[H, D, n]`, such that left · rightᵀ is near the target `[H, D, D]`."""
    heads, dim, width = left.shape
    own = torch.eye(dim, dtype=torch.bool).repeat_interleave(width // dim, 1)  # row i keeps group i
    kept = (left * own).sum(1, keepdim=True)  # the one entry of each channel
    pairs = (kept * right).unflatten(-1, (dim, -1))  # [H, j, i, g]
    chosen = subset(pairs.flatten(0, 2), target.mT.flatten()).view(heads, dim, width)
    return own.expand(heads, -1, -1), chosen


@dataclass(frozen=True)
class Ticket:
    """model: the source with masks. median, largest: how far entries of M and N are off. kept: the share of weights."""

    model: mh.Attention
    median: float
    largest: float
    kept: float


def ticket(source: mh.Attention, target: mh.Attention) -> Ticket:
    """Masks the source, whose weights are drawn, in place."""
    q, k, v, o = factors(source)
    m, n = products(target)
    keep = [*masks(q, k, m), *masks(v, o, n)]
    for name, mask in zip("qkvo", keep, strict=True):
        weight = source.project.get_parameter(f"{name}_proj.weight")
        weight.mul_(mask.transpose(0, 1).flatten(1) if name == "o" else mask.mT.flatten(0, 1))
    off = torch.cat([(got - want).abs().flatten() for got, want in zip(products(source), (m, n), strict=True)])
    kept = sum(mask.sum().item() for mask in keep) / sum(mask.numel() for mask in keep)
    return Ticket(source, off.median().item(), off.max().item(), kept)


def found(g: int, seed: int) -> tuple[Ticket, mh.Attention]:
    """A ticket of width n = D g, and the target that it stands for."""
    torch.manual_seed(seed)
    target = draw(layer(DIM), 0.5)
    return ticket(draw(layer(DIM * g)), target), target


def predicted(g: int) -> float:
    """The median error of an entry."""
    return log(2) * sqrt(2 * pi * g / 36) / 2 ** (g + 1)


@torch.no_grad()
def apart(ticket: mh.Attention, target: mh.Attention, length: int) -> float:
    """The largest difference of outputs, over inputs of unit size."""
    x = torch.randn(8, length, DIM, dtype=torch.float64)
    return (ticket(x) - target(x)).abs().max().item()


def slope(errors: dict[int, float]) -> float:
    """Of log2 of the error by g, least squares."""
    g, y = torch.tensor([*errors], dtype=torch.float64), torch.tensor([log2(e) for e in errors.values()])
    return ((g - g.mean()) @ (y - y.mean()).double() / (g - g.mean()).square().sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print(f"masks of a random layer for a target of D = {DIM}, H = {HEADS}; means of {given.seeds} seeds")
    print(" n/D        median   predicted   largest   outputs, T = 8   T = 256   kept")
    medians = {}
    for g in GROUPS:
        pairs = [found(g, seed) for seed in range(given.seeds)]
        rows = [(t.median, t.largest, apart(t.model, to, 8), apart(t.model, to, 256), t.kept) for t, to in pairs]
        median, largest, short, long, kept = (sum(column) / len(column) for column in zip(*rows, strict=True))
        medians[g] = median
        print(
            f"{g:4} {median:13.1e} {predicted(g):11.1e} {largest:9.1e} {short:16.1e} {long:9.1e} {kept:6.2f}",
            flush=True,
        )
    falls, should = -slope(medians), -slope({g: predicted(g) for g in GROUPS})
    print(f"log2 of the median falls by {falls:.2f} for each n/D, predicted {should:.2f}")


if __name__ == "__main__":
    main()
