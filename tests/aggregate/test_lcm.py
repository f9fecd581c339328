"""Learnable commutative monoids (arXiv 2212.08541)."""

import math

import pytest
import torch

from manyheads.aggregate import build

D = 4


def pool(line="lcm"):
    return build(line, D).double()


def tokens(n=7, rows=2):
    return torch.randn(rows, n, D, dtype=torch.float64)


def tree(agg, elements):
    """The same, by recursion from the bottom."""
    if len(elements) == 1:
        return elements[0]
    pairs = [agg.join(a, b) for a, b in zip(elements[::2], elements[1::2], strict=False)]
    return tree(agg, pairs + elements[2 * len(pairs) :])


def test_the_operator_is_commutative_and_the_mean_of_two_cells():
    agg, (a, b) = pool(), tokens(5).unbind(0)
    torch.testing.assert_close(agg.join(a, b), (agg.cell(a, b) + agg.cell(b, a)) / 2)
    torch.testing.assert_close(agg.join(a, b), agg.join(b, a), atol=1e-14, rtol=0)
    c = torch.randn_like(a)
    assert not torch.allclose(agg.join(agg.join(a, b), c), agg.join(a, agg.join(b, c)))
    assert sum(p.numel() for p in agg.cell.parameters()) == 6 * D**2 + 6 * D


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8])
def test_it_is_the_tree(n):
    agg, x = pool(), tokens(n)
    elements = list(agg.enter(x).relu().unbind(1))
    torch.testing.assert_close(agg(x).out[:, 0], tree(agg, elements))


@pytest.mark.parametrize("n", [1, 2, 5, 8, 9])
def test_depth_is_logarithmic(n, monkeypatch):
    agg, calls = pool(), []
    join = agg.join
    monkeypatch.setattr(agg, "join", lambda a, b: calls.append(a.shape[1]) or join(a, b))
    agg(tokens(n))
    assert len(calls) == math.ceil(math.log2(n)) and sum(calls) == n - 1


def test_order_inside_a_pair_does_not_count_and_across_pairs_does():
    agg, x = pool(), tokens(4)
    torch.testing.assert_close(agg(x[:, [1, 0, 3, 2]]).out, agg(x).out)
    torch.testing.assert_close(agg(x[:, [2, 3, 0, 1]]).out, agg(x).out)
    assert not torch.allclose(agg(x[:, [0, 2, 1, 3]]).out, agg(x).out)


def test_sum_and_max_know_no_order():
    x = tokens()
    for name, wanted in (("sum", lambda e: e.sum(1)), ("max", lambda e: e.amax(1))):
        agg = pool(f"lcm(operator={name})")
        torch.testing.assert_close(agg(x).out[:, 0], wanted(agg.enter(x).relu()))
        torch.testing.assert_close(agg(x[:, torch.randperm(7)]).out, agg(x).out)


def test_padding_anywhere_is_not_an_element():
    """As zeros it would be: x ⊕ 0 is not x."""
    agg, x = pool(), tokens(7)
    mask = torch.tensor([[True, False, True, True, False, True, False], [True] * 7])
    torch.testing.assert_close(agg(x, mask).out[:1], agg(x[:1, mask[0]]).out)
    assert not torch.allclose(agg.join(x[0], torch.zeros(7, D).double()), x[0])


def test_in_training_the_order_is_drawn():
    agg, x = pool("lcm(shuffle=true)"), tokens()
    found = torch.stack([agg(x).out for _ in range(4)])
    assert found.std(0).max() > 0
    agg.eval()
    assert torch.equal(agg(x).out, agg(x).out)


def test_the_associativity_term():
    agg, x = pool(), tokens()
    term = agg.associativity(x)
    term.backward()
    assert term > 0 and all(p.grad is not None for p in agg.parameters())
    assert pool("lcm(operator=max)").associativity(x) == 0
    mask = torch.zeros(2, 7, dtype=torch.bool)
    with pytest.raises(ValueError, match="no triples"):
        agg.associativity(x, mask)
    mask[0, 0] = True
    assert agg.associativity(x.masked_fill(~mask[..., None], math.nan), mask).isfinite()
