"""Codes of tasks that are made alike, and heads that are one adapter."""

import pytest
import torch
from examples.align_lora import DIM, Lora, Tasks, apart, kl_apart, likeness, measure, mmd_apart, train
from torch.distributions import Normal, kl_divergence

D = torch.float64


def codes(n=9, seed=0):
    return torch.randn(n, 5, dtype=D, generator=torch.Generator().manual_seed(seed))


def test_the_distance_of_gaussians():
    a, b = codes(), 2 * codes(7, 1) + 0.3
    one, two = (Normal(x.mean(0), (x.var(0, correction=0) + 1e-8).sqrt()) for x in (a, b))
    want = (kl_divergence(one, two) + kl_divergence(two, one)).sum() / 2
    torch.testing.assert_close(kl_apart(a, b), want)
    moved = a.clone()
    moved[:, 2] += 0.4
    torch.testing.assert_close(kl_apart(a, moved), 0.16 / (2 * (a[:, 2].var(correction=0) + 1e-8)))


@pytest.mark.parametrize("form", [kl_apart, mmd_apart])
def test_it_is_none_of_the_same_and_the_same_both_ways(form):
    a, b = codes(), codes(9, 1) + 1
    assert abs(form(a, a)) < 1e-9 and form(a, b) > 0
    torch.testing.assert_close(form(a, b), form(b, a))


def test_pairs_of_tasks_and_padding():
    a, tasks = codes(12), torch.tensor([0, 1, 2] * 4)
    pairs = [kl_apart(a[tasks == i], a[tasks == j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    torch.testing.assert_close(apart(a, tasks), sum(pairs) / 3)
    assert apart(a, torch.zeros(12)) == 0
    wide, valid = torch.randn(12, 3, 5, dtype=D), torch.zeros(12, 3, dtype=torch.bool)
    wide[:, 1], valid[:, 1] = a, True
    torch.testing.assert_close(apart(wide, tasks, valid=valid), apart(a, tasks))
    with pytest.raises(ValueError, match="two samples of each task"):
        apart(a[:4], tasks[:4])


def test_heads_without_a_router_are_one_adapter():
    torch.manual_seed(0)
    layer, x = Lora(torch.nn.Linear(DIM, DIM), heads=4), torch.randn(6, DIM)
    assert torch.equal(layer(x), layer.base(x))
    torch.nn.init.normal_(layer.b)
    torch.testing.assert_close(layer.merged()(x), layer(x), rtol=1e-4, atol=1e-4)
    single = Lora(layer.base, heads=1)
    single.a = layer.a
    single.b.data = layer.b.data.mean(0, keepdim=True)
    torch.testing.assert_close(single(x), layer(x), rtol=1e-4, atol=1e-4)
    layer.b.data[1:] = layer.b.data[0]
    assert likeness(layer.b).item() == pytest.approx(1, abs=1e-5)


def test_alignment_brings_tasks_together_and_costs_no_accuracy():
    kind = Tasks(0)
    plain, aligned = train(kind, 200, 0.0), train(kind, 200, 0.2)
    (right, far), (still, near) = measure(plain, kind), measure(aligned, kind)
    assert near < 0.3 * far
    assert still > right - 0.03 and right > 0.6
