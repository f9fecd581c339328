"""A layer of one head that nothing goes around."""

import pytest
import torch

from manyheads.inspect.bottleneck import Bottleneck, map_loss


def pair(tokens=7, other=5):
    torch.manual_seed(0)
    layer = Bottleneck(12, 16).double()
    return layer, *(torch.randn(2, n, 12, dtype=torch.float64) for n in (tokens, other))


def test_the_gate_on_one_output_row_is_the_gate_on_the_weights():
    layer, x, y = pair()
    z, seen = layer(x, y)
    q, k, v = layer.q_proj(layer.norm(x)), layer.k_proj(layer.norm(y)), layer.v_proj(layer.norm(y))
    weights = (q @ k.mT / 12**0.5).softmax(-1)
    torch.testing.assert_close(seen, weights[:, 0])
    gated = weights.clone()
    gated[:, 0] = gated[:, 0] * (1 - gated[:, 0, :1])
    a = seen[:, 0]
    torch.testing.assert_close(gated[:, 0].sum(-1), 1 - a)
    torch.testing.assert_close(gated[:, 0, 1:].sum(-1), (1 - a) ** 2)
    o = layer.o_proj(gated @ v)
    torch.testing.assert_close(z, o + layer.mlp(layer.mlp_norm(o)))


def test_what_it_does_not_look_at_does_not_pass():
    layer, x, y = pair()
    other = torch.randn_like(y)
    nothing = torch.zeros(2, 5, dtype=torch.float64)
    one, two = layer(x, y, nothing).z[:, 0], layer(2 * x + 1, other, nothing).z[:, 0]
    assert torch.equal(one, two)  # images of any kind give the same CLS
    assert not torch.allclose(layer(x, y).z[:, 0], layer(x, other).z[:, 0])
    alone = torch.zeros_like(nothing)
    alone[:, 3] = 1
    o = layer.o_proj(layer.v_proj(layer.norm(y))[:, 3])
    torch.testing.assert_close(layer(x, y, alone).z[:, 0], o + layer.mlp(layer.mlp_norm(o)))
    with torch.no_grad():  # where CLS looks at CLS alone the row is shut
        layer.q_proj.weight.zero_()
        layer.q_proj.bias.copy_(500 * layer.k_proj(layer.norm(y))[0, 0])
    shut = layer(x[:1], y[:1])
    assert shut.map[0, 0] > 1 - 1e-9
    torch.testing.assert_close(shut.z[:, 0], one[:1])
    # with x added again the map no longer decides
    assert not torch.allclose((x + layer(x, y, nothing).z)[:, 0], (2 * x + 1 + layer(x, y, nothing).z)[:, 0])


def test_halves_swapped_are_outputs_swapped_and_maps_can_be_taught():
    layer, x, y = pair(5, 5)
    both = layer(torch.cat([x, y]), torch.cat([y, x])).z
    torch.testing.assert_close(both, torch.cat([layer(x, y).z, layer(y, x).z]))
    target = torch.zeros(2, 5)
    target[:, 2] = 1
    optimiser = torch.optim.Adam(layer.parameters(), 0.02)
    first = map_loss(layer(x, y).map, target).item()
    for _ in range(40):
        optimiser.zero_grad()
        loss = map_loss(layer(x, y).map, target)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1 * first
    assert map_loss(target, 3 * target).item() == pytest.approx(0, abs=1e-6)


def test_what_does_not_fit_is_refused():
    layer, x, y = pair()
    with pytest.raises(ValueError, match=r"\[B, T, 12\]"):
        layer(x, y[..., :5])
    with pytest.raises(ValueError, match="a map"):
        layer(x, y, torch.zeros(2, 7))
    with pytest.raises(ValueError, match="from 0 on"):
        layer(x, y, -torch.ones(2, 5))
    assert sum(p.numel() for p in layer.parameters()) == 4 * (12 * 12 + 12) + 4 * 12 + 12 * 16 + 16 + 16 * 12 + 12
