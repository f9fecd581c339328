"""Oracles of `moe`; those of routers and dispatch are in `tests/core`."""

import math

import pytest
import torch
from tests.oracles.reference import close, differ

from manyheads import Links, Site
from manyheads.core.feed import Feed, feed_flow
from manyheads.testing import FeedCase
from manyheads.testing.feeds import run

DIM = 24


def make(line, **options):
    case = FeedCase(line, **options)
    return case.module(), case.x


def dense(module, x, top, renorm):
    """Every expert on every token, with zero gates for those that are not chosen."""
    chance = module.router.score(x).softmax(-1)
    gates = chance * torch.zeros_like(chance).scatter(-1, chance.topk(top, -1).indices, 1.0)
    if renorm:
        gates = gates / gates.sum(-1, keepdim=True)
    each = torch.stack([module.experts.alone(x, expert) for expert in range(module.experts.count)], -2)
    y = (gates[..., None] * each).sum(-2)
    return y if module.shared is None else y + module.shared.alone(x)


@pytest.mark.parametrize(
    ("line", "top", "renorm"),
    [
        ("moe(experts=6, top=1, hidden=8)", 1, False),  # Switch
        ("moe(experts=6, top=2, hidden=8)", 2, True),  # GShard
        ("moe(experts=6, top=2, hidden=8, renorm=none)", 2, False),
        ("moe(experts=6, top=3, hidden=8, shared=2, act=gelu, bias=true)", 3, True),
        ("moe(experts=4, top=4, hidden=8)", 4, True),
    ],
)
def test_a_mixture_is_a_dense_loop_over_experts(line, top, renorm):
    module, x = make(line)
    close(run(module, x), dense(module, x, top, renorm))


def test_experts_alike_make_the_router_irrelevant():
    module, x = make("moe(experts=5, top=2, hidden=8)")
    with torch.no_grad():
        for weight in module.experts.weights:
            weight.copy_(weight[:1].expand_as(weight))
    close(run(module, x), module.experts.alone(x))


def test_permuting_experts():
    module, x = make("moe(experts=5, top=2, hidden=8)")
    want, order = run(module, x), torch.randperm(5)
    with torch.no_grad():
        for weight in (*module.experts.weights, module.router.score.weight):
            weight.copy_(weight[order])
    close(run(module, x), want)


def test_loss():
    """1 + z (ln E)² where all experts are alike; E where one takes every token."""
    module, x = make("moe(experts=4, top=1, hidden=8, z=0.1)")
    links = Links()
    with torch.no_grad():
        module.router.score.weight.zero_()
    module.train()(x, feed_flow(x, links=links, layer=2, training=True))
    close(links.aux["2.moe"], torch.tensor(1 + 0.1 * math.log(4) ** 2, dtype=torch.float64))
    module, x = make("moe(experts=4, top=1, hidden=8)")
    with torch.no_grad():
        module.router.score.weight.zero_()
        module.router.score.weight[2, 0] = 80
    x[..., 0] = 1
    module.train()(x, feed_flow(x, links=links, training=True))
    close(links.aux["0.moe"], torch.tensor(4.0).double())


def test_capacity():
    """In training only, and a token passed over by all its experts gets nothing; padding takes no room."""
    module, x = make("moe(experts=4, top=1, hidden=8, capacity=1.0)")
    valid = torch.arange(11)[None] >= torch.tensor([[0], [4], [2]])
    with torch.no_grad():
        module.router.score.weight.zero_()
        module.router.score.weight[2, 0] = 80
    x[..., 0] = 1
    whole, y = run(module, x, valid), run(module.train(), x, valid)
    for row, first in enumerate((0, 4, 2)):
        room = -(-(11 - first) // 4)
        close(y[row, first : first + room], whole[row, first : first + room])
        assert not y[row, first + room :].any() and whole[row, first + room :].any()


def test_an_expert_sees_its_tokens_only():
    """A token's gradient reaches none of the experts that it did not choose."""
    module, x = make("moe(experts=6, top=2, hidden=8)")
    chosen = module.router(x[:1, :1]).chosen.flatten().tolist()
    run(module, x[:1, :1]).sum().backward()
    grad = module.experts.down_proj.grad
    assert [e for e in range(6) if grad[e].any()] == sorted(chosen)


def test_noise_and_sampling_are_for_training():
    module, x = make("moe(experts=6, top=3, hidden=8, noisy=true, sample=1)")
    close(run(module, x), dense(module, x, 3, True))
    differ(run(module.train(), x), run(module, x))


def test_cost():
    """Mixtral's feed-forward: 8 experts of 14336, two of them a token."""
    cost = Feed.parse("moe").cost(4096, 14336, Site())
    assert cost.parameters == 8 * 3 * 4096 * 14336 + 8 * 4096
    assert cost.active == 2 * 3 * 4096 * 14336 + 8 * 4096
    assert cost.token_flops == 2 * cost.active
