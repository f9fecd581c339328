"""A velocity and a flow map on one sample: the losses, and what exact heads would do."""

import pytest
import torch

from manyheads.multi import flow_map_loss, sample_flow

D, S = torch.float64, 0.6  # the data are normal with deviation S


def deviation(t):
    return ((1 - t) ** 2 * S**2 + t**2).sqrt()


def exact(x, t, r):
    """The velocity E[z - x | x_t], and the mean of it along the flow, of normal data."""
    t, r = t[:, None], r[:, None]
    v = (t - (1 - t) * S**2) / deviation(t) ** 2 * x
    gap = torch.where(t == r, 1.0, t - r)
    return v, torch.where(t == r, v, (1 - deviation(r) / deviation(t)) * x / gap)


def draw(rows=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, z = (torch.randn(rows, 3, dtype=D, generator=g) for _ in "xz")
    t, r = torch.rand(2, rows, dtype=D, generator=g).sort(0, descending=True).values
    return S * x, z, 0.05 + 0.9 * t, 0.05 + 0.9 * r


class Net(torch.nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh())
        self.v, self.u = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
        self.tied = tied
        self.to(D)

    def forward(self, x, t, r):
        h = self.trunk(torch.cat([x, t[:, None], r[:, None]], -1))
        return self.v(h), (self.v if self.tied else self.u)(h)


def test_exact_heads_hold_the_identity_and_a_step_of_any_length():
    x, z, t, r = draw()
    at = (1 - t[:, None]) * x + t[:, None] * z
    v, u = exact(at, t, r)
    along = (v, torch.ones_like(t), torch.zeros_like(r))
    _, slope = torch.func.jvp(lambda *given: exact(*given)[1], (at, t, r), along)
    torch.testing.assert_close(u + (t - r)[:, None] * slope, v)
    whole = sample_flow(exact, z)
    torch.testing.assert_close(whole, S * z)  # the flow of this path scales by deviations
    torch.testing.assert_close(sample_flow(exact, z, 2), whole)
    torch.testing.assert_close(sample_flow(exact, z, [1, 0.7, 0.1, 0]), whole)
    torch.testing.assert_close(sample_flow(exact, z, 400, head="velocity"), whole, rtol=2e-2, atol=2e-2)
    assert not torch.allclose(sample_flow(exact, z, 1, head="velocity"), whole, rtol=0.1)


def test_exact_heads_lose_what_the_samples_vary_and_others_more():
    x, z, t, r = draw(60_000)
    _, by_v, by_u = flow_map_loss(exact, x, z, t, r)
    rest = (S**2 / deviation(t) ** 2).mean()  # Var(z - x | x_t)
    torch.testing.assert_close(by_v, rest, rtol=0.03, atol=0)
    torch.testing.assert_close(by_u, rest, rtol=0.03, atol=0)
    for scale in (0.9, 1.1):
        _, worse_v, worse_u = flow_map_loss(lambda *given: tuple(scale * each for each in exact(*given)), x, z, t, r)  # noqa: B023
        assert worse_v > by_v and worse_u > by_u


def test_losses_by_hand_and_where_no_gradient_goes():
    net, (x, z, t, r) = Net(), draw()
    total, by_v, by_u = flow_map_loss(net, x, z, t, r)
    at = (1 - t[:, None]) * x + t[:, None] * z
    v, u = net(at, t, r)

    def mean(h):
        return net(at + h * v.detach(), t + h, r)[1]

    slope = ((mean(1e-5) - mean(-1e-5)) / 2e-5).detach()
    torch.testing.assert_close(by_v, (v - (z - x)).square().mean())
    torch.testing.assert_close(by_u, (u + (t - r)[:, None] * slope - (z - x)).square().mean())
    torch.testing.assert_close(total, by_v + by_u)
    by_u.backward()
    assert net.v.weight.grad is None  # it enters by the tangent alone
    u = net(at.detach(), t, r)[1]
    (want,) = torch.autograd.grad((u + (t - r)[:, None] * slope - (z - x)).square().mean(), net.u.weight)
    torch.testing.assert_close(net.u.weight.grad, want)


def test_differences_become_the_derivative():
    net, given = Net(), draw()
    for tangent in ("velocity", "path"):
        forward = flow_map_loss(net, *given, tangent=tangent)[2]
        gaps = [
            abs(flow_map_loss(net, *given, tangent=tangent, derivative="difference", eps=eps)[2] - forward)
            for eps in (1e-2, 1e-3)
        ]
        assert gaps[1] < 1e-5 and gaps[1] < gaps[0]
    still = flow_map_loss(net, *given, clamp=0.0)[2]
    u = net((1 - given[2][:, None]) * given[0] + given[2][:, None] * given[1], *given[2:])[1]
    torch.testing.assert_close(still, (u - (given[1] - given[0])).square().mean())


def test_no_way_to_go_is_flow_matching_and_weights_level_samples():
    net, (x, z, t, _) = Net(tied=True), draw()
    _, by_v, by_u = flow_map_loss(net, x, z, t, t)
    torch.testing.assert_close(by_u, by_v)
    total, *_ = flow_map_loss(net, x, z, t, t, adaptive=True)
    each = (net((1 - t[:, None]) * x + t[:, None] * z, t, t)[0] - (z - x)).square().mean(1)
    torch.testing.assert_close(total, 2 * (each / (each + 0.01)).mean())


def test_two_heads_learn_and_one_step_finds_the_spread():
    torch.manual_seed(0)
    net = Net()
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for step in range(120):
        x, z, *_ = draw(64, seed=step)
        t = torch.rand(64, dtype=D)
        optimiser.zero_grad()
        flow_map_loss(net, x, z, t, torch.zeros_like(t))[0].backward()
        optimiser.step()
    made = sample_flow(net, torch.randn(2000, 3, dtype=D))
    assert abs(made.std().item() - S) < 0.2  # noise has 1


def test_what_is_refused():
    x, z, t, r = draw()
    with pytest.raises(ValueError, match="derivative='exact'"):
        flow_map_loss(exact, x, z, t, r, derivative="exact")
    with pytest.raises(ValueError, match="tangent='x'"):
        flow_map_loss(exact, x, z, t, r, tangent="x")
    with pytest.raises(ValueError, match="times are 0 <= r <= t <= 1"):
        flow_map_loss(exact, x, z, r, t)
    with pytest.raises(ValueError, match="x and z alike"):
        flow_map_loss(exact, x, z[:2], t, r)
    with pytest.raises(ValueError, match="steps=0"):
        sample_flow(exact, z, 0)
    with pytest.raises(ValueError, match="head='both'"):
        sample_flow(exact, z, head="both")
