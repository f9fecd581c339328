"""Measures of weights alone: the rank of what heads compare, and of what they write. No text is needed."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.flow import Flow, Links, Rows
from manyheads.core.mask import Axis
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.measures.table import HeadTable


def singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Of left · rightᵀ `[D, D]`, d of them, descending, from two factors `[D, d]`: by QR, never at D × D."""
    return torch.linalg.svdvals(torch.linalg.qr(left.double()).R @ torch.linalg.qr(right.double()).R.mT)


def effective_rank(sigma: Tensor, power: float = 1.0) -> Tensor:
    """exp(-Σ p ln p), p = σ / Σσ: between 1 and the number of singular values. power: of σ in p; others take squares.

    Source: Roy and Vetterli 2007.
    """
    p = sigma**power
    p = p / p.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def stable_rank(sigma: Tensor) -> Tensor:
    """Σσ² / σ_1². Source: Rudelson and Vershynin 2007, arXiv math/0503442."""
    return sigma.square().sum(-1) / sigma.square().amax(-1)


@dataclass(frozen=True)
class Spectrum:
    """Where the eigenvalues λ of WᵀW / N lie of a matrix W `[N, M]`, M ≤ N, whose entries have mean square s².

    lower, upper: the edges s² (1 ∓ √(M/N))² within which those of noise lie. outliers: how many are above. lead: λ_1
    over the upper edge. share: of Σλ, what is above it.
    """

    lower: float
    upper: float
    outliers: int
    lead: float
    share: float


def marchenko_pastur(weight: Tensor) -> Spectrum:
    """The Marchenko-Pastur law on one matrix: what of it stands out of noise.

    It is about matrices of independent entries; the product W_Q W_Kᵀ is none, so W_Q and W_K are looked at apart. Not
    invariant to a change of basis between W_Q and W_K. Source: Marchenko and Pastur 1967; Martin and Mahoney 2018,
    arXiv 1810.01075.
    """
    w = weight.double()
    w = w if w.shape[0] >= w.shape[1] else w.T
    n, m = w.shape
    values = torch.linalg.svdvals(w).square() / n
    variance, ratio = w.square().mean().item(), sqrt(m / n)
    lower, upper = variance * (1 - ratio) ** 2, variance * (1 + ratio) ** 2
    above = values > upper
    share = (values[above].sum() / values.sum()).item() if values.sum() > 0 else 0.0
    return Spectrum(lower, upper, int(above.sum()), (values[0] / upper).item() if upper else 0.0, share)


def head_weights(layer: Layer) -> tuple[Tensor, Tensor]:
    """W_Q and W_K of each query head, `[H, D, E]`: how its scores depend on the layer's inputs, x_t W_Q W_Kᵀ x_sᵀ.

    Read off the layer itself by putting unit vectors through it, so that any linear projection will do; biases are left
    out (see `head_maps`), and rotation is that of a key at the query's own position.

    Raises:
        ValueError: queries or keys are no linear functions of the input, or keys come from elsewhere.
    """
    q, k, _, _ = head_maps(layer)
    return q, k


def head_maps(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`head_weights`, and the biases of queries and keys of each query head, `[H, E]`, which are there at x = 0."""
    if not isinstance(layer.module, Attention):
        return _stock_maps(layer)
    attention = layer.module
    if attention.site.cross or attention.site.kv_source is not None:
        raise ValueError(f"{layer.name}: its keys come from elsewhere than its queries")
    weight = next(attention.parameters())
    unit = torch.eye(attention.dim, dtype=weight.dtype, device=weight.device)
    inputs = torch.stack([unit, 0 * unit, 2 * unit])
    axis = Axis(attention.dim, 0, device=weight.device)
    flow = Flow(inputs, inputs, axis, axis, Links(), attention.site.layer)
    with torch.no_grad():
        q = attention.project.queries(flow)
        rows = {name: row for piece in attention.writing for name, row in piece.write(flow).items()}
        flow.rows = Rows(attention.project.settle(q, rows, flow), axis)
        q, k, _, keys = attention.project.keys(q, flow)
    found, biases = [], []
    for x in (q.double(), k.double()):
        one, twice = x[0] - x[1], x[2] - x[1]
        if (
            x.shape[2] != attention.dim
            or keys.length != attention.dim
            or not torch.allclose(twice, 2 * one, atol=1e-4 * one.abs().amax().item(), rtol=1e-4)
        ):
            raise ValueError(f"{layer.name}: its queries and keys are no linear functions of its input")
        found.append(one)
        biases.append(x[1, :, 0])
    each = len(found[0]) // len(found[1])
    return found[0], found[1].repeat_interleave(each, 0), biases[0], biases[1].repeat_interleave(each, 0)


def _stock_maps(layer: Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def find(*names: str) -> tuple[Tensor, Tensor]:
        modules = (getattr(layer.module, name, None) for name in names)
        linear = next((m for m in modules if isinstance(m, nn.Linear)), None)
        if linear is None:
            raise ValueError(f"{layer.name}: a {type(layer.module).__name__} has no projection {' or '.join(names)}")
        weight = linear.weight.detach().double().T
        bias = weight.new_zeros(weight.shape[1]) if linear.bias is None else linear.bias.detach().double()
        return weight, bias

    q, q_bias = (x.unflatten(-1, (layer.heads, -1)).movedim(-2, 0) for x in find("q_proj", "query", "q"))
    k, k_bias = (x.unflatten(-1, (-1, q.shape[-1])).movedim(-2, 0) for x in find("k_proj", "key", "k"))
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"{layer.name}: its keys come from elsewhere than its queries")
    each = layer.heads // len(k)
    return q, k.repeat_interleave(each, 0), q_bias, k_bias.repeat_interleave(each, 0)


def qk_rank(model: nn.Module, layers: int | list[int] | None = None) -> dict[str, HeadTable]:
    """Of W_Q W_Kᵀ by head: `effective_rank`, `stable_rank`, and `bottleneck`, 1 where its width d is what limits it.

    A head can compare along d directions of its D-wide input. It has a bottleneck where it leaves none of them idle:
    its effective rank is at least 95 % of what it is with the entries of W_Q and W_K shuffled (noise of the same size).
    Invariant to a change of basis between W_Q and W_K. Also `outliers`: of W_Q and W_K together, how many eigenvalues
    are above the Marchenko-Pastur edge. Layers whose weights cannot be told apart are left out.

    Source: Bhojanapalli et al. 2020, arXiv 2002.07028 (the bottleneck).
    """
    names = ("effective_rank", "stable_rank", "bottleneck", "outliers")
    rows: dict[str, dict[int, Tensor]] = {name: {} for name in names}
    generator = torch.Generator().manual_seed(0)
    for layer in chosen(model, layers):
        try:
            queries, keys = (x.cpu() for x in head_weights(layer))
        except ValueError:
            continue
        sigma = singular_values(queries, keys)
        chance = effective_rank(singular_values(_shuffled(queries, generator), _shuffled(keys, generator)))
        ranks = effective_rank(sigma)
        bottleneck = (ranks >= 0.95 * chance).double() * (queries.shape[2] < queries.shape[1])
        each = [marchenko_pastur(q).outliers + marchenko_pastur(k).outliers for q, k in zip(queries, keys, strict=True)]
        outliers = torch.tensor(each, dtype=torch.float64)
        for name, values in zip(names, (ranks, stable_rank(sigma), bottleneck, outliers), strict=True):
            rows[name][layer.number] = values
    return {name: HeadTable(name, found) for name, found in rows.items() if found}


def _shuffled(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.stack([one.flatten()[torch.randperm(one.numel(), generator=generator)].view_as(one) for one in x])
