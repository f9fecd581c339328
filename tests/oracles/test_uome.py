"""Oracles of `uome`."""

import pytest
import torch
from tests.oracles.reference import close, differ
from torch import nn

from manyheads import Links, OptionError, Site
from manyheads.core.feed import feed_flow
from manyheads.experts.gelu import MLP
from manyheads.experts.swiglu import SwiGLU
from manyheads.experts.uome import UoME
from manyheads.testing import FeedCase
from manyheads.testing.feeds import run

DIM, HIDDEN = 24, 16


def dense(kind):
    torch.manual_seed(0)
    module = kind(DIM, HIDDEN).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def x(tokens=9):
    return torch.randn(2, tokens, DIM, dtype=torch.float64)


@pytest.mark.parametrize("gate", ["sum", "straight", "none"])
@pytest.mark.parametrize("experts", [1, 8])
@pytest.mark.parametrize("kind", [SwiGLU, MLP])
def test_all_experts_are_the_dense_feed_forward(kind, experts, gate):
    """Whatever the router says; with biases too, whose shares add up. (`straight` adds a gradient of its own.)"""
    module, rows = dense(kind), x().requires_grad_()
    piece = UoME(experts=experts, top=experts, gate=gate).split(module)
    nn.init.normal_(piece.router.score.weight)
    got, want = run(piece, rows), module(rows)
    close(got, want)
    if gate != "straight":
        close(*(torch.autograd.grad(y.pow(2).sum(), rows)[0] for y in (got, want)))


def test_experts_are_cuts_of_the_hidden_channels():
    module = dense(MLP)
    piece = UoME(experts=4, top=2).split(module)
    rows = x()
    hidden = torch.nn.functional.gelu(module.up_proj(rows))
    for expert, cut in enumerate(torch.arange(HIDDEN).chunk(4)):
        want = hidden[..., cut] @ module.down_proj.weight[:, cut].T + module.down_proj.bias / 4
        close(piece.experts.alone(rows, expert), want)


@pytest.mark.parametrize(("gate", "factor"), [("sum", True), ("straight", False), ("none", False)])
def test_a_token_gets_the_sum_of_its_experts(gate, factor):
    piece, rows = UoME(experts=4, top=2, gate=gate).split(dense(SwiGLU)), x()
    nn.init.normal_(piece.router.score.weight)
    chance = piece.router.score(rows).softmax(-1)
    kept = chance.topk(2, -1)
    each = torch.stack([piece.experts.alone(rows, expert) for expert in range(4)], -2)
    want = each.take_along_dim(kept.indices[..., None], -2).sum(-2)
    close(run(piece, rows), want * kept.values.sum(-1, keepdim=True) if factor else want)


def test_what_trains_the_router():
    for gate in ("sum", "straight", "none"):
        piece = UoME(experts=4, top=2, gate=gate).split(dense(SwiGLU))
        run(piece, x()).pow(2).sum().backward()
        grad = piece.router.score.weight.grad
        assert (grad is None or not grad.any()) if gate == "none" else grad.any()


def test_straight_gates_have_the_gradient_of_weighing_by_chance():
    piece, rows = UoME(experts=4, top=2, gate="straight").split(dense(SwiGLU)), x()
    nn.init.normal_(piece.router.score.weight)
    (got,) = torch.autograd.grad(run(piece, rows).sum(), piece.router.score.weight)
    routing = piece.router(rows)
    each = torch.stack([piece.experts.alone(rows, expert) for expert in range(4)], -2).detach()
    weighed = routing.gates()[..., None] * each.take_along_dim(routing.chosen[..., None], -2)
    (want,) = torch.autograd.grad(weighed.sum(), piece.router.score.weight)
    close(got, want)


def test_a_token_without_a_kept_expert_gets_its_residual():
    piece, rows = UoME(experts=4, top=2).split(dense(SwiGLU)), x()
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, 3] = False
    y = run(piece, rows, valid)
    assert not y[0, 3].any() and y[valid].any(-1).all()


def test_no_sequence_and_no_later_token_matters():
    case = FeedCase("uome(experts=4, top=2, hidden=16)")
    piece, rows = case.module(), case.x
    y, other = run(piece, rows), rows.clone()
    other[1:] = torch.randn_like(other[1:])
    close(run(piece, other)[0], y[0])
    other = torch.cat([rows[:, :5], torch.randn_like(rows[:, 5:])], 1)
    close(run(piece, other)[:, :5], y[:, :5])
    differ(run(piece, other)[:, 5:], y[:, 5:])


def test_loss_on_demand():
    for balance in (False, True):
        links, rows = Links(), x()
        UoME(experts=4, balance=balance).split(dense(SwiGLU)).train()(rows, feed_flow(rows, links=links, training=True))
        assert list(links.aux) == ["0.uome"] * balance


def test_cost():
    """The dense feed-forward and a router; FLOPs of the active cuts."""
    cost = UoME(experts=8, top=2, act="gelu", bias=True).cost(DIM, HIDDEN, Site())
    assert cost.parameters == 2 * DIM * HIDDEN + HIDDEN + 8 * DIM + 8 * (DIM + 1)
    assert cost.token_flops == 4 * DIM * HIDDEN // 4 + 2 * 8 * DIM
    assert UoME(experts=8).active == 4


def test_refusals():
    with pytest.raises(OptionError, match="uome: 20 channels do not cut into experts=8; hidden=16 does"):
        UoME().check(DIM, 20, Site())
    with pytest.raises(OptionError, match="16 channels do not cut into experts=3"):
        UoME(experts=3).split(dense(SwiGLU))
