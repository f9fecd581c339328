"""Several outputs and their averages, of which the best learns."""

import math

import pytest
import torch

from manyheads.multi import averages, best_output
from manyheads.multi.best_of import edge

D = torch.float64


def made(heads=3, batch=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, 2, 4, 6, dtype=D, generator=g), torch.randn(batch, 2, 4, 6, dtype=D, generator=g)


def test_averages_are_means_of_pairs():
    mix = averages(4)
    assert mix.shape == (10, 4) and torch.equal(mix.sum(-1), torch.ones(10))
    assert averages(2).tolist() == [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]


def test_the_loss_is_the_best_ones_by_image():
    outputs, target = made()
    found, which = best_output(outputs, target)
    candidates = [(outputs[:, i] + outputs[:, j]) / 2 for i in range(3) for j in range(i + 1)]
    errors = torch.stack([(each - target).square().mean((1, 2, 3)) for each in candidates], 1)
    torch.testing.assert_close(found, 10 * (errors.amin(-1) + 1e-8).log10().mean())
    assert torch.equal(which, errors.argmin(-1))
    plain, _ = best_output(outputs, target, combined=False)
    assert found <= plain
    one = best_output(outputs[:, :1], target)[0]
    torch.testing.assert_close(one, 10 * ((outputs[:, 0] - target).square().mean((1, 2, 3)) + 1e-8).log10().mean())
    more = best_output(torch.cat([outputs, made(seed=5)[0][:, :1]], 1), target)[0]
    assert more <= found
    torch.testing.assert_close(best_output(outputs[:, [2, 0, 1]], target)[0], found)


def test_a_winning_average_teaches_both_heads_by_half():
    target = torch.zeros(1, 2, 4, 6, dtype=D)
    outputs = torch.stack([target + 1.0, target - 0.9, target + 5.0], 1).requires_grad_()
    loss, which = best_output(outputs, target)
    loss.backward()
    assert which.tolist() == [1] and averages(3)[1].tolist() == [0.5, 0.5, 0]
    mean = (outputs[:, :1].detach() + outputs[:, 1:2].detach()) / 2
    alone = mean.requires_grad_()
    best_output(alone, target)[0].backward()
    for head in (0, 1):
        torch.testing.assert_close(outputs.grad[:, head], alone.grad[:, 0] / 2)
    assert (outputs.grad[:, 2] == 0).all()


def test_charbonnier_by_hand():
    outputs, target = made()
    found, _ = best_output(outputs, target, loss="charbonnier", combined=False)
    gap = outputs - target[:, None]
    errors = (gap.square() + 1e-6).sqrt().mean((2, 3, 4)) + 0.05 * (edge(gap).square() + 1e-6).sqrt().mean((2, 3, 4))
    torch.testing.assert_close(found, errors.amin(-1).mean())
    flat = edge(torch.ones(1, 1, 16, 16, dtype=D))[0, 0, 4:-4, 4:-4]
    assert flat.abs().max() < 0.25  # no edges inside of a plain: only the grid of kept pixels is left
    x, y = made()[1], made(seed=1)[1]
    torch.testing.assert_close(edge(x) - edge(y), edge(x - y))


def test_two_values_and_their_average_for_those_in_doubt():
    torch.manual_seed(0)
    heads = torch.tensor([0.3, 0.6], dtype=D, requires_grad=True)
    target = torch.tensor([0.0, 1.0] * 8, dtype=D)[:, None]
    optimiser = torch.optim.Adam([heads], 0.01)
    for _ in range(150):
        optimiser.zero_grad()
        best_output(heads[None, :, None].expand(16, 2, 1), target)[0].backward()
        optimiser.step()
    assert torch.allclose(heads.detach(), torch.tensor([0.0, 1.0], dtype=D), atol=0.05)
    _, which = best_output(torch.tensor([[[0.0], [1.0]]] * 3), torch.tensor([[0.0], [0.5], [1.0]]))
    assert which.tolist() == [0, 1, 2]


def test_what_is_refused():
    outputs, target = made()
    with pytest.raises(ValueError, match="outputs are"):
        best_output(outputs, target[:, :1])
    for none in (outputs[:0], outputs[:, :0], outputs[..., :0], torch.zeros(0), []):
        with pytest.raises(ValueError, match="none of them 0"):
            best_output(none, target[:0])
    for wrong in (dict(relaxed=1.5), dict(relaxed=-0.1), dict(temperature=-1.0), dict(temperature=math.nan)):
        with pytest.raises(ValueError, match="from 0 on"):
            best_output(outputs, target, **wrong)
    with pytest.raises(ValueError, match="loss='l1'"):
        best_output(outputs, target, loss="l1")
    with pytest.raises(ValueError, match="charbonnier is of images"):
        best_output(outputs.flatten(2), target.flatten(1), loss="charbonnier")
    with pytest.raises(ValueError, match="heads is at least 1"):
        averages(0)
    assert math.isfinite(best_output(target[:, None], target)[0])
