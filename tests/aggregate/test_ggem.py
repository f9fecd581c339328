"""Group generalized mean pooling (arXiv 2212.04114)."""

import pytest
import torch

from manyheads.aggregate import build


def positive(rows=3, tokens=7, width=8):
    return torch.rand(rows, tokens, width, dtype=torch.float64) + 0.1


def pool(p, line="ggem(groups=2)"):
    agg = build(line, 8).double()
    torch.nn.init.constant_(agg.p, p)
    return agg


def test_by_its_equation():
    x, agg = torch.randn(3, 7, 8).double(), pool(3.0, "ggem(groups=4)")
    agg.p.data = torch.tensor([1.0, 2.5, 3.0, 0.5]).double()
    p = agg.p.data.repeat_interleave(2)
    torch.testing.assert_close(agg(x).out[:, 0], (x.clamp(min=1e-6) ** p).mean(1) ** (1 / p))
    assert sum(each.numel() for each in agg.parameters()) == 4


def test_mean_maximum_geometric_mean_and_what_lies_between():
    x = positive()
    torch.testing.assert_close(pool(1.0)(x).out[:, 0], x.mean(1))
    torch.testing.assert_close(pool(3000.0)(x).out[:, 0], x.amax(1), rtol=2e-3, atol=0)
    torch.testing.assert_close(pool(1e-5)(x).out[:, 0], x.log().mean(1).exp(), rtol=1e-4, atol=0)
    found = torch.stack([pool(p)(x).out[:, 0] for p in (0.3, 1.0, 2.0, 5.0, 20.0)])
    assert (found.diff(dim=0) >= 0).all()
    assert (found >= x.amin(1) - 1e-12).all() and (found <= x.amax(1) + 1e-12).all()


def test_constant_tokens_scale_and_doubling():
    x = positive()
    for p in (0.5, 3.0, 40.0):
        torch.testing.assert_close(pool(p)(x[:, :1].expand(-1, 5, -1)).out, x[:, :1])
        torch.testing.assert_close(pool(p)(2.5 * x).out, 2.5 * pool(p)(x).out)
        torch.testing.assert_close(pool(p)(torch.cat([x, x], 1)).out, pool(p)(x).out)


@pytest.mark.parametrize("groups", [1, 8])
def test_groups_from_one_to_every_channel(groups):
    x, agg = positive(), pool(3.0, f"ggem(groups={groups})")
    agg.p.data = torch.linspace(1, 4, groups).double()
    for c in range(8):
        p = agg.p[c * groups // 8]
        torch.testing.assert_close(agg(x).out[:, 0, c], (x[..., c] ** p).mean(1) ** (1 / p))


def test_nothing_overflows():
    x = torch.full((1, 3, 8), 100.0)
    assert (x**20.0).isinf().all()
    agg = build("ggem(groups=2, start=20.0)", 8)
    torch.testing.assert_close(agg(x).out[0, 0], x[0, 0])
    assert build("ggem(groups=2, start=20.0)", 8).bfloat16()(x.bfloat16()).out.dtype == torch.bfloat16


def test_an_exponent_learns_of_its_group_alone():
    agg = pool(3.0, "ggem(groups=4)")
    agg(positive()).out[..., 2:4].sum().backward()
    assert (agg.p.grad != 0).tolist() == [False, True, False, False]


def test_below_eps_there_is_no_gradient_but_signed_has_one():
    x = -positive().requires_grad_()
    assert torch.autograd.grad(pool(3.0)(x).out.sum(), x)[0].abs().max() == 0
    signed = pool(3.0, "ggem(groups=2, negatives=signed)")
    torch.testing.assert_close(signed(x).out, -signed(-x).out)
    mixed = torch.randn(3, 7, 8).double()
    mean = (mixed.sign() * mixed.abs() ** 3).mean(1)
    torch.testing.assert_close(signed(mixed).out[:, 0], mean.sign() * mean.abs() ** (1 / 3))
    shift = pool(3.0, "ggem(groups=2, negatives=shift)")
    shift.shift.data += 2.0
    y = mixed.clamp(min=-1.5)
    torch.testing.assert_close(shift(y).out[:, 0], ((y + 2) ** 3).mean(1) ** (1 / 3))


@pytest.mark.parametrize("line", ["ggem(groups=3)", "ggem(groups=0)", "ggem(start=0.0)", "ggem(eps=-1.0)"])
def test_refusals(line):
    with pytest.raises(ValueError, match=r"divide|at least 1|above 0"):
        build(line, 8)
