"""Routers: choices, gates, losses, capacity."""

import math

import pytest
import torch

from manyheads import Links, OptionError
from manyheads.core.feed import feed_flow
from manyheads.core.router import Chooser, Router, first_come, route

VALID = torch.ones(1, 10, dtype=torch.bool)


def routing(top=2, experts=5, **options):
    return route(torch.randn(3, 10, experts, dtype=torch.float64), top, **options)


def test_gates():
    """none: they sum to the kept chance; detach and full: to one."""
    routed = routing()
    best = routed.chance.topk(2, -1).values
    assert torch.equal(routed.gates(), best)
    for renorm in ("detach", "full"):
        torch.testing.assert_close(routed.gates(renorm), best / best.sum(-1, keepdim=True))
    dense = routed.spread(routed.gates())
    assert torch.equal(dense.sum(-1), best.sum(-1)) and ((dense > 0).sum(-1) == 2).all()


@pytest.mark.parametrize("renorm", ["none", "detach", "full"])
def test_a_lone_gate_trains_the_router_unless_its_sum_is_trained_too(renorm):
    logits = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    routed = route(logits, 1)
    (gradient,) = torch.autograd.grad(routed.gates(renorm).sum(), logits)
    (chance,) = torch.autograd.grad(logits.log_softmax(-1).amax(-1).sum(), logits)  # of p/p is that of log p
    if renorm == "full":
        assert gradient.abs().max() < 1e-12
    elif renorm == "detach":
        torch.testing.assert_close(gradient, chance)
    else:
        assert gradient.abs().max() > 1e-3


def test_losses_at_their_ends():
    even, experts = route(torch.zeros(1, 10, 5), 2), 5
    assert math.isclose(even.balance(VALID), 2, rel_tol=1e-6)
    assert math.isclose(even.size(VALID), math.log(experts) ** 2, rel_tol=1e-6)
    assert math.isclose(routing(top=5).balance(VALID), 5, rel_tol=1e-6)  # everyone is always chosen
    one = torch.zeros(1, 10, experts)
    one[..., 3] = 60.0
    assert math.isclose(route(one, 1).balance(VALID), experts, rel_tol=1e-6)


def test_losses_by_hand_and_without_padding():
    routed, valid = routing(), torch.rand(3, 10) < 0.6
    chance, load, squares = torch.zeros(5).double(), torch.zeros(5).double(), []
    for b, t in valid.nonzero().tolist():
        chance += routed.chance[b, t]
        load += torch.bincount(routed.chosen[b, t], minlength=5)
        squares.append(routed.logits[b, t].logsumexp(-1) ** 2)
    switch = 5 * (chance / chance.sum() * load / load.sum()).sum()
    torch.testing.assert_close(routed.balance(valid) / 2, switch)
    torch.testing.assert_close(routed.size(valid), torch.stack(squares).mean())


def test_sampling_keeps_the_best_and_draws_the_others_by_chance():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -40.0]).expand(1, 4000, 5)
    chosen = route(logits, 3, sample=2).chosen[0]
    assert (chosen[:, 0] == 0).all()
    drawn = torch.bincount(chosen[:, 1], minlength=5) / 4000
    torch.testing.assert_close(drawn[1:4], logits[0, 0, 1:4].softmax(-1), atol=0.03, rtol=0)
    assert (chosen.sort(-1)[0].diff(dim=-1) > 0).all() and drawn[0] == 0
    certain = route(torch.tensor([[[300.0, 0.0, 0.0]]]), 2, sample=1).chosen  # no chance is left to the others
    assert certain[0, 0, 0] == 0 and certain[0, 0, 1] != 0


def test_noise_and_sampling_are_for_training():
    router, x = Router(6, 5, 2, noisy=True, sample=1), torch.randn(1, 50, 6)
    torch.nn.init.normal_(router.score.weight)
    assert not torch.equal(router(x).logits, router(x).logits)
    router.eval()
    assert torch.equal(router(x).logits, router.score(x))
    assert torch.equal(router(x).chosen, router.score(x).topk(2, -1).indices)


def test_noise_has_its_learned_size():
    router, x = Router(6, 4, 2, noisy=True), torch.randn(1, 1, 6).expand(1, 4000, 6)
    noise = router(x).logits - router.score(x)
    size = torch.nn.functional.softplus(router.noise(x[0, 0])) + 0.01
    torch.testing.assert_close(noise[0].std(0), size, atol=0, rtol=0.1)


def test_first_scores():
    """All experts alike where all are on; else small differences, lest every token go to the same ones."""
    assert not Router(64, 8, 8).score.weight.any()
    assert abs(Router(64, 8, 2).score.weight.std() - 0.01) < 0.001


def test_more_choices_than_experts():
    with pytest.raises(OptionError, match="top=4 of experts=3; top may be 1 to 3"):
        Router(6, 3, 4)


def test_balance_within_sequences():
    """The mean over sequences that have tokens of each one's own loss, whatever its length."""
    routed, valid = routing(), torch.rand(3, 10) < 0.6
    each = [routed.__class__(*(part[b : b + 1] for part in routed)).balance(valid[b : b + 1]) for b in range(3)]
    torch.testing.assert_close(routed.balance(valid, per_sequence=True), torch.stack(each).mean())
    valid[1] = False
    torch.testing.assert_close(routed.balance(valid, per_sequence=True), (each[0] + each[2]) / 2)


def test_padding_alone_has_no_loss():
    routed, nothing = routing(), torch.zeros(3, 10, dtype=torch.bool)
    assert not routed.balance(nothing) and not routed.balance(nothing, per_sequence=True) and not routed.size(nothing)


def test_chances_are_single_precision_at_least():
    assert route(torch.randn(1, 4, 5, dtype=torch.bfloat16), 2).gates().dtype == torch.float32


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25, 1.7])
def test_an_expert_takes_those_who_come_first(capacity):
    """By hand: tokens in order, the best choice of each first, padding not counted."""
    chosen, valid = routing().chosen, torch.rand(3, 10) < 0.7
    kept = first_come(chosen, valid, capacity, 5)
    for b in range(3):
        room = [math.ceil(capacity * 2 * int(valid[b].sum()) / 5)] * 5
        for t in range(10):
            for j, expert in enumerate(chosen[b, t].tolist()):
                takes = bool(valid[b, t]) and room[expert] > 0
                room[expert] -= takes
                assert kept[b, t, j] == takes


def test_a_choice():
    """Padding goes nowhere; losses are noted in training only, and capacity binds there only."""
    x, valid = torch.randn(2, 6, 8), torch.arange(6)[None] >= torch.tensor([[0], [2]])
    for train in (False, True):
        chooser, links = Chooser(8, 4, 2, renorm="full", capacity=0.5, z=0.1).train(train), Links()
        choice = chooser.choose(x, valid, feed_flow(x, links=links, layer=3, training=train), "it")
        assert choice.kept is not None and not choice.kept[1, :2].any()
        assert choice.kept[valid].all() != train
        assert list(links.aux) == ["3.it"] * train
        torch.testing.assert_close(choice.gates.sum(-1), torch.ones(2, 6))
    assert Chooser(8, 4, 2).choose(x, None, feed_flow(x), "it").kept is None
