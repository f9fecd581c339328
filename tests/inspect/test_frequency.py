"""Frequencies and variance of features, and the loss around trained weights."""

import pytest
import torch
import torch.nn.functional as F
from tests.inspect import models

from manyheads.inspect import measures
from manyheads.inspect.measures import Grid


def noise(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_spectra_of_known_features():
    flat = measures.amplitudes(torch.ones(2, 3, 8, 8, dtype=torch.float64))
    assert flat[0] == 0 and (flat[1:] < -15).all() and measures.position_variance(torch.ones(2, 3, 8, 8)) == 0
    white = noise(64, 16, 8, 8)
    # where the transform is real, at 0 and π, the mean of the log is ln 2 / 2 lower
    line = measures.amplitudes(white)
    assert line.shape == (5,) and line[[0, -1]].abs().max() < 0.1 and (line[1:-1] - 0.35).abs().max() < 0.1
    wide = F.pad(white, (1, 1, 1, 1), "circular")
    blurred = F.avg_pool2d(wide, 3, 1)
    assert measures.amplitudes(blurred)[-1] < measures.amplitudes(white)[-1] - 1
    for shape in ((4, 3, 9), (4, 3, 6, 10)):
        assert measures.amplitudes(noise(*shape)).shape == (min(shape[2:]) // 2 + 1,)
    with pytest.raises(ValueError, match="features"):
        measures.amplitudes(noise(3, 4))


def test_averaging_never_raises_the_variance():
    z = noise(2, 3, 16)
    a = noise(16, 16).exp()
    for _ in range(200):  # doubly stochastic
        a = a / a.sum(0, keepdim=True)
        a = a / a.sum(1, keepdim=True)
    assert measures.position_variance(z @ a.T) < measures.position_variance(z)
    assert measures.position_variance(z.mean(-1, keepdim=True).expand_as(z)) < 1e-20
    order = torch.randperm(16)
    assert measures.position_variance(z[..., order]) == pytest.approx(measures.position_variance(z))


def test_blocks_of_a_vision_model():
    model, images = models.vit(), torch.randn(2, 3, 16, 16)
    found = measures.spectra(model, images, Grid.of(model))
    assert len(found.amplitudes) == len(found.variance) == len(found.highest) == 2
    with torch.no_grad():
        states = model(images, output_hidden_states=True).hidden_states[1]
    z = states[:, 1:].mT.unflatten(-1, (4, 4))
    first = next(iter(found.amplitudes))
    torch.testing.assert_close(found.amplitudes[first], measures.amplitudes(z).double())
    assert found.variance[first] == pytest.approx(measures.position_variance(z))
    with pytest.raises(ValueError, match="there is no module 'x'"):
        measures.spectra(model, images, Grid.of(model), ["x"])
    with pytest.raises(ValueError, match="none of"):
        measures.spectra(model, images, Grid((9, 9)))


def quadratic():
    a = noise(6, 6)
    hessian = a + a.T
    p = torch.nn.Parameter(noise(3, 2))
    return hessian, p, lambda: p.flatten() @ hessian @ p.flatten() / 2


def test_a_quadratic_loss_is_a_parabola_with_known_curvature():
    hessian, p, loss = quadratic()
    before = p.detach().clone()
    values = torch.linalg.eigvalsh(hessian)
    want = values[values.abs().argsort(descending=True)]
    torch.testing.assert_close(measures.curvature(loss, [p], count=6), want)
    torch.testing.assert_close(measures.curvature(loss, [p], count=1, steps=6), want[:1])
    flat = measures.curvature(lambda: 3 * p.sum(), [p], count=2, steps=3)
    assert flat.abs().max() == 0
    d = F.normalize(noise(6), dim=0).view(3, 2)
    line = measures.landscape(loss, [p], [[d]], points=5)
    at = torch.linspace(-1, 1, 5, dtype=torch.float64)
    flat_d, flat_p = d.flatten(), before.flatten()
    torch.testing.assert_close(
        line, loss().detach() + at * (flat_p @ hessian @ flat_d) + at**2 * (flat_d @ hessian @ flat_d) / 2
    )
    plane = measures.landscape(loss, [p], [[d], [0 * d]], points=5)
    assert plane.shape == (5, 5)
    torch.testing.assert_close(plane[:, 2], line)
    assert torch.equal(p, before)
    with pytest.raises(ValueError, match="a line or a plane"):
        measures.landscape(loss, [p], [])


def test_directions_are_as_long_as_the_weights():
    weights = [noise(4, 3), noise(4), noise(2, 3, 3, 3)]
    found = measures.direction(weights)
    torch.testing.assert_close(found[0].norm(dim=1), weights[0].norm(dim=1))
    torch.testing.assert_close(found[2].flatten(1).norm(dim=1), weights[2].flatten(1).norm(dim=1))
    assert not found[1].any()
    torch.testing.assert_close(measures.direction(weights, per="axis")[0].norm(dim=0), weights[0].norm(dim=0))
