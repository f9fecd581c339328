"""Competing heads find environments; the penalty and the risk over them."""

import math

import pytest
import torch
import torch.nn.functional as F

from manyheads.multi.environments import diversity, explained, independence, invariance, irm_penalty, risk

D = torch.float64


def losses(samples=7, heads=3, seed=0):
    return torch.rand(samples, heads, dtype=D, generator=torch.Generator().manual_seed(seed))


def test_shares_sum_to_one_and_harden():
    torch.testing.assert_close(explained(losses()).sum(-1), torch.ones(7, dtype=D))
    assert torch.equal(explained(losses(), 1e-6).argmax(-1), losses().argmin(-1))
    torch.testing.assert_close(explained(losses(), 1e-6).amax(-1), torch.ones(7, dtype=D))
    torch.testing.assert_close(explained(losses(), 1e9), torch.full((7, 3), 1 / 3, dtype=D))


def test_one_head_explains_everything():
    p, labels = explained(losses(heads=1)), torch.tensor([0, 0, 0, 1, 1, 0, 0])
    assert diversity(p) == 0 and invariance(p, losses()[:, 0]) == 0
    share = labels.double().mean()
    kl = share * (2 * share).log() + (1 - share) * (2 * (1 - share)).log()
    torch.testing.assert_close(independence(p, labels, 2), kl)


def test_rare_heads_weigh_more_up_to_a_bound():
    p = torch.tensor([[0.9, 0.1]] * 5 + [[0.2, 0.8]], dtype=D)
    nine, eight = -math.log(0.9), -math.log(0.8)
    torch.testing.assert_close(diversity(p, 1.0), torch.tensor((5 * nine + eight) / 6, dtype=D))
    torch.testing.assert_close(diversity(p, 2.0), torch.tensor((5 * nine + 2 * eight) / 7, dtype=D))
    torch.testing.assert_close(diversity(p, 9.0), torch.tensor((5 * nine + 5 * eight) / 10, dtype=D))
    torch.testing.assert_close(diversity(p[[0, 5]], 9.0), diversity(p[[0, 5]], 1.0))


def test_balance_of_classes_and_equal_losses_cost_nothing():
    p = explained(losses(4)).repeat(2, 1)
    assert abs(independence(p, torch.tensor([0] * 4 + [1] * 4), 2)) < 1e-12
    assert independence(explained(losses(8)), torch.tensor([0] * 4 + [1] * 4), 2) > 0
    assert abs(invariance(p, torch.full((8,), 3.0, dtype=D))) < 1e-12
    own = losses()[:, 0].requires_grad_()
    p = explained(losses()).requires_grad_()
    r = (p * own[:, None]).sum(0) / p.sum(0)
    torch.testing.assert_close(invariance(p, own), r.var(correction=0))
    invariance(p, own).backward()
    assert own.grad is None


def test_heads_in_any_order():
    p, labels, order = explained(losses()), torch.tensor([0, 1, 0, 1, 1, 0, 1]), [2, 0, 1]
    for f in (diversity, lambda p: independence(p, labels, 2), lambda p: invariance(p, losses()[:, 1])):
        torch.testing.assert_close(f(p[:, order]), f(p))


def test_the_penalty_is_the_closed_form():
    z, y = torch.randn(9, dtype=D), torch.randint(2, (9,))
    want = ((z.sigmoid() - y) * z).mean() ** 2
    torch.testing.assert_close(irm_penalty(z, y), want)
    torch.testing.assert_close(irm_penalty(torch.stack([-z / 2, z / 2], -1), y), want)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: irm_penalty(z, y), z)


def test_the_risk_by_hand_and_empty_environments_count_for_nothing():
    z, y = torch.randn(6, 2, dtype=D), torch.randint(2, (6,))
    p = torch.tensor([[0.9, 0.05, 0.05]] * 4 + [[0.2, 0.1, 0.7]] * 2, dtype=D)
    terms = [F.cross_entropy(z[a], y[a]) + 9 * irm_penalty(z[a], y[a]) for a in (slice(4), slice(4, 6))]
    torch.testing.assert_close(risk(z, y, p, 9.0), (0.9 * terms[0] + 0.7 * terms[1]) / 1.6 / 9)
    torch.testing.assert_close(risk(z, y, p[:, :1], 0.5), F.cross_entropy(z, y) + 0.5 * irm_penalty(z, y))


def test_what_is_refused():
    with pytest.raises(ValueError, match="temperature=0"):
        explained(losses(), 0)
    with pytest.raises(ValueError, match=r"most=0\.5"):
        diversity(explained(losses()), 0.5)
    with pytest.raises(ValueError, match="6 logits and 7 labels"):
        risk(torch.zeros(6), torch.zeros(7), explained(losses()))
