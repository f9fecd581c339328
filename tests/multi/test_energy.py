"""Energies of several methods on one trunk of atoms."""

import pytest
import torch
from torch import nn

from manyheads.multi import Energy, MultiHead, element_energies, force_losses, forces

D = torch.float64
METHODS = {"pbe": "energy(hidden=5)", "ccsd": "energy(hidden=5, shift=1.0, scale=2.0)"}


class Atoms(nn.Module):
    """Features of atoms from distances; far atoms do not see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(3, 4)

    def forward(self, positions, mask=None):
        square = (positions[:, :, None] - positions[:, None]).square().sum(-1)
        near = (-square).exp() if mask is None else (-square).exp() * mask[:, None]
        return self.make(torch.stack([near.sum(-1), (near**2).sum(-1), (near**3).sum(-1)], -1)).tanh()


def model() -> MultiHead:
    torch.manual_seed(0)
    return MultiHead(Atoms(), METHODS, width=4).to(D)


def test_an_energy_is_extensive_and_padding_is_nothing():
    net, x = model(), torch.randn(1, 3, 3, dtype=D)
    one = net.predict(x)
    two = net.predict(torch.cat([x, x + 100], 1))
    padded = torch.cat([x, torch.randn(1, 2, 3, dtype=D)], 1)
    masked = net.predict(padded, mask=torch.tensor([[True] * 3 + [False] * 2]))
    for name in METHODS:
        torch.testing.assert_close(two[name], 2 * one[name])
        torch.testing.assert_close(masked[name], one[name])
    head, net_ = Energy(), nn.Linear(4, 1).to(D)
    f = torch.randn(1, 3, 4, dtype=D)
    f[:, 2] = float("nan")
    mask = torch.tensor([[True, True, False]])
    head.output(net_, f, mask).sum().backward()
    assert net_.weight.grad.isfinite().all()


def test_a_sample_teaches_its_own_method_and_the_trunk():
    net, x = model(), torch.randn(4, 3, 3, dtype=D)
    y = {"pbe": torch.tensor([1.0, 2.0, float("nan"), float("nan")], dtype=D)}
    out = net(x, targets=y)
    energy = net.predict(x)["pbe"]
    torch.testing.assert_close(out.losses["pbe"], (((energy - y["pbe"])[:2] / 3) ** 2).mean())
    out.loss.backward()
    assert all(p.grad is None for p in net.net("ccsd").parameters())
    assert all(p.grad is not None for p in [*net.net("pbe").parameters(), *net.trunk.parameters()])


def test_masked_blocks_of_one_network_are_networks_apart():
    """All heads as one linear map, others' blocks times 0, as MACE lays them out."""
    net, f = model(), torch.randn(7, 4, dtype=D)
    nets = [net.net(name) for name in METHODS]
    wide = torch.cat([each[0].weight for each in nets]), torch.cat([each[0].bias for each in nets])
    hidden = nn.functional.gelu(f @ wide[0].T + wide[1])
    last = torch.block_diag(*[each[2].weight for each in nets])
    for number, each in enumerate(nets):
        only = torch.zeros(10, dtype=D)
        only[5 * number : 5 * number + 5] = 1
        torch.testing.assert_close((hidden * only) @ last[number] + each[2].bias, each(f).squeeze(-1))


def test_constants_an_element_go_to_the_offsets_and_nowhere_else():
    composition = torch.tensor([[1, 2], [2, 1], [3, 3], [0, 4]], dtype=D)
    labels = torch.randn(4, dtype=D)
    labels[2] = float("nan")
    plain = element_energies(composition, labels)
    moved = element_energies(composition, labels + composition @ torch.tensor([5.0, -3.0], dtype=D))
    torch.testing.assert_close(moved - plain, torch.tensor([5.0, -3.0], dtype=D))
    torch.testing.assert_close(
        labels - composition @ plain, labels + composition @ (moved - plain) - composition @ moved, equal_nan=True
    )
    never = element_energies(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([3.0, 6.0]))
    torch.testing.assert_close(never, torch.tensor([3.0, 0.0]))
    with pytest.raises(ValueError, match="no energy is known"):
        element_energies(composition, torch.full((4,), float("nan")))
    with pytest.raises(ValueError, match=r"composition is \[4, 2\] and energies are \[3\]"):
        element_energies(composition, labels[:3])


def test_forces_are_the_slope_of_the_head_that_is_asked():
    net = model()
    x = torch.randn(2, 3, 3, dtype=D, requires_grad=True)
    found = forces(net(x, heads=["ccsd"]).outputs["ccsd"][:, 0], x)
    step = torch.zeros_like(x)
    step[1, 2, 0] = 1e-5
    up, down = (net.predict((x + sign * step).detach())["ccsd"] for sign in (1, -1))
    torch.testing.assert_close(found[1, 2, 0], -(up - down)[1] / 2e-5, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.sum(1), torch.zeros(2, 3, dtype=D), rtol=0, atol=1e-10)
    target = torch.zeros_like(found)
    target[0] = float("nan")
    losses = force_losses(forces(net(x, heads=["pbe"]).outputs["pbe"][:, 0], x, train=True), target)
    assert losses[0].isnan() and losses[1] > 0
    losses[1].backward()
    assert net.trunk.make.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="requires_grad_"):
        forces(net(x).outputs["pbe"][:, 0], x.detach())
    with pytest.raises(ValueError, match="one number"):
        Energy(size=2)
