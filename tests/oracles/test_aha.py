"""Oracles of `aha`."""

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    TOKENS,
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
    weights,
)

from manyheads import Attention, Links, OptionError
from manyheads.core.mask import Axis
from manyheads.stack import Stack

back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
WIDTH = DIM // HEADS


def outputs(layer, x, window):
    """Head outputs of both reaches, `[B, H, T, d]`."""
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    q, k = rope(q), rope(k)
    masks = triangle(), triangle() & (back < window)
    return [weights(q, k, WIDTH**-0.5, mask) @ v for mask in masks]


def test_written_out():
    layer, x = make("gqa + aha(window=3)"), batch()
    everywhere, here = outputs(layer, x, 3)
    g = (torch.sigmoid(layer.selects[0].router(x)) > 0.5).transpose(1, 2)[..., None]
    assert 0.2 < g.double().mean() < 0.8
    close(layer(x), join(torch.where(g, everywhere, here), layer.project.o_proj))


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "mla(rank=10, rope_dim=4)"])
def test_thresholds_beyond_the_router(base):
    layer, x = make(f"{base} + aha(window=3)"), batch()
    close(twin(layer, f"{base} + aha(window=3, threshold=-0.1)")(x), twin(layer, base)(x))
    close(twin(layer, f"{base} + aha(window=3, threshold=1.1)")(x), twin(layer, f"{base} + window(3)")(x))


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "mla(rank=10, rope_dim=4)"])
def test_two_calls_equal_one_masked_call_and_decoding(base):
    layer, x = make(f"{base} + aha(window=3)"), batch()
    with torch.no_grad():
        close(layer(x), layer(x.clone().requires_grad_()))
    both = layer(x)
    assert both.requires_grad
    with torch.no_grad():
        close(layer(x), both)
    for block in (1, 4):
        close(decoded(layer, x, block), both)


def test_queries_may_be_a_cut_of_an_axis():
    layer, x = make("gqa + aha(window=3)"), batch()
    axis = Axis(TOKENS + 2, 0)[2:]
    want = layer(x, positions=axis)
    with torch.no_grad():
        close(layer(x, positions=axis), want)


def test_starts_as_the_base_layer():
    layer, x = Attention("gqa + aha(window=2)", DIM, HEADS).double(), batch()
    close(layer(x), twin(layer, "gqa")(x))
    close(layer.selects[0].route(x), torch.full((2, HEADS, TOKENS), 4.0).double().sigmoid())
    stack = Stack("gqa + aha(window=2)", DIM, HEADS, 2)
    assert all((layer.selects[0].router.bias == 4).all() for layer in stack.attentions)


def test_a_window_of_everything_needs_no_router():
    layer, x = make(f"gqa + aha(window={TOKENS})"), batch()
    y = layer(x)
    close(y, twin(layer, "gqa")(x))
    gradients = torch.autograd.grad(y.pow(2).sum(), list(layer.selects[0].router.parameters()))
    assert all(gradient.abs().max() < 1e-12 for gradient in gradients)


def test_early_tokens_see_the_same_either_way():
    layer, x = make("gqa + aha(window=4)"), batch()
    plain = twin(layer, "gqa")(x)
    close(layer(x)[:, :4], plain[:, :4])
    differ(layer(x), plain)


def test_straight_through_gradient():
    """dr = <do, o_all - o_here> + λ / N, exactly."""
    layer, x, links, weight = make("gqa + aha(window=2)").train(), batch(), Links(), 0.3
    select, seen = layer.selects[0], []
    route = select.route

    def spy(x):
        seen.append(route(x))
        seen[-1].retain_grad()
        return seen[-1]

    select.route = spy
    y = layer(x, links=links)
    (y.pow(2).sum() + weight * links.aux["0.aha"]).backward()
    everywhere, here = outputs(layer, x, 2)
    do = (2 * y.detach() @ layer.project.o_proj.weight).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    want = (do * (everywhere - here)).sum(-1) + weight / (2 * HEADS * TOKENS)
    close(seen[0].grad, want.detach())


def test_loss_is_the_mean_score_of_tokens_and_for_training():
    layer, x, links = make("gqa + aha(window=2)").train(), batch(), Links()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    layer(x, links=links, mask=valid)
    r = layer.selects[0].route(x).transpose(1, 2)
    close(links.aux["0.aha"], r[valid].mean())
    links = Links()
    layer.eval()(x, links=links)
    assert not links.aux


def test_looking_everywhere_again_after_many_local_steps():
    """Rows are kept whatever their own token looked at."""
    layer, x = make("gqa + aha(window=2)"), batch()
    router = layer.selects[0].router
    router.weight.data.zero_()
    router.weight.data[:, 0], router.bias.data[:] = 100.0, 0.0
    x[:, :, 0], x[:, -1, 0] = -1.0, 1.0
    plain = twin(layer, "gqa")(x)
    close(decoded(layer, x)[:, -1], plain[:, -1])
    differ(plain[:, -2], layer(x)[:, -2])


def test_rate_falls_with_the_threshold_and_is_the_mean_score_when_saturated():
    layer, x = make("gqa + aha"), batch()
    r = layer.selects[0].route(x)
    rates = [(r > tau / 10).double().mean() for tau in range(-1, 12)]
    assert rates == sorted(rates, reverse=True) and (rates[0], rates[-1]) == (1, 0)
    layer.selects[0].router.weight.data *= 1e6
    r = layer.selects[0].route(x)
    close(r.mean(), (r > 0.5).double().mean(), 1e-3)


def test_local_heads_read_no_older_key():
    """When every query head of a key head stays near, no older row of it gets a gradient."""
    layer, x = make("gqa(kv_heads=2) + aha(window=3)"), batch()
    router = layer.selects[0].router
    router.weight.data.zero_()
    router.bias.data[:] = torch.tensor([-9.0, -9.0, -9.0, 9.0])
    seen = []
    write = layer.project.write

    def spy(flow):
        rows = write(flow)
        rows["v"].retain_grad()
        seen.append(rows["v"])
        return rows

    layer.project.write = spy
    layer(x)[:, -1].sum().backward()
    gradient = (seen[0].grad[0] != 0).any(-1)
    assert gradient[0].tolist() == [False] * 6 + [True] * 3 and gradient[1].all()


def test_cost():
    layer, plain = make("gqa(kv_heads=2) + aha"), make("gqa(kv_heads=2)")
    cost, base = (each.spec.cost(DIM, HEADS) for each in (layer, plain))
    assert cost.parameters - base.parameters == DIM * HEADS + HEADS
    assert cost.cache_floats == base.cache_floats == 2 * 2 * WIDTH and cost.windows == ()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("aha(window=0)", "aha: a window of 0 tokens sees nothing"),
        ("aha + talking_heads", "'talking_heads' needs 'one map' .*, which 'aha' breaks"),
        ("aha + gda", "'differential' needs 'alike heads' .*, which 'aha' breaks"),
        ("aha + aha", "'aha' needs 'one map' .*, which 'aha' breaks"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(OptionError, match=said):
        Attention(spec, DIM, HEADS)
