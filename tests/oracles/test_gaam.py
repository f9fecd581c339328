"""What `gaam` is held to: its equations, its ends, its costs, its refusals."""

import math

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin

from manyheads import Attention, OptionError, Site
from manyheads.attention.tokens.gaam import importance_factor

PAPER = "gaam(params=per_feature, normalise=false)"
FORMS = ["gaam", PAPER, "gaam(combine=mixture, gaussians=3)", "gaam(normalise=false)", "gaam(heads=5)"]


def weights(layer, x):
    return layer.tokens[0].weights(x)


def layer_of(part, **changes):
    layer = make(f"{part} + gqa")
    return twin(layer, str(layer.spec), **{f"tokens__0__{name}": value for name, value in changes.items()})


def code_form(x, offset, c, normalise=True, mixture=False):
    """One slice, as the authors' code has it, a Gaussian at a time."""
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True) + 1e-8
    each = []
    for delta, spread in zip(offset, c, strict=True):
        z = (x - (mean + delta)) / variance.sqrt()
        each.append(torch.exp(-(z**2) / (2 * spread**2)) / torch.sqrt(2 * math.pi * spread**2))
    w = torch.stack(each).mean(0) if mixture else torch.stack(each).prod(0)
    return w / w.sum(-1, keepdim=True) if normalise else w


@pytest.mark.parametrize("mixture", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("heads", [4, 5])
def test_code_form_written_out(heads, normalise, mixture):
    layer = layer_of(
        f"gaam(heads={heads}, normalise={normalise}, combine={'mixture' if mixture else 'product'})".lower()
    )
    x, piece = batch(), layer.tokens[0]
    cut = [6] * 4 if heads == 4 else [4, 4, 4, 4, 8]
    want = [
        code_form(part, piece.offset[h], piece.log_spread[h].exp(), normalise, mixture)
        for h, part in enumerate(x.split(cut, -1))
    ]
    close(weights(layer, x), torch.cat(want, -1))


def test_paper_form_written_out():
    layer, x = layer_of(PAPER), batch()
    piece, parts = layer.tokens[0], x.unflatten(-1, (HEADS, 6))
    m, delta, xi = parts.mean(-1, keepdim=True), piece.offset.view(HEADS, 6), piece.log_spread.exp().view(HEADS, 6)
    variance = (parts.pow(2).mean(-1, keepdim=True) - m**2).abs() + 1e-8
    z = (parts - m - delta) / (variance + 1e-5).sqrt()
    close(weights(layer, x), torch.exp(-(z**2) / (2 * xi)).flatten(-2))


@pytest.mark.parametrize("part", FORMS)
def test_gates_the_input_or_the_output(part):
    layer, x = layer_of(part), batch()
    plain = twin(layer, "gqa")
    close(layer(x), plain(x * weights(layer, x)))
    inside = part[5:-1]
    other = twin(layer, f"gaam({inside + ', ' if inside else ''}on=output) + gqa")
    y = plain(x)
    close(other(x), y * weights(layer, y))
    differ(layer(x), plain(x))


@pytest.mark.parametrize("part", [form for form in FORMS if "normalise" not in form])
def test_weights_are_positive_and_sum_to_one_in_a_slice(part):
    layer, x = layer_of(part), batch()
    w = weights(layer, x)
    assert (w > 0).all()
    for each in w.split(layer.tokens[0].widths, -1):
        close(each.sum(-1), torch.ones(2, 9).double())


def test_constant_input_has_even_weights():
    layer = layer_of("gaam", offset=torch.zeros(HEADS, 5).double())
    close(weights(layer, torch.full((1, 1, DIM), 3.0).double()), torch.full((1, 1, DIM), 1 / 6, dtype=torch.float64))


def test_wide_gaussians_do_nothing():
    x = batch()
    even = layer_of("gaam", log_spread=torch.full((HEADS, 5), 20.0).double())
    close(even.tokens[0].enter(x, layer_axis(even, x), None)[0], x / 6)
    same = layer_of(PAPER, log_spread=torch.full((DIM,), 40.0).double())
    close(same(x), twin(same, "gqa")(x))


def layer_axis(layer, x):
    return layer.axis_of(x, None, None, None)


def test_vanishing_densities_still_sum_to_one():
    """All of them underflow, which the authors' clamp would turn into weights of zero."""
    layer, x = layer_of("gaam", log_spread=torch.full((HEADS, 5), -8.0).double()), batch()
    w = weights(layer, x)
    close(w.unflatten(-1, (HEADS, 6)).sum(-1), torch.ones(2, 9, HEADS).double())
    assert torch.isfinite(layer(x)).all()


def test_several_alike_are_one_narrower():
    offset, log_c = torch.randn(HEADS, 1).double(), torch.randn(HEADS, 1).double() / 3
    many = layer_of("gaam(gaussians=4)", offset=offset.expand(-1, 4), log_spread=log_c.expand(-1, 4))
    one = layer_of("gaam(gaussians=1)", offset=offset, log_spread=log_c - math.log(2))
    x = batch()
    close(weights(many, x), weights(one, x))


@pytest.mark.parametrize("part", FORMS)
def test_shift_and_scale(part):
    layer, x = layer_of(part), batch()
    close(weights(layer, x + 3), weights(layer, x), 1e-9)
    differ(weights(layer, 5 * x), weights(layer, x))
    level = layer_of(part, offset=torch.zeros_like(layer.tokens[0].offset))
    close(weights(level, 5 * x), weights(level, x), 1e-3)  # up to the constants added to the variance


def test_heads_are_independent():
    layer, x = layer_of("gaam"), batch()
    for h, part in enumerate(x.split(6, -1)):
        one = make("gaam(heads=1) + gqa", dim=6, heads=1).tokens[0]
        one.offset.data, one.log_spread.data = (p.data[h : h + 1] for p in layer.tokens[0].parameters())
        close(one.weights(part), weights(layer, x)[..., 6 * h : 6 * h + 6])


def test_padding_passes_unchanged():
    layer, x = layer_of("gaam"), batch()
    axis = layer.axis_of(x, None, torch.arange(9)[None].expand(2, -1) >= 3, None)
    y, same = layer.tokens[0].enter(x, axis, None)
    assert same is axis and torch.equal(y[:, :3], x[:, :3])
    close(y[:, 3:], (x * weights(layer, x))[:, 3:])


def test_a_token_has_weights_of_its_own():
    layer, x = layer_of("gaam"), batch()
    close(weights(layer, x)[:, 4:5], weights(layer, x[:, 4:5]))
    close(decoded(layer, x), layer(x))


def test_importance_factor():
    table = torch.randn(5, 7).double()
    factor = importance_factor(table)
    assert factor.min() == 0 and factor.max() == 1
    close(importance_factor(3 * table + 2), factor)
    assert torch.equal(importance_factor(torch.ones(4)), torch.zeros(4))


def test_first_values():
    piece = Attention("gaam", DIM, HEADS).tokens[0]
    assert not piece.offset.any()
    close(piece.log_spread.exp(), torch.full((HEADS, 5), 2**0.5), 1e-6)
    close(Attention(PAPER, DIM, HEADS).tokens[0].log_spread.exp(), torch.full((DIM,), 2.0), 1e-6)
    drawn = Attention("gaam(start=random, heads=16, gaussians=200)", 64, 4).tokens[0].log_spread
    assert abs(drawn.mean()) < 0.1 and abs(drawn.std() - 1) < 0.1


def test_in_front_of_grouped_queries():
    """The authors' combination: 8 Gaussian heads, 8 query heads, 2 key heads."""
    layer, x = make("gaam(heads=8) + gqa(kv_heads=2)", dim=32, heads=8), batch(dim=32)
    close(layer(x), twin(layer, "gqa(kv_heads=2)")(x * weights(layer, x)))


def test_cost_and_refusals():
    base = make("gqa").spec.cost(DIM, HEADS)
    for part, parameters in (("gaam", 2 * 5 * HEADS), ("gaam(heads=3, gaussians=2)", 2 * 2 * 3), (PAPER, 2 * DIM)):
        cost = make(f"{part} + gqa").spec.cost(DIM, HEADS)
        assert cost.parameters - base.parameters == parameters
        assert (cost.cache_floats, cost.state_floats) == (base.cache_floats, 0)
    for options, said in (
        ("heads=13", "heads=13 slices of dim=24.*1 to 12"), ("heads=0", "heads=0"), ("gaussians=0", "gaussians=0"),
        ("params=per_feature, gaussians=2", "it has one"), ("params=per_feature, combine=mixture", "nothing to comb"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            Attention(f"gaam({options})", DIM, HEADS)
    Attention("gaam", DIM, HEADS, site=Site(causal=False, cross=True))
