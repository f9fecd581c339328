"""Deep combinatorial aggregation (arXiv 2210.06436)."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from manyheads.aggregate import DCA


def network(*widths, act=True):
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()] if act else [nn.Linear(a, b)]
    return nn.Sequential(*(layers[:-1] if act else layers)).double()


def apart(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def test_equal_copies_are_the_network_and_agree():
    net, x, y = network(3, 4, 2), torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    for by in ("model", "layer", "channel"):
        model = DCA(copy.deepcopy(net), 3, by)
        torch.testing.assert_close(model(x), net(x))
        torch.testing.assert_close(model.average()(x), net(x))
        loss = model.backward(x, y)
        torch.testing.assert_close(loss, nn.functional.cross_entropy(net(x), y))  # KL is 0


def test_one_copy_is_ordinary_training():
    net, x, y = network(3, 4, 2), torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    model = DCA(copy.deepcopy(net), 1)
    model.backward(x, y, repeats=3)
    nn.functional.cross_entropy(net(x), y).backward()
    for one, two in zip(model.network.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_all_combinations_by_hand():
    model, x = apart(DCA(network(3, 4, 2), 2)), torch.randn(5, 3).double()
    first, last = (model.copies_of(name) for name in ("0", "2"))
    wanted = []
    for w1, b1 in first:
        for w2, b2 in last:
            wanted.append(((x @ w1.T + b1).tanh() @ w2.T + b2).softmax(-1))
    found = model.predict(x, list(model.combinations()))
    torch.testing.assert_close(found, torch.stack(wanted).mean(0))


def test_of_a_linear_network_the_average_is_the_expectation():
    model, x = apart(DCA(network(3, 4, 4, 2, act=False), 2)), torch.randn(5, 3).double()
    mean = torch.stack([model(x, draw=draw) for draw in model.combinations()]).mean(0)
    torch.testing.assert_close(model.average()(x), mean)


def test_whole_models_are_an_ensemble():
    fresh = iter([network(3, 4, 2), network(3, 4, 2)])
    members = [network(3, 4, 2)]
    model = DCA(members[0], 3, "model", fresh=lambda: members.append(next(fresh)) or members[-1])
    x = torch.randn(5, 3).double()
    wanted = torch.stack([each(x).softmax(-1) for each in members]).mean(0)
    torch.testing.assert_close(model.predict(x, list(model.combinations())), wanted)


def test_a_copy_that_is_not_drawn_gets_no_gradient():
    model, x = DCA(network(3, 4, 2), 3), torch.randn(5, 3).double()
    model(x, draw={"0": 1, "2": 0}).sum().backward()
    had = {name: [each[0].grad is not None for each in model.copies_of(name)] for name in ("0", "2")}
    assert had == {"0": [False, True, False], "2": [True, False, False]}
    drawn = torch.tensor([list(model.draw().values()) for _ in range(600)])
    assert ((drawn == 1).double().mean(0) - 1 / 3).abs().max() < 0.06


def test_channels_take_their_weights_and_bias_together():
    model, x = apart(DCA(network(3, 4), 2, "channel")), torch.randn(5, 3).double()
    chosen = torch.tensor([0, 1, 1, 0])
    (w0, b0), (w1, b1) = model.copies_of("0")
    mixed = torch.stack([(w0, w1)[c][i] for i, c in enumerate(chosen)])
    bias = torch.stack([(b0, b1)[c][i] for i, c in enumerate(chosen)])
    found = model(x, draw={"0": chosen})
    torch.testing.assert_close(found, x @ mixed.T + bias)
    found.sum().backward()
    assert (w0.grad.abs().sum(1) > 0).tolist() == [True, False, False, True]
    with pytest.raises(ValueError, match="too many"):
        next(model.combinations())


def test_the_consistency_term_pulls_to_the_draw_before(monkeypatch):
    model, x, y = apart(DCA(network(3, 2), 2)), torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    draws = iter([{"0": 0}, {"0": 1}, {"0": 0}])
    monkeypatch.setattr(model, "draw", lambda: next(draws))
    total = model.backward(x, y, repeats=2)
    grads = [p.grad for p in model.parameters()]
    zero, one = (model(x, draw={"0": i}).log_softmax(-1) for i in (0, 1))

    def kl(p, q):
        return (p.exp() * (p - q)).sum(-1).mean()

    wanted = 0
    for before, now in ((zero, one), (one, zero)):
        wanted = wanted + (nn.functional.nll_loss(now, y) + kl(before.detach(), now)) / 2
    torch.testing.assert_close(total, wanted)
    for found, each in zip(grads, torch.autograd.grad(wanted, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, each)
    assert kl(zero, one) > 0


def test_norms_are_common_and_their_statistics_too():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DCA(net, 3)
    assert list(model.components) == ["0", "2"]
    model(torch.randn(6, 3))
    assert net[1].num_batches_tracked == 1
    count = sum(p.numel() for p in model.parameters())
    assert count == 3 * (16 + 10) + 8
    state = model.state_dict()
    model.load_state_dict(state)


def test_blocks_by_name():
    net = nn.ModuleDict({"trunk": network(3, 4, 4), "head": network(4, 2)})
    model = DCA(nn.Sequential(*net.values()), 2, ["0", "1"])
    assert {name: len(names) for name, names in model.components.items()} == {"0": 4, "1": 2}
    assert len(list(model.combinations())) == 4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"copies": 0}, "at least 1"),
        ({"by": "row"}, "is none of model"),
        ({"by": ["0", "9"]}, "no parameters under '9'"),
        ({"by": ["0", "0.0"]}, "some in common"),
        ({"fresh": lambda: network(3, 5, 2)}, "another network"),
    ],
)
def test_refusals(given, match):
    net = nn.Sequential(network(3, 4), network(4, 2)) if given.get("by") == ["0", "0.0"] else network(3, 4, 2)
    with pytest.raises(ValueError, match=match):
        DCA(net, **({"copies": 2} | given))
