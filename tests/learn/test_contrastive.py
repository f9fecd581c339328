"""Adaptive multi-head contrast against its formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal

from manyheads.core.check import OptionError
from manyheads.learn import (
    Projections,
    Temperature,
    adaptive_barlow,
    adaptive_contrast,
    adaptive_simclr,
    adaptive_simsiam,
    omega,
)

D = torch.float64


def rows(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def temperature(width=5, heads=3, seed=0, **options):
    torch.manual_seed(seed)
    made = Temperature(width, heads, hidden=7, **options).to(D)
    torch.nn.init.normal_(made.out)
    return made


def test_one_head_of_one_temperature_is_the_limit_of_the_plain_loss():
    z, other = rows(1, 6, 5), rows(1, 6, 5, seed=1)
    found = adaptive_contrast(z, other, other, 0.3, beta=0.0, barred=torch.eye(6, dtype=torch.bool))
    s = F.normalize(z[0], dim=-1) @ F.normalize(other[0], dim=-1).T
    best = s.masked_fill(torch.eye(6, dtype=torch.bool), -math.inf).amax(-1)
    torch.testing.assert_close(found, ((best - s.diag()) / 0.3).mean())
    plain = torch.relu(best - s.diag()).mean()
    tau = 1e-3
    torch.testing.assert_close(tau * F.cross_entropy(s / tau, torch.arange(6)), plain, rtol=1e-3, atol=1e-3)
    same = adaptive_contrast(z, other, other, tau, beta=0.0, barred=torch.eye(6, dtype=torch.bool), with_positive=True)
    torch.testing.assert_close(tau * same, plain)


@pytest.mark.parametrize("soft", [False, True])
def test_the_contrast_by_hand(soft):
    z, positive, far = (F.normalize(rows(2, n, 4, seed=seed), dim=-1) for seed, n in enumerate((3, 3, 5)))
    phi, beta, want = temperature(4, 2), 0.7, 0.0
    for c in range(2):
        for i in range(3):
            tau = phi(z[:, i], positive[:, i])[c]
            want += -(z[c, i] @ positive[c, i]) / tau + beta * omega(tau, 4)
            terms = []
            for n in range(5):
                other = phi(z[:, i], far[:, n])[c]
                terms.append((z[c, i] @ far[c, n]) / other - beta * omega(other, 4))
            hardest = int((far[c] @ z[c, i]).argmax())
            want += torch.stack(terms).logsumexp(0) if soft else terms[hardest]
    torch.testing.assert_close(adaptive_contrast(z, positive, far, phi, beta=beta, soft=soft), want / 3)


def test_the_sum_with_one_temperature_is_ntxent():
    z, other = rows(1, 6, 5), rows(1, 6, 5, seed=1)
    found = adaptive_simclr(z, other, 0.3, beta=0.0, soft=True, with_positive=True)
    both = F.normalize(torch.cat([z[0], other[0]]), dim=-1)
    scores = (both @ both.T / 0.3).fill_diagonal_(-math.inf)
    torch.testing.assert_close(found, F.cross_entropy(scores, torch.arange(12).roll(6)))


def test_the_first_half_is_a_gaussian_likelihood():
    width, tau = 4, 0.7
    z, other = (F.normalize(rows(3, width, seed=seed), dim=-1) for seed in (0, 1))
    density = torch.stack(
        [MultivariateNormal(a, tau * torch.eye(width, dtype=D)).log_prob(b) for a, b in zip(z, other, strict=True)]
    )
    half = -(z * other).sum(-1) / tau + omega(torch.tensor(tau, dtype=D), width)
    torch.testing.assert_close(half + width / 2 * math.log(2 * math.pi), -density)


def test_where_the_temperature_is_best():
    beta, width = 0.8, 6
    for s in (-0.5, 0.0, 0.6):
        tau = torch.tensor(2 * (beta - s) / (beta * width), dtype=D, requires_grad=True)
        (slope,) = torch.autograd.grad(-s / tau + beta * omega(tau, width), tau)
        assert abs(slope) < 1e-12
    tau = torch.tensor([2 / 6, 0.1, 1.3], dtype=D, requires_grad=True)
    (slope,) = torch.autograd.grad(omega(tau, 6).sum(), tau)
    torch.testing.assert_close(slope, 6 / (2 * tau) - 1 / tau**2)
    assert abs(slope[0]) < 1e-12
    z = rows(2, 4, 5)
    assert adaptive_simclr(z, z.clone(), temperature(heads=2), beta=0.1).isfinite()  # s = 1 > β: the bound holds


def test_temperatures_stay_between_the_bounds_start_where_told_and_read_the_two_side_by_side():
    a, b = 100 * rows(3, 4, 5), 100 * rows(3, 4, 5, seed=1)
    tau = temperature()(a, b)
    assert tau.shape == (3, 4) and (tau >= 0.05).all() and (tau <= 2).all()
    start = Temperature(5, initial=0.4).to(D)(a, b)
    torch.testing.assert_close(start, torch.full_like(start, 0.4), rtol=1e-6, atol=0)
    phi, a, b = temperature(), a / 100, b / 100
    together = torch.cat([phi.one, phi.other], -1)[1] @ torch.cat([a[1, 2], b[1, 2]])
    score = (together + phi.bias[1]).relu() @ phi.out[1] + phi.level[1]
    torch.testing.assert_close(phi(a, b)[1, 2], 0.05 + 1.95 * score.sigmoid())
    torch.testing.assert_close(phi(a[:, :, None], b[:, None])[:, 1, 3], phi(a[:, 1], b[:, 3]))
    one = temperature(shared=True)
    assert one.one.shape[0] == 1 and one(a, b).shape == (3, 4)
    torch.testing.assert_close(one(a[:1], b[:1]), one(a, b)[:1])


def test_heads_in_any_order_and_equal_heads():
    z, other = rows(1, 5, 4), rows(1, 5, 4, seed=1)
    one = adaptive_simclr(z, other, temperature(4, 1, shared=True))
    three = adaptive_simclr(z.expand(3, -1, -1), other.expand(3, -1, -1), temperature(4, 1, shared=True))
    torch.testing.assert_close(three, 3 * one)
    z, other, order = rows(3, 5, 4), rows(3, 5, 4, seed=1), [2, 0, 1]
    phi = temperature(4)
    found = adaptive_simclr(z, other, phi)
    for parameter in phi.parameters():
        parameter.data = parameter.data[order]
    torch.testing.assert_close(adaptive_simclr(z[order], other[order], phi), found)


def test_one_negative_of_an_anchor_and_head_is_pushed():
    z, other, far = rows(2, 1, 4), rows(2, 1, 4, seed=1), rows(2, 6, 4, seed=2).requires_grad_()
    adaptive_contrast(z, other, far, 0.2).backward()
    assert (far.grad.abs().sum(-1) > 0).sum(-1).tolist() == [1, 1]


def test_negatives_teach_temperatures_only_if_asked():
    z, far = rows(2, 3, 4), rows(2, 6, 4, seed=2)

    def slope(learn):
        phi = temperature(4, 2)
        loss = adaptive_contrast(z, z.roll(1, 1), far, phi, learn_negative=learn, beta=0.5)
        loss.backward()
        return loss.detach(), phi.out.grad

    (one, short), (two, whole) = slope(False), slope(True)
    assert one == two and not torch.allclose(short, whole)
    phi = temperature(4, 2)
    tau = phi(F.normalize(z, dim=-1), F.normalize(z.roll(1, 1), dim=-1))
    s = F.cosine_similarity(z, z.roll(1, 1), dim=-1)
    (-s / tau + 0.5 * omega(tau, 4)).mean(1).sum().backward()
    torch.testing.assert_close(phi.out.grad, short)


def test_simsiam_and_barlow_by_hand():
    z, other, h, k = (rows(2, 5, 4, seed=seed) for seed in range(4))
    h.requires_grad_()
    z.requires_grad_()
    phi = temperature(4, 2)
    found = adaptive_simsiam(z, other, h, k, phi, beta=0.3)
    want = 0
    for c in range(2):
        for a, b in ((z, k), (other, h)):
            a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
            tau = phi(a, b)[c]
            want = want + (-(a * b).sum(-1)[c] / (2 * tau) + 0.3 * omega(tau, 4)).mean()
    torch.testing.assert_close(found, want)
    found.backward()
    assert h.grad is None and z.grad is not None
    one, two, phi = rows(2, 5, 3), rows(2, 5, 3, seed=1), temperature(5, 2)
    norm = [(x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True) for x in (one, two)]
    want = 0
    for c in range(2):
        for l in range(3):
            for m in range(3):
                pair = [x[..., at][:, None] for x, at in zip(norm, (l, m), strict=True)]
                r, tau = (pair[0][c, 0] * pair[1][c, 0]).mean(), phi(*pair)[c, 0]
                if l == m:
                    want = want + (1 - r / tau) ** 2 + 0.3 * omega(tau, 3)
                else:
                    want = want + 0.01 * r**2 / tau - 0.3 * omega(tau, 3)
    torch.testing.assert_close(adaptive_barlow(one, two, phi, beta=0.3, redundancy=0.01), want)


def test_projections_are_networks_of_their_own():
    net, x = Projections(6, 3, hidden=8, width=4), torch.randn(5, 6)
    assert net(x).shape == (3, 5, 4)
    assert sum(p.numel() for p in net.parameters()) == 3 * (6 * 8 + 8 + 8 * 4 + 4)


def test_what_is_refused():
    with pytest.raises(OptionError, match=r"low=0\.2, initial=0\.1"):
        Temperature(4, low=0.2)
    with pytest.raises(ValueError, match=r"are not \[heads, B, width\]"):
        adaptive_contrast(rows(2, 3, 4), rows(2, 3, 4), rows(1, 3, 4), 0.1)
    with pytest.raises(ValueError, match="an anchor has no negative"):
        adaptive_simclr(rows(2, 1, 4), rows(2, 1, 4), 0.1)
    for wrong in ((rows(2, 0, 4), rows(2, 0, 4)), (rows(0, 3, 4), rows(0, 3, 4))):
        with pytest.raises(ValueError, match="none of them 0"):
            adaptive_simclr(*wrong, 0.1)
        with pytest.raises(ValueError, match="without a 0"):
            adaptive_simsiam(*wrong, *wrong, 0.1)
    with pytest.raises(ValueError, match="none of them 0"):
        adaptive_contrast(rows(2, 3, 4), rows(2, 3, 4), rows(2, 0, 4), 0.1)
    with pytest.raises(ValueError, match="are not twice the same"):
        adaptive_simclr(rows(2, 3, 4), rows(2, 3, 5), 0.1)
    with pytest.raises(ValueError, match=r"features are \[B, 6\], not \[2, 5\]"):
        Projections(6)(rows(2, 5))
    for shapes in (
        ((2, 3, 5), (2, 3, 5)),
        ((3, 3, 4), (3, 3, 4)),
        ((2, 3, 4), (2, 2, 4)),
        ((2, 4), (2, 1, 4)),
        ((4,), (4,)),
    ):
        with pytest.raises(ValueError, match=r"pairs are \[2, …, 4\] each, not"):
            Temperature(4, 2)(*(torch.zeros(shape) for shape in shapes))
    with pytest.raises(ValueError, match="barred is"):
        adaptive_contrast(rows(2, 3, 4), rows(2, 3, 4), rows(2, 5, 4), 0.1, barred=torch.zeros(3, 3).bool())
    with pytest.raises(ValueError, match="one shape"):
        adaptive_simsiam(rows(2, 3, 4), rows(2, 3, 4), rows(2, 3, 5), rows(2, 3, 4), 0.1)
    with pytest.raises(ValueError, match="twice the same"):
        adaptive_barlow(rows(2, 1, 4), rows(2, 1, 4), 0.1)
