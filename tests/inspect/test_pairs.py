"""A probe on the attention between two spans."""

import pytest
import torch
from tests.inspect import models

from manyheads import capture
from manyheads.inspect import measures


def test_features_are_pooled_blocks_of_the_maps():
    model, batches = models.bert().double(), [models.ids(2, 9), models.ids(1, 7, seed=4)]
    pairs = [([1, 2], [4]), ([3], [5, 6, 8]), ([6], [0, 1])]
    found = measures.pair_features(model, batches, pairs)
    other = measures.pair_features(model, batches, pairs, pool="max")
    assert found.values.shape == (3, 8) and found.heads[5] == (1, 1) and (other.values >= found.values).all()
    with torch.no_grad(), capture(model) as tape:
        model(batches[0])
    torch.testing.assert_close(found.values[1, 5], tape[1].weights[1, 1, 3, [5, 6, 8]].mean())
    torch.testing.assert_close(other.values[0, 2], tape[0].weights[0, 2, [1, 2], 4].max())
    back = measures.pair_features(model, batches, [(b, a) for a, b in pairs])
    torch.testing.assert_close(back.values[0, 0], tape[0].weights[0, 0, 4, [1, 2]].mean())
    with pytest.raises(ValueError, match="pair 1 has no tokens"):
        measures.pair_features(model, batches, [pairs[0], ([], [1]), pairs[2]])
    with pytest.raises(ValueError, match="4 pairs for 3 texts"):
        measures.pair_features(model, batches, [*pairs, pairs[0]])
    with pytest.raises(ValueError, match="token 12 of a text of 7"):
        measures.pair_features(model, batches, [*pairs[:2], ([12], [1])])


def planted(n=80, heads=24, at=7):
    generator = torch.Generator().manual_seed(0)
    right, wrong = (torch.rand(n, heads, generator=generator, dtype=torch.float64) / 2 for _ in range(2))
    right[:, at], wrong[:, at] = 1.0, 0.0
    return right, wrong


@pytest.mark.parametrize("how", ["difference", "single"])
def test_a_planted_head_is_found(how):
    right, wrong = planted()
    probe = measures.fit_probe(right, wrong, how=how)
    assert probe.accuracy(right, wrong) == 1 and probe.weight.abs().argmax() == 7
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        measures.fit_probe(right[:, order], wrong[:, order], how=how).weight, probe.weight[order]
    )
    if how == "single":
        assert probe.bias < 0


def test_one_head_is_enough_where_one_head_knows():
    right, wrong = planted()
    found = measures.few_heads(right, wrong, [1, 4])
    assert found.order[0] == 7 and found.accuracy == {0: 1.0, 1: 1.0, 4: 1.0}
    noise = measures.few_heads(right[:, :6], wrong[:, :6], [2], held_out=0.5)
    assert noise.accuracy[2] < 0.8
    with pytest.raises(ValueError, match="do not make 5 folds"):
        measures.few_heads(right[:4], wrong[:4])


def test_the_fit_is_where_the_gradient_is_zero_and_swapping_candidates_swaps_the_decision():
    right, wrong = planted(at=3)
    right[:, 3] = wrong[:, 3] = 0
    probe = measures.fit_probe(right, wrong, strength=0.5)
    w = probe.weight.clone().requires_grad_()
    d = right - wrong
    ((w * w).sum() / 2 + 0.5 * 2 * torch.nn.functional.softplus(-(d @ w)).sum()).backward()
    assert w.grad.abs().max() < 1e-8 and probe.weight[3] == 0 and probe.bias == 0
    assert torch.equal(probe.prefers(right, wrong), ~probe.prefers(wrong, right))
    with pytest.raises(ValueError, match="features \\[N, F\\]"):
        measures.fit_probe(right, wrong[:3])
    with pytest.raises(ValueError, match="strength=0"):
        measures.fit_probe(right, wrong, strength=0)


def test_mas_without_training():
    right, wrong = planted()
    one, other = measures.mas(right, wrong), measures.mas(wrong, right)
    torch.testing.assert_close(one + other, torch.ones(80, dtype=torch.float64))
    assert ((one >= 0) & (one <= 1)).all() and one.mean() > 0.5
    assert (measures.mas(right, right) == 0.5).all() and (measures.mas(0 * right, 0 * right) == 0.5).all()
    assert (measures.mas(right, right, ties=True) == 1).all()
    assert measures.mas(torch.tensor([[0.3, 0.1]]), torch.tensor([[0.2, 0.4]])).item() == pytest.approx(0.3 / 0.7)
    assert measures.mas(torch.tensor([[0.3, 0.1]]), torch.tensor([[0.2, 0.4]]), ties=True).item() == 0.5
