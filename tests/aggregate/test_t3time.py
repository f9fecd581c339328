"""T3Time: mixing of heads by what they say, and gates by a condition."""

import pytest
import torch

from manyheads.aggregate import ConditionGate, ScaledResidual, build

D = 5


def heads(count=3, *shape):
    return [torch.randn(*(shape or (2, 4)), D, dtype=torch.float64) for _ in range(count)]


def pool(count=3):
    return build(f"t3time(count={count}, hidden=6)", D).double().eval()


def test_by_its_equation_at_each_place():
    agg, parts = pool(), heads()
    linear, norm, last = agg.scores[0], agg.scores[1], agg.scores[4]
    hidden = norm(torch.cat(parts, -1) @ linear.weight.T + linear.bias).relu()
    w = (hidden @ last.weight.T + last.bias).softmax(-1)
    torch.testing.assert_close(w.sum(-1), torch.ones(2, 4).double())
    torch.testing.assert_close(agg.mix(parts), sum(w[..., [h]] * part for h, part in enumerate(parts)))
    assert sum(p.numel() for p in build("t3time", 32).parameters()) == 4 * 32 * 128 + 128 + 2 * 128 + 128 * 4 + 4


def test_equal_heads_one_head_and_no_preference():
    agg, (part, *others) = pool(), heads()
    torch.testing.assert_close(agg.mix([part] * 3), part)
    torch.testing.assert_close(pool(1).mix([part]), part)
    for each in (agg.scores[4].weight, agg.scores[4].bias):
        torch.nn.init.zeros_(each)
    torch.testing.assert_close(agg.mix([part, *others]), (part + sum(others)) / 3)


def test_heads_permuted_with_their_weights():
    agg, other, parts, order = pool(), pool(), heads(), [2, 0, 1]
    other.load_state_dict(agg.state_dict())
    linear, last = other.scores[0], other.scores[4]
    linear.weight.data = agg.scores[0].weight.data.unflatten(1, (3, D))[:, order].flatten(1)
    last.weight.data, last.bias.data = agg.scores[4].weight.data[order], agg.scores[4].bias.data[order]
    torch.testing.assert_close(other.mix([parts[i] for i in order]), agg.mix(parts))


def test_a_masked_head_has_no_weight():
    agg, x = pool(), torch.randn(2, 3, D).double()
    mask = torch.tensor([[True, False, True], [True, True, True]])
    found = agg(x.masked_fill(~mask[..., None], torch.nan), mask)
    assert found.weights[0, 0, 0, 1] == 0 and found.out.isfinite().all()


def test_what_cannot_be_mixed():
    agg, parts = pool(), heads()
    for bad, match in (([], "nothing to mix"), (parts[:2], "built for 3"), ([*parts[:2], parts[0][:1]], "one shape")):
        with pytest.raises(ValueError, match=match):
            agg.mix(bad)


def test_any_pooling_mixes_layers():
    layers = heads(4, 2, 3, 6)
    largest = build("pna(statistics=[max], scalers=[identity], learned=false)", D)
    torch.testing.assert_close(largest.mix(layers), torch.stack(layers).amax(0))
    assert build("abmil", D).double().mix(layers).shape == (2, 3, 6, D)
    with pytest.raises(ValueError, match="it gives 2 results"):
        build("abmil(heads=2, concat=false)", D).double().mix(layers)


def test_the_gate_and_its_ends():
    gate, (a, b) = ConditionGate(D, 7).double(), heads(2)
    g = gate.gate(a, 96)
    inner = torch.cat([a.mean(1), torch.full((2, 1), 0.096).double()], -1)
    torch.testing.assert_close(g[:, 0], gate.net(inner))
    torch.testing.assert_close(gate(a, b, 96), g * b + (1 - g) * a)
    assert not torch.allclose(gate(a, b, 96), gate(a, b, 720))
    torch.testing.assert_close(gate(a, b, torch.tensor([96, 720]))[:1], gate(a, b, 96)[:1])
    torch.nn.init.zeros_(gate.net[2].weight)
    for bias, wanted in ((-1e3, a), (1e3, b)):
        torch.nn.init.constant_(gate.net[2].bias, bias)
        torch.testing.assert_close(gate(a, b, 96), wanted)
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    torch.testing.assert_close(gate.gate(a, 96, mask)[:1], gate.gate(a[:1, :2], 96))
    with pytest.raises(ValueError, match="alike"):
        gate(a, b[:1], 96)
    with pytest.raises(ValueError, match="scale"):
        ConditionGate(D, scale=0)


def test_the_residual_is_a_parameter_and_its_ends():
    residual, (o, z) = ScaledResidual(D).double(), heads(2)
    assert [name for name, _ in residual.named_parameters()] == ["alpha"]
    torch.testing.assert_close(residual(o, z), (o + z) / 2)
    for alpha, wanted in ((1.0, o), (0.0, z)):
        torch.nn.init.constant_(residual.alpha, alpha)
        torch.testing.assert_close(residual(o, z), wanted)
    residual(o, z).sum().backward()
    assert residual.alpha.grad is not None


@pytest.mark.parametrize("line", ["t3time(count=0)", "t3time(dropout=1.0)", "t3time(hidden=0)"])
def test_refusals(line):
    with pytest.raises(ValueError, match=r"at least 1|below 1"):
        build(line, D)
