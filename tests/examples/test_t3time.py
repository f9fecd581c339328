"""A forecaster of three views: its forecasts follow level and scale; heads that say the same are not told apart."""

import pytest
import torch
from examples.t3time import Forecaster, draw, errors, prompts, train, unlike


def test_the_forecast_follows_level_and_scale():
    model = Forecaster().double().eval()
    x, text = draw(4)[0].double(), prompts(4).double()
    with torch.no_grad():
        found = model(x, text)
        torch.testing.assert_close(model(3 * x - 7, text), 3 * found - 7, atol=1e-3, rtol=1e-4)
    assert unlike(Forecaster().eval()) < 1e-3


def test_a_series_that_does_not_move_is_finite_with_its_gradient():
    model, x = Forecaster(), draw(3)[0]
    x[:, :, 1] = 2.5
    x.requires_grad_()
    found = model(x, prompts(3))
    found.square().sum().backward()
    assert found.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_heads_alike_are_one_head():
    model = Forecaster(heads=3).double().eval()
    for head in model.heads[1:]:
        head.load_state_dict(model.heads[0].state_dict())
    z, text = torch.randn(2, 4, 16).double(), prompts(2).double()
    said = model.align(z, text)
    torch.testing.assert_close(model.mix.mix(said), said[0])


def test_residual_without_heads():
    model = Forecaster().double().eval()
    torch.nn.init.zeros_(model.residual.alpha)
    x = draw(2)[0].double()
    torch.testing.assert_close(model(x, prompts(2).double()), model(x, -prompts(2).double()))


@pytest.mark.slow
def test_it_learns():
    found, naive = errors(train("t3time", 0, 100))
    assert found < 0.5 * naive
