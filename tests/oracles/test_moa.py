"""Oracles of `moa`; those of its router alone are in `tests/core/test_router.py`."""

import math

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, rope, twin
from tests.oracles.reference import weights as softmax
from torch.utils.flop_counter import FlopCounterMode

from manyheads import Attention, Cache, Links, OptionError, SpecError
from manyheads.core import dispatch
from manyheads.core.kernel import using

WIDTH, TOKENS = 6, 9


def dense(layer, x, renorm="detach"):
    """Every expert on every token, with zero gates for those that are not chosen."""
    p = layer.project
    chance = p.router.score(x).softmax(-1)
    kept = chance * torch.zeros_like(chance).scatter(-1, chance.topk(p.top, -1).indices, 1.0)
    gates = kept / kept.sum(-1, keepdim=True) if renorm == "detach" else kept
    k, v = rope(p.k_proj(x)[:, None]), p.v_proj(x)[:, None]
    q = rope(torch.einsum("btD,eDd->betd", x, p.q_experts))
    o = softmax(q, k, q.shape[-1] ** -0.5) @ v
    return torch.einsum("bte,betd,edD->btD", gates, o, p.o_experts)


@pytest.mark.parametrize("renorm", ["detach", "none"])
@pytest.mark.parametrize("options", ["top=2", "top=4, head_dim=8", "top=1", "top=3"])
def test_dispatch_equals_a_dense_loop_over_experts(options, renorm):
    layer, x = make(f"moa({options}, renorm={renorm})"), batch()
    close(layer(x), dense(layer, x, renorm))
    with using("sdpa"):
        close(layer(x), dense(layer, x, renorm))


@pytest.mark.parametrize("renorm", ["detach", "none"])
def test_all_experts_alike_are_the_mean_of_multi_query_heads(renorm):
    layer, x = make(f"moa(renorm={renorm})"), batch()
    p, zero = layer.project, torch.zeros(HEADS, DIM).double()
    layer = twin(layer, str(layer.spec), project__router__score__weight=zero)
    mqa = twin(
        layer, "gqa(kv_heads=1)",
        project__q_proj__weight=p.q_experts.detach().transpose(1, 2).flatten(0, 1),
        project__o_proj__weight=p.o_experts.detach().flatten(0, 1).T,
    )  # fmt: skip
    close(layer(x), mqa(x) / HEADS)


def router_gradient(layer, x):
    return torch.autograd.grad(layer(x).pow(2).sum(), layer.project.router.score.weight)[0]


def test_one_expert_has_weight_one_and_still_trains_the_router():
    layer, x = make("moa(top=1)"), batch()
    routing = layer.project.router(x)
    close(routing.gates("detach"), torch.ones(2, TOKENS, 1).double())
    assert router_gradient(layer, x).abs().max() > 1e-3
    layer.project.renorm = "full"
    assert router_gradient(layer, x).abs().max() < 1e-12


def test_permuting_experts():
    layer, x, order = make("moa(top=2)"), batch(), torch.randperm(HEADS)
    p = layer.project
    changes = {"q_experts": p.q_experts, "o_experts": p.o_experts, "router__score__weight": p.router.score.weight}
    moved = {f"project__{name}": value.detach()[order] for name, value in changes.items()}
    close(twin(layer, str(layer.spec), **moved)(x), layer(x))


def test_the_order_of_slots_is_irrelevant(monkeypatch):
    layer, x = make("moa(top=3) + qk-norm + head_norm"), batch()
    want, forward = layer(x), type(layer.project.router).forward

    def shuffled(self, x):
        routing = forward(self, x)
        order = torch.rand(routing.chosen.shape).argsort(-1)
        return routing._replace(chosen=routing.chosen.gather(-1, order))

    monkeypatch.setattr(type(layer.project.router), "forward", shuffled)
    close(layer(x), want)


def loss(layer, x, mask=None):
    links = Links()
    layer.train()(x, links=links, mask=mask)
    return links.aux["0.moa"]


def test_auxiliary_loss():
    """switch + z/10: 1 + (ln H)²/10 where all experts are alike, and H + … where one takes every token."""
    layer, x = make("moa(top=1)"), batch()
    zero = twin(layer, str(layer.spec), project__router__score__weight=torch.zeros(HEADS, DIM).double())
    close(loss(zero, x), torch.tensor(1 + math.log(HEADS) ** 2 / 10, dtype=torch.float64))
    one = torch.zeros(HEADS, DIM).double()
    one[2, 0], x[..., 0] = 60.0, 1.0
    one = twin(layer, str(layer.spec), project__router__score__weight=one)
    close(loss(one, x), torch.tensor(HEADS + 60.0**2 / 10).double())
    links = Links()
    layer.eval()(x, links=links)
    assert not links.aux


def test_padding_sends_no_load_and_gets_nothing():
    layer, x = make("moa(top=2)"), batch()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    other = torch.where(valid[..., None], x, torch.randn_like(x))
    close(loss(layer, x, valid), loss(layer, other, valid))
    assert (layer(x, mask=valid)[~valid] == 0).all()


@pytest.mark.parametrize("options", ["top=2", "top=4, renorm=none"])
def test_decode(options):
    layer, x = make(f"moa({options})"), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


def test_noise_and_sampling_reach_the_router():
    layer, x = make("moa(top=2, noisy=true, sample=1)"), batch()
    want = layer(x)
    close(want, dense(layer, x))
    differ(layer.train()(x), want)


def test_first_weights():
    layer = Attention("moa(head_dim=32)", 64, 8)
    bound = (6 / (64 + 32)) ** 0.5
    for weight in (layer.project.q_experts, layer.project.o_experts):
        assert 0.95 * bound < weight.abs().max() <= bound
    assert 0.9 * bound < layer.project.k_proj.weight.abs().max() * 2**0.5 <= bound
    assert not layer.project.router.score.weight.any()


def test_cost():
    """The authors' base size, 8 experts of width 128 at D 512; with more experts only the router costs more."""
    few, many = (Attention(f"moa(top=4, head_dim=128, noisy={noisy})", 512, heads).spec.cost(512, heads)
                 for heads, noisy in ((8, "false"), (32, "true")))  # fmt: skip
    assert few.parameters == 2 * 8 * 512 * 128 + 2 * 512 * 128 + 512 * 8
    assert few.cache_floats == many.cache_floats == 2 * 128
    assert few.token_flops == 2 * (2 * 4 * 512 * 128 + 2 * 512 * 128 + 512 * 8)
    assert many.token_flops - few.token_flops == 2 * 512 * (2 * 32 - 8)
    assert few.pair_flops == many.pair_flops == 4 * 4 * 128


def test_cache_bytes():
    layer, cache = make("moa(top=2)"), Cache()
    decoded(layer, batch(size=1), 4, cache)
    assert cache.bytes() == TOKENS * 2 * WIDTH * 8


@pytest.mark.parametrize(
    ("options", "dim", "words"),
    [
        ("top=5", DIM, ["top=5 of 4 heads", "1 to 4"]),
        ("top=0", DIM, ["top=0"]),
        ("top=2, sample=3", DIM, ["sample=3 of top=2", "0 to 2"]),
        ("head_dim=0", DIM, ["head_dim=0"]),
        ("top=2", 26, ["dim=26 is no multiple of heads=4", "head_dim"]),
    ],
)
def test_refusals(options, dim, words):
    with pytest.raises(OptionError) as error:
        Attention(f"moa({options})", dim, HEADS)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("moh(top=2)", ["'moa' and 'moh' both take the slot 'router'"]),
        ("talking_heads", ["'talking_heads' breaks 'one map'", "'moa' relies on"]),
        ("gda", ["'differential' breaks 'one map'"]),
        ("alibi", ["'alibi' breaks 'alike heads'"]),
        ("window([2, 3, 9, 4])", ["'window' breaks 'alike heads'"]),
    ],
)
def test_what_does_not_go_together(other, words):
    """Behind the router slot j is another head for every token."""
    with pytest.raises(SpecError) as error:
        Attention(f"moa(top=2) + {other}", DIM, HEADS)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_no_expert_works_for_others():
    """The FLOPs of projections are those of the chosen heads."""
    layer, x = make("moa(top=2)"), batch(size=1)
    p = layer.project
    with FlopCounterMode(display=False) as counter, dispatch.using(dispatch.Sorted), using("tiled"):
        layer(x)
    pair = layer.spec.cost(DIM, HEADS).pair_flops * TOKENS**2
    work = TOKENS * layer.spec.cost(DIM, HEADS).token_flops
    assert len(p.q_experts) == HEADS and counter.get_total_flops() == work + pair
