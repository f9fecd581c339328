"""The contract itself: names, lines, mixtures, unmerging."""

from dataclasses import dataclass

import pytest
import torch

import manyheads as mh
from manyheads.aggregate import Aggregator, Options, Pooled, build, read_aggregator, register_aggregator
from manyheads.aggregate.aggregator import KINDS, attend, weigh


def test_names_are_found_and_not_taken_twice():
    assert mh.aggregate.ABMIL(heads=2) == read_aggregator("abmil(2)")
    with pytest.raises(ValueError, match="there is no aggregator 'median'; there are abmil, "):
        build("median", 8)
    with pytest.raises(ValueError, match="two are called aggregator 'abmil'"):

        @register_aggregator("abmil")
        @dataclass(frozen=True)
        class Other(Options):
            pass

    assert KINDS["abmil"] is mh.aggregate.ABMIL
    with pytest.raises(ValueError, match="aggregator is a line"):
        build(3, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="width is at least 1"):
        build("abmil", 0)


def test_results_say_their_number_and_width():
    assert build("abmil(heads=3)", 8).results() == (1, 24)
    assert build("abmil(heads=3, concat=false)", 8).results(5) == (3, 8)


class Halves(Aggregator):
    """The mean of each half."""

    def pool(self, x, mask, size, *, query, cond):
        half = torch.arange(x.shape[1], device=x.device) * 2 // x.shape[1]
        one = torch.nn.functional.one_hot(half.expand(len(x), -1), 2).to(x.dtype) * mask[..., None]
        total = one.sum(1)
        return Pooled(one.mT @ x / total.clamp(min=1)[..., None], None, half.expand(len(x), -1), total)


def test_unmerge_gives_each_token_its_result_and_what_is_gone_what_it_was():
    class Named(Options):
        name = "halves"

    agg, x = Halves(Named(), 3), torch.randn(2, 4, 3)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    found = agg(x, mask)
    assert found.assign.tolist() == [[0, 0, 1, 1], [0, 0, -1, -1]] and found.size.tolist() == [[2, 2], [2, 0]]
    back = agg.unmerge(found)
    torch.testing.assert_close(back[0, 3], x[0, 2:].mean(0))
    assert (back[1, 2:] == 0).all()
    assert torch.equal(agg.unmerge(found, x)[1, 2:], x[1, 2:])
    with pytest.raises(ValueError, match="no saying"):
        build("abmil", 3).unmerge(build("abmil", 3)(x))


def test_a_condition_reaches_every_place_of_its_row():
    @dataclass(frozen=True)
    class Kind(Options):
        name = "weighted"
        takes = frozenset({"cond"})

    class Weighted(Aggregator):
        def pool(self, x, mask, size, *, query, cond):
            return Pooled(cond[:, None] @ x)

    one, two = torch.randn(2, 2, 5, 3).unbind(0)
    agg, cond = Weighted(Kind(), 3), torch.rand(2, 2)
    torch.testing.assert_close(agg.mix([one, two], cond), cond[:, None, :1] * one + cond[:, None, 1:] * two)
    each = torch.rand(2, 5, 2)
    torch.testing.assert_close(agg.mix([one, two], each), each[..., :1] * one + each[..., 1:] * two)


def test_attention_knows_sizes():
    q, k, v = (torch.randn(2, 3, n, 4).double() for n in (2, 5, 5))
    mask, size = torch.ones(2, 5, dtype=torch.bool), torch.tensor([[1.0, 2, 1, 3, 1], [1, 1, 1, 1, 1]])
    twice = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4])
    found, weights = attend(q, k, v, mask, size)
    torch.testing.assert_close(found[0], attend(q, k[:, :, twice], v[:, :, twice], mask[:, twice])[0][0])
    torch.testing.assert_close(found[1], torch.nn.functional.scaled_dot_product_attention(q, k, v)[1])
    torch.testing.assert_close(weights, weigh(q @ k.mT / 2, mask, size))
