"""Oracles of `entmax`."""

import itertools
import sys

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    batch,
    close,
    decoded,
    differ,
    heads_of,
    join,
    make,
    rope,
    triangle,
    twin,
)

from manyheads import Attention, OptionError, SpecError

WIDTH = 6
SPECS = ["gqa + entmax", "gqa + entmax(alpha=1.25)", "gqa + entmax(alpha=1.5)", "gqa + entmax(alpha=2.0)"]


def weights(z, alpha, seen=None):
    """The part's weights of `z` `[S]` or `[rows, S]`."""
    piece = Attention(f"gqa + entmax(alpha={alpha})", DIM, HEADS).attends[0]
    seen = torch.ones_like(z, dtype=torch.bool) if seen is None else seen
    return piece.normalise(z, seen, None)


def solved(z, alpha):
    """[(α-1) z - τ]₊^(1/(α-1)) of one row, τ found between the two ends that bound it for any row."""

    def p(tau):
        return ((alpha - 1) * z - tau).clamp_min(0) ** (1 / (alpha - 1))

    high = (alpha - 1) * z.max().item()
    low = high - 1
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if p(middle).sum() >= 1 else (low, middle)
    return p(low)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_values():
    z = vector(-2, 0, 0.5)
    close(weights(z, 2.0), vector(0, 0.25, 0.75))
    close(weights(z, 1.5), vector(0, 0.326, 0.674), 5e-4)
    close(weights(vector(-1, 0, 0.5), 1.33), vector(0.0460, 0.3276, 0.6264), 5e-5)


@pytest.mark.parametrize("alpha", [1.01, 1.1, 1.25, 1.5, 1.75, 2.0])
def test_formula_and_invariances(alpha):
    z = 2 * torch.randn(20, 9, dtype=torch.float64)
    p = weights(z, alpha)
    close(p.sum(-1), torch.ones(20).double())
    assert (p >= 0).all()
    close(weights(z + 3.7, alpha), p)
    order = torch.randperm(9)
    close(weights(z[:, order], alpha), p[:, order])
    tau = (alpha - 1) * z - p ** (alpha - 1)  # one for the support of a row, and the rest lies below it
    on = p > 0
    tau = tau.masked_fill(~on, -torch.inf).amax(-1, keepdim=True)
    close(p, ((alpha - 1) * z - tau).clamp_min(0) ** (1 / (alpha - 1)), 1e-9)
    assert ((alpha - 1) * z <= tau)[~on].all()


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_sorting_equals_bisection(alpha):
    z = 2 * torch.randn(20, 9, dtype=torch.float64)
    piece = Attention("gqa + entmax(alpha=1.25)", DIM, HEADS).attends[0]
    piece.fixed = alpha
    close(weights(z, alpha), piece.normalise(z, torch.ones_like(z, dtype=torch.bool), None), 1e-9)


def test_two_is_the_projection_onto_the_simplex():
    """Nearer to z than any other point of the simplex; of two entries, clip((1 + z₁ - z₂)/2, 0, 1)."""
    z = torch.randn(5, dtype=torch.float64)
    others = torch.distributions.Dirichlet(torch.ones(5).double()).sample((2000,))
    assert (z - weights(z, 2.0)).norm() <= (z - others).norm(dim=-1).min()
    pairs = 2 * torch.randn(50, 2, dtype=torch.float64)
    close(weights(pairs, 2.0)[:, 0], ((1 + pairs[:, 0] - pairs[:, 1]) / 2).clamp(0, 1))


def test_near_one_is_near_softmax():
    z = torch.randn(20, 9, dtype=torch.float64)
    gaps = [(weights(z, alpha) - z.softmax(-1)).abs().max().item() for alpha in (1.01, 1.1, 1.5)]
    assert gaps[0] < 0.02 and gaps == sorted(gaps)


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_support_shrinks_as_scores_grow(alpha):
    z = torch.randn(20, 30, dtype=torch.float64)
    supports = [weights(scale * z, alpha) > 0 for scale in (0.5, 1.0, 2.0, 4.0)]
    for wide, narrow in itertools.pairwise(supports):
        assert not (narrow & ~wide).any()
    assert supports[-1].sum() < supports[0].sum()


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_jacobian(alpha):
    """diag(g) - g gᵀ/Σg, g = p^(2-α) on the support: symmetric, rows that sum to zero, none off the support."""
    z = 1.5 * torch.randn(9, dtype=torch.float64)
    p = weights(z, alpha)
    jacobian = torch.autograd.functional.jacobian(lambda z: weights(z, alpha), z)
    g = torch.where(p > 0, p ** (2 - alpha), 0.0)
    close(jacobian, g.diag() - g[:, None] * g / g.sum(), 1e-9)
    close(jacobian, jacobian.T)
    close(jacobian.sum(-1), torch.zeros(9).double())
    assert (p == 0).any() and not jacobian[p == 0].any()
    assert torch.autograd.gradcheck(lambda z: weights(z, alpha), z.requires_grad_(), eps=1e-7, atol=1e-5)


def test_gradient_of_a_head_in_its_alpha():
    """dp/dα against differences, and through α = 1 + σ(a)."""
    piece = make(SPECS[0]).attends[0]
    z, seen = torch.randn(2, HEADS, 5, 7, dtype=torch.float64), torch.ones(7, dtype=torch.bool)

    def value(logits):
        piece.logits.data = logits
        return (piece.normalise(z, seen, None) * z.sin()).sum((0, 2, 3))

    start = piece.logits.detach().clone()
    (gradient,) = torch.autograd.grad(value(start.clone()).sum(), piece.logits)
    step = 1e-5
    close(gradient, (value(start + step) - value(start - step)) / (2 * step), 1e-6)
    piece.logits.data = vector(*[0.33 / 0.67] * HEADS).log()
    close(piece.alpha().flatten(), vector(*[1.33] * HEADS))
    w = piece.normalise(vector(-1, 0, 0.5).expand(1, HEADS, 1, 3), torch.ones(3, dtype=torch.bool), None)
    (da,) = torch.autograd.grad(w[..., 0].sum(), piece.logits)
    close(da, vector(*[-0.2562 * 0.33 * 0.67] * HEADS), 1e-4)


def test_alpha_stays_off_one():
    piece = make(SPECS[0]).attends[0]
    piece.logits.data = vector(-100, -3, 3, 100)
    alpha = piece.alpha().flatten()
    assert alpha.min() == 1.01 and alpha.max() == 2 and (alpha.diff() > 0).all()


@pytest.mark.parametrize("spec", SPECS)
def test_hidden_keys_weigh_nothing(spec):
    """Those seen weigh what they weigh alone; a query that sees nothing gives zero and no gradient."""
    piece = make(spec).attends[0]
    z = torch.randn(1, HEADS, 6, 8, dtype=torch.float64).requires_grad_()
    seen = torch.arange(8)[None] < torch.arange(6)[:, None]
    p = piece.normalise(z, seen, None)
    assert not p[:, :, 0].any() and not p.masked_select(~seen).any() and p.isfinite().all()
    for row in range(1, 6):
        alone = piece.normalise(z[:, :, row : row + 1, :row], torch.ones(row, dtype=torch.bool), None)
        close(p[:, :, row, :row], alone[:, :, 0])
    (gradient,) = torch.autograd.grad(p.pow(2).sum(), z)
    assert gradient.isfinite().all() and not gradient.masked_select(~seen).any()


@pytest.mark.parametrize("spec", SPECS)
def test_layer_written_out(spec):
    layer, x = make(spec), batch()
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    z = rope(q) @ rope(k).transpose(-1, -2) * WIDTH**-0.5
    piece = layer.attends[0]
    alphas = [piece.fixed] * HEADS if piece.logits is None else piece.alpha().flatten().tolist()
    w = torch.zeros_like(z)
    for b in range(2):
        for h, alpha in enumerate(alphas):
            for t in range(9):
                w[b, h, t, : t + 1] = solved(z[b, h, t, : t + 1].detach(), alpha)
    close(layer(x), join(w @ v, p.o_proj), 1e-8)


def test_one_is_the_base_layer_bit_for_bit():
    layer, x = make("gqa"), batch()
    other = twin(layer, "gqa + entmax(alpha=1.0)")
    assert torch.equal(other(x), layer(x)) and not list(other.attends.parameters())
    assert str(other.explain(queries=64)) == str(layer.explain(queries=64))
    differ(twin(layer, "gqa + entmax(alpha=1.5)")(x), layer(x))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("base", ["gqa(kv_heads=1)", "mla(rank=10, rope_dim=4, v_dim=5)"])
def test_decode(spec, base):
    layer, x = make(spec.replace("gqa", base)), batch()
    close(decoded(layer, x), layer(x))


def test_differential_maps_may_both_be_sparse():
    layer, x = make("gqa + entmax(alpha=1.5) + differential"), batch()
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    z = (rope(q) @ rope(k).transpose(-1, -2) * WIDTH**-0.5).masked_fill(~triangle(), -1e9)
    signal, noise = (weights(z[:, first::2], 1.5) for first in (0, 1))
    both = torch.cat([v[:, 0::2], v[:, 1::2]], -1)
    close(layer(x), join((signal - layer.attends[1].subtracted() * noise) @ both, p.o_proj))


def test_cost():
    """One number a head; the cache is the base layer's."""
    base = make("gqa").spec.cost(DIM, HEADS)
    for spec, parameters in zip(SPECS, (HEADS, 0, 0, 0), strict=True):
        cost = make(spec).spec.cost(DIM, HEADS)
        assert cost.parameters - base.parameters == parameters and cost.cache_floats == base.cache_floats


def test_refusals():
    for alpha in (0.5, 1.005, 2.5):
        with pytest.raises(OptionError, match=r"it may be 1, or from 1\.01 to 2"):
            Attention(f"gqa + entmax(alpha={alpha})", DIM, HEADS)
    for spec in ("entmax + differential", "talking_heads + entmax", "entmax + softmax"):
        with pytest.raises(SpecError, match="entmax"):
            Attention(spec, DIM, HEADS)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "entmax", None)
    with pytest.raises(ImportError, match=r"manyheads\[entmax\]"):
        Attention("gqa + entmax", DIM, HEADS)
    Attention("gqa + entmax(alpha=1.0)", DIM, HEADS)
