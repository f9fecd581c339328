"""A bias of one's own, windows that do not mix, and what attention and convolutions do to frequencies and variance."""

import pytest
import torch
from examples.alternet import AlterNet, LocalAttention, averages, changes, draw, highest, trained
from torch import nn


def test_without_attention_it_is_a_residual_network_of_convolutions():
    plain, alternate = AlterNet((0, 0)), AlterNet((1, 2))
    assert not any(isinstance(module, LocalAttention) for module in plain.modules())
    assert [block.attends for block in alternate.blocks] == [False, True, False, True, False, True]
    assert alternate(draw(3, torch.Generator())[0]).shape == (3, 4)


def test_attention_stays_in_its_window_and_feels_where_places_are():
    torch.manual_seed(0)
    layer = LocalAttention(8, 2).double()
    x = torch.randn(1, 8, 8, 8, dtype=torch.float64)
    y, moved = layer(x), x.clone()
    moved[:, :, 5, 2] += 1.0
    apart = (layer(moved) - y).abs().amax((0, 1)) > 1e-12
    assert apart[4:, :4].all() and not apart[:4].any() and not apart[:, 4:].any()
    (table,) = (p for name, p in layer.named_parameters() if name.endswith("table"))
    with torch.no_grad():
        table[0, 0] = 50.0  # of a query three places above and to the left of its key
    assert (layer(x) - y).abs().amax((0, 1))[0, 0] > 1e-3
    far = (layer(x) - y).abs().amax((0, 1))
    assert sorted(map(tuple, far.gt(1e-12).nonzero().tolist())) == [(0, 0), (0, 4), (4, 0), (4, 4)]


def test_new_attention_takes_high_frequencies_out_of_noise():
    found = [(highest(False, seed), highest(True, seed)) for seed in range(3)]
    assert all(attention < -0.3 < convolution for convolution, attention in found), found


@pytest.mark.slow
def test_variance_grows_in_convolutions_and_hardly_in_attention():
    x, label = draw(256, torch.Generator().manual_seed(99))
    for seed in (0, 1):
        model = trained((0, 2), seed, 60)
        assert isinstance(model, nn.Module) and (model(x).argmax(-1) == label).double().mean() > 0.9
        found = changes(model, x)
        assert averages(found, True)[1] < 1.5 < averages(found, False)[1]
