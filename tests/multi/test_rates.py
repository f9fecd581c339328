"""Weights that follow losses over epochs, and a step whose loss is that after a step."""

import pytest
import torch
from tests.multi.models import HEADS, batch, gradients, model, same
from torch.func import functional_call

from manyheads.core.part import OptionError
from manyheads.multi import Averaged, Balanced, two_step


def epochs(net, *losses):
    for one in losses:
        heads = net.heads
        net.balance.train()
        for half in (0.5, 1.5):  # two batches of which the mean is the epoch's loss
            net.balance.combine({k: torch.tensor(v * half) for k, v in one.items()}, heads, dict.fromkeys(one, 1.0))
        net.balance.next_epoch()


def test_averaged_weights_are_a_softmax_of_ratios_that_sums_to_the_number_of_heads():
    net = model(balance="averaged")
    assert isinstance(net.balance, Averaged)
    names = [*HEADS]
    epochs(net, dict.fromkeys(names, 4.0))
    assert set(net.balance.weights(names).values()) == {1.0}
    epochs(net, dict(zip(names, [4.0, 2.0, 1.0, 8.0], strict=True)))
    weights = torch.tensor([*net.balance.weights(names).values()])
    torch.testing.assert_close(weights, 4 * (torch.tensor([1.0, 0.5, 0.25, 2.0]) / 2).softmax(0))
    assert weights.sum().item() == pytest.approx(4)
    epochs(net, dict(zip(names, [2.0, 1.0, 0.5, 4.0], strict=True)))
    assert [*net.balance.weights(names).values()] == pytest.approx([1.0] * 4)
    clipped = Averaged(temperature=0.1, least=0.5, most=1.5)
    clipped.means = net.balance.means | {"age": [1.0, 5.0]}
    assert {*clipped.weights(names).values()} == {0.5, 1.5}
    net, (x, targets) = model(balance=net.balance), batch()
    net.balance.means = {name: [1.0, 2.0 if name == "age" else 1.0] for name in names}
    out = net(x, targets=targets)
    expected = sum(net.balance.weights(names)[name] * loss for name, loss in out.losses.items())
    torch.testing.assert_close(out.loss, expected)


def test_balanced_weights_are_powers_of_what_is_left_of_the_first_loss():
    net = model(balance="balanced")
    epochs(net, {"age": 4.0, "kind": 1.0, "tags": 1.0}, {"age": 1.96, "kind": 0.01, "tags": 9.0})
    assert isinstance(net.balance, Balanced)
    assert net.balance.weights([*HEADS]) == pytest.approx({"age": 0.7, "kind": 0.5, "tags": 1.5, "grade": 1.0})
    for made in (lambda: Balanced(power=-1), lambda: Averaged(temperature=0), lambda: Averaged(least=2, most=1)):
        with pytest.raises(OptionError):
            made()


def test_micro_batches_count_as_the_batch_they_are_of():
    whole, parts, (x, targets) = model(balance="averaged"), model(balance="averaged"), batch()
    whole(x, targets=targets)
    counts = parts.label_counts(targets)
    for at in range(0, 12, 3):
        rows = slice(at, at + 3)
        parts(x[rows], targets={name: each[rows] for name, each in targets.items()}, counts=counts)
    for net in (whole, parts):
        net.balance.next_epoch()
    for name in HEADS:
        assert parts.balance.means[name] == pytest.approx(whole.balance.means[name])


def test_a_step_of_no_length_is_the_plain_loss_of_the_outer_rows():
    net, (x, targets) = model(), batch(20)
    last = {name: each[16:] for name, each in targets.items()}
    two_step(net, x, targets, lr=0.0).backward()
    found = gradients(net)
    net.zero_grad()
    net(x[16:], targets=last).loss.backward()
    same({k: g for k, g in gradients(net).items() if g is not None}, {k: g for k, g in found.items() if g is not None})


@pytest.mark.parametrize("second", [False, True])
def test_each_head_is_judged_after_a_step_of_its_own(second):
    net, (x, targets) = model(), batch(20)
    state = {k: p.detach().clone() for k, p in net.named_parameters()}
    loss = two_step(net, x, targets, lr=0.1, second=second)
    loss.backward()
    total, slopes = 0, {k: torch.zeros_like(p) for k, p in state.items()}
    for name in HEADS:
        net2 = model()
        own = dict(net2.named_parameters())
        inner = net2(x[:16], targets={name: targets[name][:16]}).losses[name]
        steps = torch.autograd.grad(inner, [*own.values()], create_graph=True, allow_unused=True)
        moved = {
            k: p if g is None else p - 0.1 * (g if second else g.detach())
            for (k, p), g in zip(own.items(), steps, strict=True)
        }
        after = functional_call(net2, moved, (x[16:],), {"targets": {name: targets[name][16:]}}).losses[name]
        total = total + after
        for k, g in zip(own, torch.autograd.grad(after, [*own.values()], allow_unused=True), strict=True):
            slopes[k] += 0 if g is None else g
    torch.testing.assert_close(loss, total)
    for k, p in net.named_parameters():
        torch.testing.assert_close(p.grad if p.grad is not None else torch.zeros_like(p), slopes[k])
        assert torch.equal(p, state[k])


def test_steps_that_cannot_be():
    net, (x, targets) = model(), batch(4)
    with pytest.raises(OptionError, match=r"inner=0\.99 of 4 rows leaves 4 and 0"):
        two_step(net, x, targets, 0.1, inner=0.99)
    with pytest.raises(OptionError, match="lr=-1"):
        two_step(net, x, targets, -1.0)
