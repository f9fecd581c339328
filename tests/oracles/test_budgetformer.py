"""What `budgetformer` is held to: its equations, its ends, its costs, its refusals."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, differ, heads_of, join, make, twin, weights

from manyheads import Attention, Links, OptionError, Site, SpecError

BOTH_WAYS = Site(causal=False)
SPEC = "gqa + budgetformer"


def layer_of(spec=SPEC, **options):
    return make(spec, site=BOTH_WAYS, **options)


def budget(layer, s):
    """The layer with a budget of `s` whatever the input."""
    b = torch.tensor([s], dtype=torch.float64).logit()
    return twin(
        layer, str(layer.spec), gates__0__budget__2__weight=torch.zeros(1, 6).double(), gates__0__budget__2__bias=b
    )


def flow_of(layer, x, mask=None):
    return layer._flow(x, None, mask, None, None, None)


def gates(layer, x, mask=None):
    """m `[B, H]`."""
    return layer.gates[0].gate(torch.ones(len(x), HEADS, 1, 1).double(), flow_of(layer, x, mask))[..., 0, 0]


def controls(layer, x, mask=None):
    mass, chance = layer.gates[0].controls(flow_of(layer, x, mask))
    return mass[:, 0] / HEADS, chance[:, 0]


def loss(layer, x):
    links = Links()
    layer.train()(x, links=links)
    return links.aux["0.budgetformer"]


def many(layer, low=0.02, high=0.98):
    """Several sequences and budgets that leave 1 to H heads on."""
    x = batch(size=3)
    return [(budget(layer, s), x) for s in torch.linspace(low, high, 7).tolist()]


def test_full_budget_without_preference_is_the_base_layer():
    layer, x = budget(layer_of(), 1.0), batch()
    layer = twin(layer, SPEC, gates__0__relevance__weight=torch.zeros(HEADS, DIM).double())
    for train in (True, False):
        close(layer.train(train)(x), twin(layer, "gqa")(x))


def test_controls_written_out():
    layer, x = layer_of(), batch()
    mean, f = x.mean(1), layer.gates[0].budget
    s = torch.sigmoid(torch.nn.functional.gelu(mean @ f[0].weight.T + f[0].bias) @ f[2].weight.T + f[2].bias)
    p = (mean @ layer.gates[0].relevance.weight.T / 0.5).softmax(-1)
    got = controls(layer, x)
    close(got[0], s)
    close(got[1], p)
    close(gates(layer.train(), x), s * HEADS * p)


def test_mass_and_number_of_heads():
    for layer, x in many(layer_of()):
        s, p = controls(layer, x)
        for train in (True, False):
            m = gates(layer.train(train), x)
            close(m.sum(-1, keepdim=True), s * HEADS)
        k = (m != 0).sum(-1, keepdim=True)
        assert torch.equal(k, (s * HEADS).ceil().long()) and (k >= 1).all() and (k <= HEADS).all()
        assert torch.equal(m != 0, p >= p.sort(-1, descending=True)[0].gather(-1, k - 1))


def test_a_budget_of_nothing_leaves_a_head():
    layer, x = budget(layer_of(), 0.0), batch()
    assert torch.isfinite(gates(layer, x)).all()


def test_all_heads_on_is_the_training_form():
    layer, x = budget(layer_of(), 0.99), batch()
    close(gates(layer, x), gates(layer.train(), x))
    close(layer.eval()(x), layer.train()(x))


def test_gathered_is_weighed():
    """Only the chosen heads are computed, each sequence's own, and go through their blocks of W_O."""
    layer, x = budget(layer_of(), 0.6), batch(size=3)
    m, p = gates(layer, x), layer.project
    want = []
    for each, gate in zip(x[:, None], m, strict=True):
        on = gate.nonzero()[:, 0]
        assert len(on) == 3
        q, k, v = (heads_of(f(each), HEADS)[:, on] for f in (p.q_proj, p.k_proj, p.v_proj))
        o = weights(q, k, 6**-0.5, torch.ones(9, 9, dtype=torch.bool)) @ v * gate[on, None, None]
        blocks = p.o_proj.weight.unflatten(1, (HEADS, 6))[:, on].flatten(1)
        want.append(join(o, lambda rows, blocks=blocks: rows @ blocks.T))
    close(layer(x), torch.cat(want))


def test_gates_ignore_token_order_and_padding():
    layer, x = layer_of(), batch()
    m = gates(layer, x)
    close(gates(layer, x[:, torch.randperm(9)]), m)
    padded, valid = torch.cat([torch.randn(2, 3, DIM).double(), x], 1), torch.arange(12)[None].expand(2, -1) >= 3
    close(gates(layer, padded, valid), m)
    close(layer(padded, mask=valid)[:, 3:], layer(x))


@pytest.mark.parametrize(("s", "slope", "height"), [(0.04, -1, 0.06), (0.5, 0, 0.0), (0.95, 1, 0.05)])
def test_hinge(s, slope, height):
    layer, x = budget(layer_of(SPEC + "(entropy=0.0)"), s), batch()
    bias = layer.gates[0].budget[2].bias
    value = loss(layer, x)
    close(value, torch.tensor(height, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(value, bias)
    close(gradient, torch.tensor([slope * s * (1 - s)], dtype=torch.float64))


def test_entropy_is_rewarded_then_penalised():
    layer, x = budget(layer_of(SPEC + "(entropy=1.0, noise=0.0)"), 0.5), batch()
    for u, sign in ((0.0, -1), (0.5, 0), (0.75, 0.5), (1.0, 1)):
        layer.on_step(u)
        _, p = controls(layer.train(), x)
        close(loss(layer, x), sign * -(p * p.log()).sum(-1).mean())


def test_annealing():
    layer, x = layer_of(SPEC + "(noise=0.0)").train(), batch()
    z = x.mean(1) @ layer.gates[0].relevance.weight.T
    for u, heat in ((0.0, 2.0), (0.5, 1.25), (1.0, 0.5)):
        layer.on_step(u)
        close(controls(layer, x)[1], (z / heat).softmax(-1))
    sharp, flat = (twin(layer, f"{SPEC}(cold={cold})") for cold in (1e-6, 1e6))
    close(controls(sharp, x)[1], torch.nn.functional.one_hot(z.argmax(-1), HEADS).double())
    close(controls(flat, x)[1], torch.full((2, HEADS), 1 / HEADS).double(), 1e-5)


def test_noise_is_for_the_beginning_of_training():
    layer, x = layer_of(), batch(size=1).expand(4000, -1, -1)
    layer.on_step(0.25)
    _, p = controls(layer.train(), x)
    log_p = p.log() * (2.0 - 0.25 * 1.5)
    difference = log_p[:, 0] - log_p[:, 1]
    close(difference.std(), torch.tensor(2**0.5 * 0.75).double(), 0.05)
    differ(layer(x[:2]), layer(x[:2]))
    assert torch.equal(layer.eval()(x[:2]), layer(x[:2]))
    layer.on_step(1.0)
    assert torch.equal(layer.train()(x[:2]), layer(x[:2]))


def test_evaluation_does_not_depend_on_the_schedule():
    layer, x = layer_of(), batch()
    want = layer(x)
    layer.on_step(0.3)
    assert torch.equal(layer(x), want)


def test_straight_through():
    layer, x = budget(layer_of(SPEC + "(train=straight)"), 0.4), batch()
    soft = twin(layer, SPEC)
    close(layer.train()(x), layer.eval()(x))
    router = [each.gates[0].relevance.weight for each in (layer, soft)]
    hard, want = (
        torch.autograd.grad(gates(each.train(), x)[:, 1].sum(), weight)[0]
        for each, weight in zip((layer, soft), router, strict=True)
    )
    close(hard, want)
    assert want.any()


def test_every_head_learns_in_training():
    layer, x = budget(layer_of(), 0.2), batch()
    layer.train()(x).pow(2).sum().backward()
    assert (layer.project.o_proj.weight.grad.unflatten(1, (HEADS, -1)).abs().sum((0, 2)) > 0).all()


def test_refusals():
    with pytest.raises(SpecError, match=r"'budgetformer' needs 'bidirectional'.*nearest legal: moh"):
        Attention(SPEC, DIM, HEADS)
    with pytest.raises(SpecError, match="'router'"):
        Attention("gqa + moh + budgetformer", DIM, HEADS, site=BOTH_WAYS)
    with pytest.raises(OptionError, match=r"low=0.9 to high=0.1"):
        Attention(SPEC + "(low=0.9, high=0.1)", DIM, HEADS, site=BOTH_WAYS)
    with pytest.raises(OptionError, match=r"cold=0.0 must be positive"):
        Attention(SPEC + "(cold=0.0)", DIM, HEADS, site=BOTH_WAYS)


def test_cost():
    for dim, heads in ((24, 4), (768, 8)):
        base, cost = (
            Attention(spec, dim, heads, site=BOTH_WAYS).spec.cost(dim, heads, BOTH_WAYS) for spec in ("gqa", SPEC)
        )
        assert cost.parameters - base.parameters == dim * dim // 4 + dim // 4 + dim // 4 + 1 + dim * heads
        assert (cost.cache_floats, cost.state_floats) == (base.cache_floats, 0)
