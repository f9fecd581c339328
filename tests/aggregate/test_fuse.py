"""Fusing predictions of several heads or models."""

import pytest
import torch

from manyheads.aggregate import fuse


def predictions(k=3, *shape):
    return [torch.randn(*(shape or (4, 5)), dtype=torch.float64).log_softmax(-1) for _ in range(k)]


def test_by_their_equations():
    logs, w = predictions(), torch.tensor([1.0, 2.0, 5.0]).double()
    p, share = torch.stack(logs).exp(), w / 8
    torch.testing.assert_close(fuse(logs).exp(), p.mean(0))
    torch.testing.assert_close(fuse(logs, weights=w).exp(), (share[:, None, None] * p).sum(0))
    for weights, s in ((None, torch.full((3,), 1 / 3).double()), (w, share)):
        product = (p ** s[:, None, None]).prod(0)
        torch.testing.assert_close(fuse(logs, "product", weights).exp(), product / product.sum(-1, keepdim=True))
        largest = (s[:, None, None] * p).amax(0)
        torch.testing.assert_close(fuse(logs, "max", weights).exp(), largest / largest.sum(-1, keepdim=True))


@pytest.mark.parametrize("how", ["mean", "product", "max"])
def test_every_rule_gives_a_distribution_and_keeps_agreement(how):
    logs = predictions()
    torch.testing.assert_close(fuse(logs, how).exp().sum(-1), torch.ones(4).double())
    torch.testing.assert_close(fuse([logs[0]] * 3, how), logs[0])
    torch.testing.assert_close(fuse([3 + 0 * logs[0] + logs[0]] * 2, how), logs[0])  # logits do as well
    torch.testing.assert_close(fuse(logs, how, torch.tensor([0.0, 1, 0]).double()), logs[1])
    tiny = [torch.tensor([[-5000.0, -5001.0]]), torch.tensor([[0.0, -2000.0]])]
    assert fuse(tiny, how).isfinite().all()


def test_a_class_that_cannot_be():
    sure, unsure = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, 0.0]]).log_softmax(-1)
    assert fuse([sure, unsure], "product").exp().tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(fuse([sure, unsure]).exp(), torch.tensor([[0.75, 0.25]]))
    torch.testing.assert_close(fuse([sure, unsure], "product", torch.tensor([0.0, 1.0])), unsure)


def test_weights_by_place():
    logs = predictions()
    weights = torch.rand(4, 3).double()
    found = fuse(logs, "product", weights)
    for row in range(4):
        torch.testing.assert_close(found[row], fuse([each[row] for each in logs], "product", weights[row]))


def test_refusals():
    logs = predictions()
    for given, match in (
        (([],), "none at all"), (([logs[0], logs[0][:2]],), "one shape"), ((logs, "vote"), "none of mean"),
        ((logs, "mean", torch.ones(2)), "weights are"), ((logs, "mean", -torch.ones(3)), "from 0 on"),
        ((logs, "mean", torch.zeros(3)), "above 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            fuse(*given)
