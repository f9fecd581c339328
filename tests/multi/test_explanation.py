"""Heads that say what spoke for a class."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from manyheads.multi import Explanation, Gate, MultiHead, exits, explain, leave_early, saliency

D = torch.float64


class Trunk(nn.Module):
    def __init__(self, gate=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.gate, self.width = gate, 6

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.gate is None else self.gate(x)


def model(**options):
    torch.manual_seed(0)
    return MultiHead(Trunk(), exits("y", Explanation(3, inner=4, **options), ["blocks.0", "blocks.1"])).to(D).eval()


def x(rows=4, seed=1):
    return torch.randn(rows, 5, 6, dtype=D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reduction", [0, 2])
def test_evidence_is_complete(reduction):
    net = model(reduction=reduction)
    head, own = net.heads["y"], net.net("y")
    features = net.trunk(x())
    evidence = head.evidence(own, features)
    torch.testing.assert_close(evidence.mean(1) + own.classify.bias, net(x()).outputs["y"])
    assert torch.equal(own.matrix(), own.classify.weight @ own.project.weight)
    if not reduction:  # no gate: class activation maps
        torch.testing.assert_close(evidence, torch.einsum("cw,bpw->bpc", own.matrix(), features))
    picked = head.evidence(own, features, torch.tensor([2, 0, 1, 1]))
    assert torch.equal(picked[1], evidence[1, :, 0]) and torch.equal(picked[2], evidence[2, :, 1])


def test_padding_is_not_read_and_places_have_no_order():
    net, mask = model(), torch.ones(4, 5, dtype=torch.bool)
    mask[1, 3:] = False
    out = net(x(), mask=mask).outputs["y"]
    torch.testing.assert_close(out[1], net(x()[1:2, :3]).outputs["y"][0])
    order = torch.tensor([3, 0, 4, 1, 2])
    names = list(net.heads)
    torch.testing.assert_close(net(x()[:, order]).outputs["y"], net(x()).outputs["y"])
    found, classes = explain(net, x(), heads=names)
    torch.testing.assert_close(explain(net, x()[:, order], heads=names)[0], found[:, order])
    assert torch.equal(classes, net(x()).outputs["y"].argmax(-1))
    assert found.min() >= 0 and found.max() <= 1
    padded, _ = explain(net, x(), heads=names, mask=mask, classes=classes)
    assert (padded[1, 3:] == 0).all()
    torch.testing.assert_close(padded[1, :3], explain(net, x()[1:2, :3], heads=names, classes=classes[1:2])[0][0])


def test_maps_are_of_each_depth_scaled_and_their_mean():
    one = torch.tensor([[-1.0, 1.0, 3.0, 2.0], [0.5, 0.5, 0.5, 0.5]])
    two = torch.tensor([[2.0, -4.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
    torch.testing.assert_close(saliency([one, two])[0], torch.tensor([0.5, 1 / 6, 0.5, 1 / 3]))
    assert (saliency([one, two])[1] == 0).all()  # constant: nothing stands out, and nothing is not a number
    fine = torch.rand(2, 16)
    stretched = F.interpolate(saliency([one]).unflatten(1, (2, 2))[:, None], (4, 4), mode="bilinear").flatten(1)
    torch.testing.assert_close(saliency([one, fine], grids=[(2, 2), (4, 4)]), (stretched + saliency([fine])) / 2)
    assert saliency([one, fine]).shape == (2, 16)


def test_a_gate_is_between_zero_and_the_features_and_may_stand_in_the_trunk():
    gate = Gate(6, 3).to(D)
    g = gate(x()) / x()
    assert ((g > 0) & (g < 1)).all()
    gate.residual = True
    torch.testing.assert_close(gate(x()), x() * (1 + g))
    with torch.no_grad():
        gate.up.weight.zero_()
        gate.up.bias.fill_(100.0)
    torch.testing.assert_close(gate(x()), 2 * x())
    net = MultiHead(Trunk(Gate(6, residual=True)), {"y": Explanation(3, reduction=0)}).to(D)
    net(x(), targets={"y": torch.tensor([0, 1, 2, -100])}).loss.backward()
    assert (net.trunk.gate.up.weight.grad != 0).any()


def test_early_heads_of_no_weight_teach_nothing_and_rows_may_leave_early():
    torch.manual_seed(0)
    heads = exits("y", Explanation(3), ["blocks.0"], weight=0.0)
    net, y = MultiHead(Trunk(), heads).to(D), torch.tensor([0, 1, 2, 1])
    out = net(x(), targets={"y": y})
    torch.testing.assert_close(out.loss, out.losses["y"])
    classes, taken = leave_early(net.eval(), x(), exits=["y@blocks.0", "y"], confidence=0.0)
    assert taken.tolist() == [0] * 4 and torch.equal(classes, net(x()).outputs["y@blocks.0"].argmax(-1))


def test_what_is_refused():
    with pytest.raises(ValueError, match="inner=0"):
        Explanation(3, inner=0)
    with pytest.raises(ValueError, match="hidden and dropout would stand between"):
        Explanation(3, hidden=4)
    with pytest.raises(ValueError, match="head 'z': it is no explanation head"):
        explain(model(), x(), heads=["z"])
    for wrong in (torch.full((len(x()),), 3), torch.full((len(x()),), -1)):
        with pytest.raises(ValueError, match=r"head 'y': class -?\d is none of 0 to 2"):
            explain(model(), x(), heads="y", classes=wrong)
    for wrong in (torch.zeros(1).long(), torch.zeros(len(x()))):
        with pytest.raises(ValueError, match="head 'y': classes are whole numbers"):
            explain(model(), x(), heads="y", classes=wrong)
    with pytest.raises(ValueError, match="grids"):
        saliency([torch.rand(2, 4)], grids=[(2, 3)])
