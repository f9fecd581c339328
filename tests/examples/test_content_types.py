"""Bytes, several heads, slices: padding is nothing, missing labels teach nothing, one byte has no spread."""

import torch
import torch.nn.functional as F
from examples.content_types import HEADS, KINDS, WIDTH, Bytes, statistics, texts, train, verdict

import manyheads as mh


def test_padding_changes_nothing_and_statistics_are_of_what_is_real():
    torch.manual_seed(0)
    trunk = Bytes().double().eval()
    ids, mask, _ = texts(6, torch.Generator().manual_seed(0))
    torch.testing.assert_close(trunk(F.pad(ids, (0, 5), value=9), F.pad(mask, (0, 5))), trunk(ids, mask))
    x, one = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True), torch.zeros(2, 4, dtype=torch.bool)
    one[:, 1] = True
    mean, most, spread = statistics(x, one).chunk(3, -1)
    assert torch.equal(mean, most) and (spread.abs() < 1e-9).all()
    statistics(x, one).sum().backward()
    assert x.grad.isfinite().all()
    every = torch.ones(2, 4, dtype=torch.bool)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(statistics(x[:, order], every), statistics(x, every))
    torch.testing.assert_close(statistics(x, every)[:, 6:], x.std(1, correction=0), rtol=1e-3, atol=2e-4)


def test_a_head_without_labels_has_no_gradient_and_heads_are_apart():
    torch.manual_seed(0)
    net = mh.multi.MultiHead(Bytes(), HEADS, width=3 * WIDTH)
    ids, mask, targets = texts(4, torch.Generator().manual_seed(0))
    targets["fine"][:] = -100
    net(ids, mask=mask, targets=targets).loss.backward()
    assert all(p.grad is None for p in net.net("fine").parameters())
    net.eval()
    few = net.extract(["coarse", "risk"])
    assert all(torch.equal(few(ids, mask=mask).outputs[k], net(ids, mask=mask).outputs[k]) for k in few.heads)
    assert sum(p.numel() for p in net.nets.parameters()) == sum((3 + 6 + 2) * (d + 1) for d in (8, 24, 72))


def test_it_learns_and_hears_a_fine_head_only_where_the_kind_has_one():
    model = train(60)
    ids, mask, targets = texts(128, torch.Generator().manual_seed(5))
    with torch.no_grad():
        outputs = model(ids, mask=mask).outputs
    figures = model.metrics(model.measure(outputs, targets))
    assert figures["coarse"]["accuracy"] > 0.9 and figures["coarse"]["accuracy@8"] > 0.8
    said = verdict(outputs)
    assert all((fine is None) == (kind in ("numbers", "undetected")) for kind, fine, _ in said)
    assert {kind for kind, _, _ in said} >= set(KINDS)
    assert {kind for kind, _, _ in verdict({k: v * 0 for k, v in outputs.items()})} == {"undetected"}
