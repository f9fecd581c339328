"""Losses in balance: learned weights, and aggregators that meet the heads' gradients at the features."""

import sys

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


def test_without_torchjd_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(ImportError, match=r"'UPGrad'.*pip install 'manyheads\[balance\]'"):
        model(balance="UPGrad")


@pytest.mark.parametrize("name", ["UPGrad", "MGDA", "PCGrad", "IMTLG", "AlignedMTL", "ConFIG", "GradDrop", "Mean"])
def test_aggregators_of_torchjd_by_name(name):
    aggregation = pytest.importorskip("torchjd.aggregation")
    if name == "UPGrad":
        pytest.importorskip("quadprog")
    (x, targets), rows = batch(dtype=torch.float32), []
    seen, named = (model(torch.float32, balance=each) for each in (lambda rows_: _kept(rows, rows_), name))
    assert named.balance.name == name
    for net in (seen, named):
        torch.manual_seed(0)  # PCGrad and GradDrop draw
        net(x, targets=targets).loss.backward()
    assert all((p.grad != 0).any() for p in named.trunk.parameters())
    torch.manual_seed(0)
    met = getattr(aggregation, name)()(rows[0]).view(len(x), -1)
    net = model(torch.float32)
    net.trunk(x).backward(met)
    for key, gradient in gradients(net.trunk).items():
        torch.testing.assert_close(gradients(named.trunk)[key], gradient, rtol=1e-4, atol=1e-6)
    same(gradients(seen.nets), gradients(named.nets), 1e-5, 1e-7)  # heads keep their own


def _kept(to, rows):
    to.append(rows)
    return rows.sum(0)


def test_aggregators_that_torchjd_has_not_or_that_need_options():
    pytest.importorskip("torchjd.aggregation")
    with pytest.raises(ValueError, match=r"no aggregator 'Nothing'; it has .*Mean"):
        model(balance="Nothing")
    with pytest.raises(ValueError, match="Constant of torchjd needs options"):
        model(balance="Constant")


def test_an_aggregator_made_by_oneself():
    aggregation = pytest.importorskip("torchjd.aggregation")
    net, (x, targets) = model(torch.float32, balance=aggregation.Constant(torch.ones(4))), batch(dtype=torch.float32)
    plain = model(torch.float32)
    for each in (net, plain):
        each(x, targets=targets).loss.backward()
    same(gradients(plain), gradients(net), 1e-4, 1e-6)


def test_a_balance_of_ones_own():
    own = make_balance("sum", {})
    assert MultiHead(torch.nn.Linear(2, 2), {"a": "regression"}, balance=own).balance is own
