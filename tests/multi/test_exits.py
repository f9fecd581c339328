"""Several guesses, and several depths."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.multi import Classification, Hypotheses, MultiHead, choose, exits, leave_early

D = torch.float64


def test_the_winner_alone_learns_and_relaxing_shares():
    errors = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 4.0]], dtype=D, requires_grad=True)
    loss, winner = choose(errors)
    assert loss.tolist() == [1, 1] and winner.tolist() == [1, 0]  # of equal ones the first
    loss.sum().backward()
    assert errors.grad.tolist() == [[0, 1, 0], [1, 0, 0]]
    loss, _ = choose(errors, relaxed=0.1)
    torch.testing.assert_close(loss[0], torch.tensor(0.9 * 1 + 0.05 * 5, dtype=D))
    torch.testing.assert_close(choose(errors, relaxed=2 / 3)[0], errors.mean(-1))
    torch.testing.assert_close(choose(errors, temperature=1e9)[0], errors.mean(-1))
    torch.testing.assert_close(choose(errors[:1], temperature=1e-3)[0], choose(errors[:1])[0])
    assert choose(errors[:, :1], relaxed=0.5)[0].tolist() == [3, 1]  # one hypothesis is the plain error


@pytest.mark.parametrize("relaxed", [0.0, 0.1])
def test_two_guesses_at_two_points_find_them_or_stand_where_the_formula_says(relaxed):
    torch.manual_seed(0)
    head = Hypotheses(count=2, relaxed=relaxed, score=0.0)
    net = MultiHead(nn.Identity(), {"y": head}, width=1).to(D)
    with torch.no_grad():
        net.net("y").bias.view(2, 2)[:, 0] = torch.tensor([-0.3, 0.4])
    x, y = torch.zeros(8, 1, dtype=D), torch.tensor([-1.0, 1.0] * 4, dtype=D)
    optimiser = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(60):
        optimiser.zero_grad()
        net(x, targets={"y": y}).loss.backward()
        optimiser.step()
    found = net(x).outputs["y"][0, :, 0]
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0], dtype=D) * (1 - 2 * relaxed), rtol=1e-4, atol=1e-4)


def test_guesses_in_any_order_and_missing_numbers():
    head, out = Hypotheses(count=3, size=2), torch.randn(4, 3, 3, dtype=D)
    y = torch.randn(4, 2, dtype=D)
    y[1, 0] = float("nan")
    known = head.known(y)
    torch.testing.assert_close(head.losses(out, y, known), head.losses(out[:, [2, 0, 1]], y, known))
    torch.testing.assert_close(head.errors(out, y, known)[1], (out[1, :, 1] - y[1, 1]) ** 2)
    one = Hypotheses(count=1, score=0.5)
    plain = (out[:, 0, 0] - y[:, 1]) ** 2 + 0.5 * F.softplus(-out[:, 0, 1])
    torch.testing.assert_close(one.losses(out[:, :1, :2], y[:, 1], torch.ones(4, dtype=torch.bool)), plain)
    sums = head.sums(out, y, known)
    assert head.metrics(sums)["distortion"] <= head.metrics(sums)["rmse"]


def trunk():
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


def test_heads_at_depths_learn_one_target_and_deeper_layers_hear_only_deeper_ones():
    heads = exits("y", Classification(3, weight=2.0), ["0", "2"])
    assert {name: head.weight for name, head in heads.items()} == {"y@0": 1.0, "y@2": 1.0, "y": 2.0}
    net, x, y = MultiHead(trunk(), heads), torch.randn(5, 6), torch.randint(3, (5,))
    out = net(x, targets={"y": y})
    torch.testing.assert_close(out.loss, out.losses["y@0"] + out.losses["y@2"] + 2 * out.losses["y"])
    out.loss.backward()
    own = [p.grad.clone() for p in net.trunk[3].parameters()]
    net.zero_grad()
    (2 * net(x, targets={"y": y}).losses["y"]).backward()
    assert all(torch.equal(p.grad, other) for p, other in zip(net.trunk[3].parameters(), own, strict=True))
    with pytest.raises(ValueError, match="head 'y': early exits at"):
        exits("y", "classification(classes=2)", ["1", "1"])


def test_micro_batches_with_losses_at_every_depth():
    heads = exits("y", "classification(classes=3)", ["0", "2"])
    torch.manual_seed(0)
    net = MultiHead(trunk(), heads).to(D)
    x, y = torch.randn(8, 6, dtype=D), torch.tensor([0, 1, 2, -100, 1, -100, -100, 0])
    net(x, targets={"y": y}).loss.backward()
    whole = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for at in range(0, 8, 2):
        net(x[at : at + 2], targets={"y": y[at : at + 2]}, counts=net.label_counts({"y": y})).loss.backward()
    for one, two in zip(whole, net.parameters(), strict=True):
        torch.testing.assert_close(one, two.grad)


def test_leaving_early_takes_the_first_sure_exit_and_stops_the_trunk():
    torch.manual_seed(0)
    net = MultiHead(trunk(), exits("y", "classification(classes=3)", ["0", "2"])).eval()
    x, names = torch.randn(20, 6), ["y@0", "y@2", "y"]
    outputs = net(x).outputs
    tops = torch.stack([outputs[name].softmax(-1).amax(-1) for name in names])
    level = tops[0].median().item()
    classes, taken = leave_early(net, x, exits=names, confidence=level)
    assert {0} < set(taken.tolist())
    for row, at in enumerate(taken.tolist()):
        assert classes[row] == outputs[names[at]][row].argmax()
        assert all(tops[before, row] < level for before in range(at)) and (at == 2 or tops[at, row] >= level)
    ran = []
    for index, block in enumerate(net.trunk):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    assert set(leave_early(net, x, exits=names, confidence=0.0)[1].tolist()) == {0} and ran == [0]
    assert set(leave_early(net, x, exits=names, confidence=1.0)[1].tolist()) == {2}
    with pytest.raises(ValueError, match="not in the order"):
        leave_early(net, x, exits=["y@2", "y@0"], confidence=1.0)
    with pytest.raises(ValueError, match="head 'z': there is no such head"):
        leave_early(net, x, exits=["z"], confidence=0.5)
    with pytest.raises(ValueError, match="at least one exit"):
        leave_early(net, x, exits=[], confidence=0.5)
    for wrong in (1.1, -0.1, float("nan"), None):
        with pytest.raises(ValueError, match="confidence is a probability, from 0 to 1, not"):
            leave_early(net, x, exits=names, confidence=wrong)
    assert leave_early(net, x, exits="y", confidence=0.5)[1].tolist() == [0] * 20
    assert set(exits("y", "classification(classes=3)", "10")) == {"y@10", "y"}
