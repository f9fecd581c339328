"""Losses in balance: learned weights, and aggregators that meet the heads' gradients at the features."""

import sys
import types

import pytest
import torch
from tests.multi.models import batch, gradients, model, same

from manyheads.multi import MultiHead
from manyheads.multi.balance import make_balance


def test_uncertainty_weighs_by_learned_scales_of_the_heads_that_have_labels():
    net, (x, targets) = model(balance="uncertainty"), batch()
    del targets["tags"]
    out = net(x, targets=targets)
    temper = {"age": 0.5, "kind": 1.0, "grade": 1.0}
    torch.testing.assert_close(out.loss.double(), sum(t * out.losses[n] for n, t in temper.items()), rtol=1e-6, atol=0)
    out.loss.backward()
    s = dict(zip(net.heads, net.balance.log_variance, strict=True))
    assert s["tags"].grad is None
    for name, t in temper.items():
        torch.testing.assert_close(s[name].grad, 0.5 - t * out.losses[name].detach(), rtol=1e-6, atol=0)


def test_an_aggregator_that_adds_is_the_plain_sum_and_heads_keep_their_own_gradients():
    plain, summed, last, (x, targets) = (
        model(),
        model(balance=lambda rows: rows.sum(0)),
        model(balance=lambda rows: rows[-1]),
        batch(),
    )
    for net in (plain, summed, last):
        net(x, targets=targets).loss.backward()
    same(gradients(plain), gradients(summed), 1e-5, 1e-7)
    alone = model()
    alone(x, targets={"grade": targets["grade"]}).loss.backward()
    for name, gradient in gradients(last).items():
        other = gradients(alone if name.startswith("trunk") else plain)[name]
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-7)


def test_an_aggregator_sees_a_weighted_row_for_each_head_with_labels_and_the_trunk_moves():
    seen = []

    def mean(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return rows.mean(0)

    net, (x, targets) = model(torch.float32, balance=mean, checkpoint=True), batch(dtype=torch.float32)
    del targets["kind"]
    (net(x, targets=targets).loss * 8).backward()  # as a gradient scaler does
    assert [tuple(rows.shape) for rows in seen] == [(3, 12 * 8)]
    assert all(p.grad is not None and (p.grad != 0).any() for p in net.trunk.parameters())
    net(x, targets={"age": targets["age"]}).loss.backward()
    assert len(seen) == 1  # one head has nothing to be balanced with


def test_aggregators_of_torchjd_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(ImportError, match=r"'UPGrad'.*pip install 'manyheads\[balance\]'"):
        model(balance="UPGrad")
    library = types.ModuleType("torchjd.aggregation")

    class Aggregator(torch.nn.Module):
        pass

    class Mean(Aggregator):
        def forward(self, matrix):
            return matrix.mean(0)

    class Constant(Aggregator):
        def __init__(self, weights):
            super().__init__()

    for kind in (Aggregator, Mean, Constant):
        setattr(library, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "torchjd", types.ModuleType("torchjd"))
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", library)
    net, (x, targets) = model(balance="Mean"), batch()
    net(x, targets=targets).loss.backward()
    assert net.balance.name == "Mean"
    with pytest.raises(ValueError, match=r"no aggregator 'Nothing'; it has .*Mean"):
        model(balance="Nothing")
    with pytest.raises(ValueError, match="Constant of torchjd needs options"):
        model(balance="Constant")


def test_the_real_torchjd():
    aggregation = pytest.importorskip("torchjd.aggregation")
    for balance in ("UPGrad", aggregation.Mean()):
        net, (x, targets) = model(torch.float32, balance=balance), batch(dtype=torch.float32)
        net(x, targets=targets).loss.backward()
        assert all((p.grad != 0).any() for p in net.trunk.parameters())


def test_a_balance_of_ones_own():
    own = make_balance("sum", {})
    assert MultiHead(torch.nn.Linear(2, 2), {"a": "regression"}, balance=own).balance is own
