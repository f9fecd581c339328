"""Four tests of a row of weights: on models where their answer is known, and on a language model."""

import math

import pytest
import torch
from tests.inspect import models
from torch import nn

import manyheads as mh
from manyheads import Attention
from manyheads.inspect import CaptureError, Row, validate
from manyheads.inspect.explanation import adversarial, divergence, gradients, kendall, left_out, permuted


class Bag(nn.Module):
    """ŷ_t = Σ_s A_ts of a number of token s: one head, even weights where `even`."""

    def __init__(self, values, even=True):
        super().__init__()
        n = len(values)
        self.embedding = nn.Embedding(n, n)
        self.attention = Attention(f"gqa(head_dim={n}) + rope(none)", n, 1).double()
        self.double().eval()
        with torch.no_grad():
            self.embedding.weight.copy_(torch.eye(n))
            for p in self.attention.parameters():
                p.zero_()
            if not even:
                self.attention.project.q_proj.weight.normal_()
                self.attention.project.k_proj.weight.normal_()
            self.attention.project.v_proj.weight[0] = torch.tensor(values, dtype=torch.float64)
            self.attention.project.o_proj.weight[0, 0] = 1

    def forward(self, ids):
        return self.attention(self.embedding(ids))[..., :1]


def bag(values, even=True):
    ids = torch.arange(len(values))[None]
    return Row(Bag(values, even), ids, 0, 0, predict=lambda y: y)


def test_gradients_and_leaving_out_agree_where_the_model_is_a_mean():
    values = [3.0, -1.0, 0.5, -2.5, 1.5, -1.5]  # their mean is zero
    row = bag(values)
    g, out = gradients(row), left_out(row)
    torch.testing.assert_close(g, torch.tensor(values).double().abs() / 10)
    torch.testing.assert_close(out[:5], torch.tensor(values[:5]).double().abs() / 5)
    assert out[5].isnan() and kendall(g[:5], out[:5])[0] == 1.0


def test_permutations_and_adversaries_where_values_are_equal():
    row = bag([2.0] * 6, even=False)
    assert permuted(row, 20) < 1e-12
    found = adversarial(row, steps=300, lr=0.1)
    assert found.divergence > 0.5 and found.divergence <= math.log(2) and found.change <= 0.05
    assert divergence(found.weights, row.weights).item() == pytest.approx(found.divergence)
    assert (row.predict(found.weights[None])[0] - row.prediction).abs().sum() <= 0.05  # measured again


def test_two_values_fix_the_weights():
    row = bag([4.0, -4.0], even=False)
    found = adversarial(row, within=1e-3, target=2e-4, steps=300, lr=0.1)
    assert found is None or found.divergence < 1e-4
    assert permuted(bag([4.0, -4.0, 1.0, 3.0], even=False), 30) > 0


def test_tau_and_divergence():
    a = torch.randn(12)
    assert kendall(a, a) == (1.0, pytest.approx(0, abs=1e-5)) and kendall(a, -a)[0] == -1.0
    ties = torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 3.0])
    assert kendall(*ties)[0] == pytest.approx(4 / 5)  # 4 agree; 5 pairs differ in each
    assert math.isnan(kendall(torch.ones(3), a[:3])[0])
    p, q = torch.rand(2, 9, dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(divergence(p, q), divergence(q, p))
    assert divergence(p, p) < 1e-15 and divergence(torch.eye(3)[0], torch.eye(3)[1]).item() == pytest.approx(
        math.log(2)
    )
    with pytest.raises(ValueError, match="two lists"):
        kendall(a, a[:3])


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_a_head_of_a_language_model(make):
    model, ids = make(), models.ids(1, 8)
    row = Row(model, ids, 1, 2, query=6)
    torch.testing.assert_close(
        row.predict(row.weights.expand(2, -1)), row.prediction.expand(2, -1), atol=1e-5, rtol=1e-4
    )
    assert int(row.visible.sum()) == 7
    found = validate(row, draws=5, steps=3)
    assert all(-1 <= tau <= 1 and 0 <= p <= 1 for tau, p in (found.gradient, found.left_out, found.reference))
    assert found.permuted > 0 and found.highest == pytest.approx(row.weights.max().item())
    g = gradients(row)
    assert g[7] == 0 and g.sum().item() == pytest.approx(1)
    out = left_out(row)
    with torch.no_grad():
        alone = model(torch.cat([ids[:, :2], ids[:, 3:]], 1)).logits.softmax(-1)[0, 5]
    torch.testing.assert_close(out[2], (alone - row.prediction).abs().mean().double(), atol=1e-6, rtol=1e-4)
    assert out[6:].isnan().all()
    assert all(p.grad is None for p in model.parameters())


def test_rows_that_cannot_be_told():
    with pytest.raises(CaptureError, match="not its values, weighed"):
        Row(Bagged(), torch.arange(4)[None], 0, 1, predict=lambda y: y)
    with pytest.raises(ValueError, match="one text"):
        Row(models.decoder(), models.ids(2), 0, 0)
    with pytest.raises(ValueError, match="sees 0 earlier"):
        validate(Row(models.decoder(), models.ids(1), 0, 0, query=0))


class Bagged(nn.Module):
    """Head outputs are scaled behind attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 16)
        self.attention = Attention("gqa + head_norm", 16, 2).eval()

    def forward(self, ids):
        return self.attention(self.embedding(ids))
