"""Parities, leaky units, and heads that join."""

import pytest
import torch
import torch.nn.functional as F
from examples.head_curriculum import Leaky, accuracies, draw, match, parity, train

from manyheads.multi import Curriculum


def test_labels_by_brute_force():
    bits = draw(4, 50)
    for row, bit in zip(bits.tolist(), parity(bits, 3).tolist(), strict=True):
        assert bit == (row[-1] ^ row[-2] ^ row[-3])
    assert torch.equal(parity(bits, 3) ^ parity(bits, 2), bits[:, -3])
    assert torch.equal(match(bits, 4).bool(), bits[:, -4] == bits[:, -1])
    assert 6 <= bits.shape[1] <= 17


def test_units_without_time_are_plain_and_units_of_all_time_stand_still():
    torch.manual_seed(0)
    net, x, h = Leaky(5), torch.randn(3, 1), torch.rand(3, 5)
    with torch.no_grad():
        net.tau_raw.fill_(0.3)  # clamped to 1
        weight = net.recurrent.weight.clone().fill_diagonal_(0)
        want = F.leaky_relu(h @ weight.T + net.recurrent.bias + net.input(x))
        torch.testing.assert_close(net(x, h), want)
        net.tau_raw.fill_(1e9)
        torch.testing.assert_close(net(x, h), h)


@pytest.mark.slow
def test_a_head_each_keeps_what_one_head_forgets():
    every, one = Curriculum(["2", "3"]), Curriculum(["2", "3"], window=1, reuse=True)
    (kept, ran), (lost, went) = train(every, 8, 60), train(one, 8, 60)
    assert ran[-1] == ("2", "3") and went[-1] == ("3",)
    assert accuracies(kept, every, ("2",))["2"] > 0.95
    assert accuracies(lost, one, ("2",))["2"] < 0.75
