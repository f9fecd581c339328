"""What `mae` is held to: its equations, its ends, its costs, its refusals."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin

from manyheads import Attention, Cache, Links, OptionError, Site, SpecError
from manyheads.attention.gate.mae import turn

BOTH_WAYS = Site(causal=False)
SPEC = "gqa + mae(width=8)"
SITES = {"causal": Site(), "bidirectional": BOTH_WAYS}


def shares(layer, x, links=None, **arguments):
    """Responsibilities `[B, 1 or T, H]` that a layer used."""
    seen, original = [], layer.gates[0].shares
    layer.gates[0].shares = lambda flow: seen.append(original(flow)) or seen[0]
    layer(x, links=links, **arguments)
    layer.gates[0].shares = original
    return seen[0]


def with_heads(layer, weights):
    """The plain layer's output with its head outputs times `weights` `[H]`, through W_O."""
    wide = layer.project.o_proj.weight.unflatten(1, (HEADS, -1)) * weights[:, None]
    return twin(layer, "gqa", project__o_proj__weight=wide.flatten(1).detach())


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_starts_as_the_base_layer(site):
    fresh = Attention(SPEC, DIM, HEADS, site=site).double()
    layer, x = make("gqa", site=site), batch()
    fresh.load_state_dict(fresh.state_dict() | layer.state_dict())
    close(fresh(x), layer(x))


def test_sum_over_experts_is_the_closed_form():
    """An expert is the layer without one head, rescaled; their mixture by g is the layer."""
    layer, x = make(SPEC, site=BOTH_WAYS), batch()
    g, want = shares(layer, x), 0
    for expert in range(HEADS):
        others = torch.ones(HEADS).double()
        others[expert] = 0
        want = want + g[..., expert : expert + 1] * with_heads(layer, others * HEADS / (HEADS - 1))(x)
    close(layer(x), want)


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
def test_weights_sum_to_the_heads(site):
    layer, x = make(SPEC, site=site), batch()
    w = layer.gates[0].gate(torch.ones(2, HEADS, 9, 1).double(), flow_of(layer, x))[..., 0]
    close(w.sum(1), torch.full_like(w[:, 0], HEADS))
    assert (w >= 0).all() and (w <= HEADS / (HEADS - 1)).all()
    close(w, (HEADS / (HEADS - 1) * (1 - shares(layer, x))).transpose(1, 2).expand_as(w))


def flow_of(layer, x):
    return layer._flow(x, None, None, None, None, None)


def test_gate_written_out():
    layer, x = make(SPEC), batch()
    mean = x.cumsum(1) / torch.arange(1, 10)[:, None]
    gate = layer.gates[0]
    g = (torch.tanh(mean @ gate.inner.weight.T) @ gate.outer.weight.T).softmax(-1)
    close(shares(layer, x), g)


def test_one_sure_expert_is_head_dropout():
    layer, x = make(SPEC.replace("8", "1"), site=BOTH_WAYS), batch()
    sure = torch.zeros(HEADS, 1).double()
    sure[2] = 1e4 / torch.tanh(x.mean(1) @ layer.gates[0].inner.weight.T)[0, 0].detach()
    layer = twin(layer, SPEC.replace("8", "1"), gates__0__outer__weight=sure)
    g = shares(layer, x[:1])
    close(g, torch.tensor([[[0.0, 0, 1, 0]]]).double())
    kept = torch.tensor([1.0, 1, 0, 1]).double() * HEADS / (HEADS - 1)
    close(layer(x[:1]), with_heads(layer, kept)(x[:1]))
    best = twin(layer, "gqa + mae(width=1, best=true)")
    close(best(x[:1]), layer(x[:1]))


def test_best_takes_the_likeliest_expert():
    layer, x = make(SPEC), batch()
    best = twin(layer, "gqa + mae(width=8, best=true)")
    assert torch.equal(shares(best, x).argmax(-1), shares(layer, x).argmax(-1))
    assert ((shares(best, x) == 0) | (shares(best, x) == 1)).all()
    differ(best(x), layer(x))


def test_drawn_experts_average_to_the_mixture(monkeypatch):
    layer, x, draws = make(SPEC, site=BOTH_WAYS), batch(size=1), 4000
    places = (torch.arange(draws) + 0.5).double() / draws
    monkeypatch.setattr(torch, "rand", lambda *shape, **kind: places.view(shape))
    drawn = layer(x.expand(draws, -1, -1), links=Links(memo={"mae": "experts"}))
    assert len(drawn[:, 0].detach().round(decimals=9).unique(dim=0)) == HEADS
    close(drawn.mean(0, keepdim=True), layer(x), 5e-3)


def test_draws_follow_g_and_fall_anew():
    layer, x = make(SPEC, site=BOTH_WAYS), batch(size=1)
    g = shares(layer, x)[0, 0]
    picks = torch.stack([shares(layer, x, links=Links(memo={"mae": "experts"}))[0, 0] for _ in range(600)])
    assert (picks.sum(-1) == 1).all()
    assert (picks.mean(0) - g).abs().max() < 0.08


def test_two_heads_and_one():
    layer, x = make("gqa + mae(width=8)", heads=2, site=BOTH_WAYS), batch()
    g = shares(layer, x)
    w = layer.gates[0].gate(torch.ones(2, 2, 9, 1).double(), flow_of(layer, x))[..., 0]
    close(w, 2 * g.flip(-1).transpose(1, 2).expand_as(w))
    with pytest.raises(OptionError, match="mae: 1 head leaves no expert"):
        Attention("gqa + mae", DIM, 1)
    with pytest.raises(OptionError, match="width=0"):
        Attention("gqa + mae(width=0)", DIM, HEADS)
    with pytest.raises(SpecError, match="'router'"):
        Attention("gqa + moh(top=2) + mae", DIM, HEADS)


@pytest.mark.parametrize("whose", ["experts", "gates"])
def test_only_those_whose_turn_it_is_get_gradients(whose):
    layer, x = make(SPEC), batch()
    layer.project.q_proj.weight.requires_grad_(False)  # frozen by the user: stays so
    with turn(layer, whose) as links:
        layer(x, links=links).pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        mine = name.startswith("gates") == (whose == "gates") and parameter is not layer.project.q_proj.weight
        assert (parameter.grad is not None and parameter.grad.abs().sum() > 0) == mine, name
        assert parameter.requires_grad == (parameter is not layer.project.q_proj.weight)


def test_gate_ignores_token_order_and_padding():
    layer, x = make(SPEC, site=BOTH_WAYS), batch()
    g = shares(layer, x)
    close(shares(layer, x[:, torch.randperm(9)]), g)
    padded, valid = torch.cat([torch.randn(2, 3, DIM).double(), x], 1), torch.arange(12)[None].expand(2, -1) >= 3
    close(shares(layer, padded, mask=valid), g)


def test_causal_gate_is_the_whole_one_at_the_end():
    layer, x = make(SPEC), batch()
    whole = shares(twin_at(layer, BOTH_WAYS), x)
    close(shares(layer, x)[:, -1:], whole)
    differ(shares(layer, x)[:, :1], whole)


def twin_at(layer, site):
    other = make(str(layer.spec), site=site)
    other.load_state_dict(layer.state_dict())
    return other


def test_cross_attention_pools_the_context():
    layer, x = make("gqa + mae(width=8)", site=Site(causal=False, cross=True, context_dim=20)), batch()
    context = torch.randn(2, 5, 20).double()
    close(shares(layer, x, context=context), shares(layer, x[:, :2], context=context.flip(1)))
    kept = torch.tensor([True, True, False, True, False])
    hidden = kept[None, None, None].expand(2, 1, 9, 5)
    close(shares(layer, x, context=context, mask=hidden)[:, :1], shares(layer, x[:, :1], context=context[:, kept]))


def test_decode_and_cost():
    layer, x, cache = make(SPEC), batch(), Cache()
    close(decoded(layer, x, cache=cache), layer(x))
    base, cost = make("gqa").spec.cost(DIM, HEADS), layer.spec.cost(DIM, HEADS)
    assert cost.parameters - base.parameters == DIM * 8 + 8 * HEADS
    assert cost.cache_floats == base.cache_floats == 2 * DIM
    assert cost.state_floats == DIM + 2  # a sum, a count, a document
    assert cache.bytes() == 2 * cost.cache_bytes(9, 8)
    with pytest.raises(ValueError, match=r"'mae' keeps no history"):
        cache.rollback(1)
    assert Attention("gqa + mae", 512, 8).spec.cost(512, 8).parameters - 4 * 512**2 == 512 * 256 + 256 * 8
