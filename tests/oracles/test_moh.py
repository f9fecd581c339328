"""Oracles of `moh`."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Attention, Links

WIDTH = 6


def outputs(layer, x):
    """Head outputs of `gqa`, before any gate."""
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    return weights(rope(q), rope(k), WIDTH**-0.5) @ v


def gates(layer, x, mask=None):
    """The gates `[B, T, H]` that a layer used, seen through head outputs of one."""
    seen = []
    original = layer.gates[0].gate

    def spy(o, flow):
        seen.append(original(torch.ones_like(o), flow)[..., 0].transpose(1, 2))
        return original(o, flow)

    layer.gates[0].gate = spy
    layer(x, mask=mask)
    layer.gates[0].gate = original
    return seen[0]


def rewired(layer, **changes):
    return twin(layer, str(layer.spec), **{f"gates__0__{name}__weight": value for name, value in changes.items()})


@pytest.mark.parametrize(("top", "shared"), [(4, 0), (3, 1), (2, 2)])
def test_zero_routers_that_drop_nothing_are_the_base_layer(top, shared):
    layer, x = make(f"gqa + moh(top={top}, shared={shared})"), batch()
    for parameter in layer.gates.parameters():
        parameter.data.zero_()
    close(gates(layer, x), torch.ones(2, 9, HEADS).double())
    close(layer(x), twin(layer, "gqa")(x))


@pytest.mark.parametrize(("top", "shared"), [(1, 2), (2, 2), (2, 1), (1, 3)])
def test_sums_of_gates(top, shared):
    layer, x = make(f"gqa + moh(top={top}, shared={shared})"), batch()
    a = 2 * layer.gates[0].balance(x).softmax(-1)
    g = gates(layer, x)
    close(g[..., :shared].sum(-1), a[..., 0] * shared)
    close(g[..., shared:].sum(-1), a[..., 1] * top)
    close(a.sum(-1), torch.full(a.shape[:2], 2.0).double())
    assert ((g[..., shared:] != 0).sum(-1) == top).all()


def test_written_out():
    layer, x = make("gqa + moh(top=1, shared=2)"), batch()
    router = layer.gates[0]
    pi, a = router.route(x).softmax(-1), 2 * router.balance(x).softmax(-1)
    kept = (pi == pi.amax(-1, keepdim=True)).double()
    g = torch.cat([2 * router.share(x).softmax(-1) * a[..., :1], kept * a[..., 1:]], -1)
    close(gates(layer, x), g)
    close(layer(x), join(outputs(layer, x) * g.transpose(1, 2)[..., None], layer.project.o_proj))


def test_all_heads_routed_is_a_weighted_sum():
    layer, x = make(f"gqa + moh(top={HEADS})"), batch()
    pi = layer.gates[0].route(x).softmax(-1).transpose(1, 2)[..., None]
    close(layer(x), HEADS * join(pi * outputs(layer, x), layer.project.o_proj))


def test_all_heads_shared_has_soft_weights():
    layer, x = make(f"gqa + moh(top=0, shared={HEADS})"), batch()
    assert layer.gates[0].balance is None and layer.gates[0].route is None
    close(gates(layer, x), HEADS * layer.gates[0].share(x).softmax(-1))


def test_one_routed_head_has_gate_one_and_no_gradient_from_the_task():
    layer, x, links = make("gqa + moh(top=1)").train(), batch(), Links()
    g = gates(layer, x)
    assert ((g == 0) | ((g - 1).abs() < 1e-12)).all() and ((g > 0).sum(-1) == 1).all()
    route = layer.gates[0].route.weight
    (task,) = torch.autograd.grad(layer(x, links=links).pow(2).sum(), route, retain_graph=True)
    (balance,) = torch.autograd.grad(links.aux["0.moh"], route)
    assert task.abs().max() < 1e-12 < 1e-6 < balance.abs().max()


def test_gather_equals_mask():
    """Real skipping: each token's chosen heads are gathered, weighed, and go through their own blocks of W_O."""
    layer, x, top = make("gqa + moh(top=2)"), batch(), 2
    pi = layer.gates[0].route(x).softmax(-1)
    chance, chosen = pi.topk(top, -1)
    o = outputs(layer, x).transpose(1, 2).gather(2, chosen[..., None].expand(-1, -1, -1, WIDTH))
    blocks = layer.project.o_proj.weight.unflatten(1, (HEADS, WIDTH)).transpose(0, 1)[chosen]  # [B, T, top, D, d]
    share = top * chance / chance.sum(-1, keepdim=True)
    close(layer(x), (share[..., None] * torch.einsum("btkd,btkDd->btkD", o, blocks)).sum(2))


def balance_loss(layer, x, mask=None):
    links = Links()
    layer.train()(x, links=links, mask=mask)
    return links.aux["0.moh"]


@pytest.mark.parametrize("top", [1, 2, 3])
def test_balance_loss(top):
    """H_r Σ mean(π) mean(m); `top` when routing is uniform, H_r when one head takes all."""
    layer, x = make(f"gqa + moh(top={top})"), batch()
    pi = layer.gates[0].route(x).softmax(-1).flatten(0, 1)
    chosen = torch.zeros_like(pi).scatter(1, pi.topk(top, 1).indices, 1)
    close(balance_loss(layer, x), HEADS * (pi.mean(0) * chosen.mean(0)).sum())
    close(balance_loss(rewired(layer, route=torch.zeros(HEADS, DIM).double()), x), torch.tensor(float(top)).double())
    if top == 1:
        x[..., 0] = 1.0
        one = torch.zeros(HEADS, DIM).double()
        one[2, 0] = 60.0
        close(balance_loss(rewired(layer, route=one), x), torch.tensor(float(HEADS)).double())


def test_balance_loss_leaves_padding_out_and_is_for_training():
    layer, x = make("gqa + moh(top=2)"), batch()
    valid = torch.arange(9)[None] >= torch.tensor([[0], [4]])
    other = torch.where(valid[..., None], x, torch.randn_like(x))
    close(balance_loss(layer, x, valid), balance_loss(layer, other, valid))
    links = Links()
    layer.eval()(x, links=links)
    assert not links.aux


def test_adding_a_constant_to_the_logits_changes_nothing():
    layer, x = make("gqa + moh(top=2, shared=1)"), batch()
    shifted = layer.gates[0].route.weight.detach() + torch.randn(1, DIM).double()
    close(rewired(layer, route=shifted)(x), layer(x))


def test_norm_router_written_out():
    """Hard gates from query norms over their deviation; shared heads are the first ones."""
    layer, x = make("gqa + moh(top=2, shared=1, router=norm)"), batch()
    norms = heads_of(layer.project.q_proj(x), HEADS).norm(dim=-1).transpose(1, 2)[..., 1:]
    chosen = (norms / norms.std(-1, keepdim=True)).softmax(-1).topk(2, -1).indices
    g = torch.zeros_like(norms).scatter(-1, chosen, 1.0)
    close(gates(layer, x), torch.cat([torch.ones(2, 9, 1).double(), g], -1))
    assert not list(layer.gates.parameters())


def test_norm_router_ignores_size_and_rotation():
    layer, x = make("gqa + moh(top=2, router=norm)"), batch()
    scaled = twin(layer, str(layer.spec), project__q_proj__weight=3 * layer.project.q_proj.weight.detach())
    assert torch.equal(gates(scaled, x), gates(layer, x))
    still = twin(layer, "gqa + rope(none) + moh(top=2, router=norm)")
    assert torch.equal(gates(still, x), gates(layer, x))
    rotated = rope(heads_of(layer.project.q_proj(x), HEADS)).norm(dim=-1).transpose(1, 2)
    assert torch.equal(rotated.topk(2, -1).indices.sort(-1)[0], gates(layer, x).topk(2, -1).indices.sort(-1)[0])


def test_norm_router_passes_a_gradient_straight_through():
    layer, x = make("gqa + moh(top=2, router=norm)").train(), batch()
    o, p = outputs(layer, x).detach(), layer.project
    norms = heads_of(p.q_proj(x), HEADS).norm(dim=-1).transpose(1, 2)
    pi = (norms / norms.std(-1, keepdim=True)).softmax(-1)
    (want,) = torch.autograd.grad(join(o * pi.transpose(1, 2)[..., None], p.o_proj).sum(), p.q_proj.weight)
    attends = twin(layer, "gqa + moh(top=2, router=norm)").eval()  # the same hard gates without the soft path
    (both,) = torch.autograd.grad(layer(x).sum(), p.q_proj.weight)
    (hard,) = torch.autograd.grad(attends(x).sum(), attends.project.q_proj.weight)
    close(both - hard, want, 1e-9)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2) + moh(top=1, shared=2)", "gqa + moh(top=2, shared=2, router=norm)"])
def test_decode(spec):
    layer, x = make(spec), batch()
    close(decoded(layer, x), layer(x))


def test_cost_and_lone_heads():
    """D (H_r + h_s + 2) weights; a router over one head has nothing to choose."""
    base = make("gqa").spec.cost(DIM, HEADS)
    for spec, outputs_ in (("top=1, shared=2", 2 + 2 + 2), ("top=2", 4), ("top=0, shared=4", 4), ("top=2, shared=1", 5),
                           ("top=1, shared=3", 3 + 2), ("top=2, router=norm", 0)):  # fmt: skip
        cost = Attention(f"gqa + moh({spec})", DIM, HEADS).spec.cost(DIM, HEADS)
        assert cost.parameters - base.parameters == DIM * outputs_, spec
        assert cost.cache_floats == base.cache_floats


def test_routing_matters():
    layer, x = make("gqa + moh(top=1)"), batch()
    differ(layer(x), twin(layer, "gqa")(x))


def test_norm_router_of_equal_queries_is_a_tie():
    """Repeated query heads have no spread; the gate and its gradient stay finite."""
    layer, x = make("sqa(kind=rsqa) + moh(router=norm)").train(), batch().requires_grad_()
    y = layer(x)
    y.pow(2).sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
