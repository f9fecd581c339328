"""Heads on a Gram matrix: what they do not see, what pushes them apart, what they cost."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.core.part import OptionError
from manyheads.multi import Gramian, MultiHead
from manyheads.multi.heads.gramian import decorrelation, gram

D = torch.float64
SMALL = dict(count=3, gram=4, width=4, attention=2, groups=2, scale=0.5)


def made(width: int = 8, **options):
    torch.manual_seed(0)
    head = Gramian(3, **(SMALL | options))
    net = head.build(width).to(D)
    for each in net.modules():
        if isinstance(each, nn.BatchNorm1d):
            each.running_mean.normal_()
    return head, net.eval(), torch.randn(2, 5, width, dtype=D)


def test_the_gram_is_inner_products_of_channels_whatever_the_order_turn_and_size_of_places():
    y = torch.randn(2, 5, 4, dtype=D)
    brute = torch.stack(
        [torch.stack([(one[:, i] * one[:, j]).sum() for i in range(4) for j in range(i, 4)]) for one in y]
    )
    torch.testing.assert_close(gram(y), F.normalize(brute, dim=-1))
    square = y.mT @ y
    assert torch.equal(square, square.mT) or torch.allclose(square, square.mT)
    assert (torch.linalg.eigvalsh(square) > -1e-9).all()
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=D))[0]
    for other in (turn @ y, y * 3, y[:, [4, 2, 0, 1, 3]]):
        torch.testing.assert_close(gram(other), gram(y))


def test_places_in_any_order_and_padding_of_any_value_change_nothing():
    head, net, x = made()
    out = head.output(net, x, None)
    torch.testing.assert_close(head.output(net, x[:, [4, 2, 0, 1, 3]], None), out)
    padded = torch.cat([x, torch.full((2, 2, 8), float("nan"), dtype=D)], 1)
    mask = torch.arange(7) < 5
    # Padding is no place, but the mean's count is: the length of the Gram is taken out.
    torch.testing.assert_close(head.output(net, padded, mask.expand(2, -1)), out)
    net.train()
    torch.testing.assert_close(head.output(net, padded, mask.expand(2, -1)), head.output(net, x, None))


def test_without_its_two_steps_only_the_gram_speaks():
    _, net, x = made(scale=0.0)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=D))[0]
    one = net.each[0]
    one.reduced = nn.Identity()
    torch.testing.assert_close(one(turn @ x), one(x))
    one.gamma.data.fill_(1.0)
    assert not torch.allclose(one(turn @ x), one(x))


def test_class_attention_is_one_query_over_itself_and_the_places():
    _, net, x = made()
    one, c = net.each[0], torch.randn(2, 8, dtype=D)
    z = one.norm(torch.cat([c[:, None], x], 1))
    q, (k, v) = one.q(z[:, 0]).view(2, 2, 2), one.kv(z).chunk(2, -1)
    k, v = k.view(2, 6, 2, 2), v.view(2, 6, 2, 2)
    weights = (torch.einsum("bhe,bnhe->bhn", q, k) * 2**-0.5).softmax(-1)
    expected = one.out(torch.einsum("bhn,bnhe->bhe", weights, v).flatten(1))
    torch.testing.assert_close(one.attend(c, x, None), expected)
    with torch.no_grad():  # the shuffle: a channel of each group goes to each group
        one.up.weight.copy_(torch.eye(2, dtype=D).repeat(16, 1)[..., None] * 0 + 1)
    assert one.mlp(c).shape == (2, 8)


def test_the_push_is_zero_where_all_agree_and_parts_them_where_not():
    logits = torch.randn(4, 3, 5, dtype=D, requires_grad=True)
    p = logits.softmax(-1)
    whole = logits.mean(1).softmax(-1)
    brute = sum((whole * (whole.log() - p[:, k].log())).mean(-1) for k in range(3))
    torch.testing.assert_close(decorrelation(logits), brute)
    assert (decorrelation(logits) >= 0).all()
    assert torch.allclose(decorrelation(logits[:, :1]), torch.zeros((), dtype=D), atol=1e-12)
    assert torch.allclose(decorrelation(logits[:, :1].expand(-1, 3, -1)), torch.zeros((), dtype=D), atol=1e-12)
    (slope,) = torch.autograd.grad(decorrelation(logits).sum(), logits)
    torch.testing.assert_close(slope, (p - whole[:, None]).detach() / 5)  # nothing comes of the whole's own slope
    moved = (logits + 0.01 * slope).detach()  # down the loss with a weight below zero
    assert decorrelation(moved).sum() > decorrelation(logits).sum()


def test_losses_are_sums_over_heads_and_the_sum_of_logits_speaks():
    out, y = torch.randn(4, 3, 5, dtype=D), torch.tensor([0, 4, -100, 2])
    head = Gramian(5, **SMALL)
    known = head.known(y)
    each = sum(F.cross_entropy(out[known][:, k], y[known], label_smoothing=0.1, reduction="none") for k in range(3))
    torch.testing.assert_close(head.losses(out, y, known), each - 0.8 * decorrelation(out[known]))
    sigmoid = Gramian(5, **SMALL, base="bce", smoothing=0.0, decorrelation=0.0)
    soft = F.one_hot(y[known], 5).to(D)[:, None].expand(-1, 3, -1)
    brute = F.binary_cross_entropy_with_logits(out[known], soft, reduction="none").mean(-1).sum(-1)
    torch.testing.assert_close(sigmoid.losses(out, y, known), brute)
    assert torch.equal(head.predict(out), out.mean(1).argmax(-1))
    assert torch.equal(head.predict(out), head.predict(out[:, [2, 0, 1]]))
    torch.testing.assert_close(head.losses(out, y, known), head.losses(out[:, [2, 0, 1]], y, known))
    one = Gramian(5, **(SMALL | {"count": 1}), smoothing=0.0)
    torch.testing.assert_close(
        one.losses(out[:, :1], y, known), F.cross_entropy(out[known][:, 0], y[known], reduction="none")
    )


def test_what_it_costs():
    c, g, e, classes = 8, 4, 4, 3
    triangle = g * (g + 1) // 2
    weights = c * g + triangle * c // 2 + 3 * c * e + e * c + 2 * 4 * c * c // 4 + c * classes
    rest = 2 * g + 2 * c + 4 * c + 3 * e + c + 4 * c + c + 2 * c + classes  # norms, biases, gammas
    assert sum(p.numel() for p in made()[1].parameters()) == 3 * (weights + rest)
    assert Gramian(10).numbers == 18528


def test_it_reads_maps_and_learns_beside_other_heads():
    torch.manual_seed(0)
    trunk = nn.Conv2d(1, 8, 3, padding=1)
    net = MultiHead(trunk, {"y": Gramian(2, **SMALL), "z": "regression(pool=mean)"}, width=8)
    x, y = torch.randn(16, 1, 4, 4), torch.arange(16) % 2
    x[y == 1, :, ::2] *= 3
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(30):
        optimiser.zero_grad()
        net(x, targets={"y": y, "z": y.float()}).loss.backward()
        optimiser.step()
    assert (net.predict(x)["y"] == y).float().mean() > 0.9
    assert net.metrics(net.measure(net(x).outputs, {"y": y}))["y"]["accuracy"] > 0.9


@pytest.mark.parametrize(("options", "says"), [
    (dict(count=0), "at least 1"),
    (dict(width=6, attention=4), "width=6 is no multiple of attention=4"),
    (dict(gram=4, groups=3), "gram=4 gives 10 numbers, no multiple of groups=3"),
    (dict(hidden=3), "plain module"),
])  # fmt: skip
def test_options_that_cannot_be(options, says):
    with pytest.raises(OptionError, match=says):
        Gramian(3, **(SMALL | options))


def test_widths_that_do_not_fit():
    with pytest.raises(ValueError, match="head 'y': features 6 wide are no multiple of mlp_groups=4"):
        MultiHead(nn.Identity(), {"y": Gramian(3, **SMALL)}, width=6)
    with pytest.raises(ValueError, match=r"head 'y': it reads \[rows, tokens, width\]"):
        MultiHead(nn.Identity(), {"y": Gramian(3, **SMALL)}, width=8)(torch.zeros(2, 8))
