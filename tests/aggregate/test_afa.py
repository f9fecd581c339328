"""Features of layers, predictions of scales and streams of models, fused."""

import pytest
import torch
from torch import nn

from manyheads.aggregate import (
    ChannelAttention,
    LayerFusion,
    ModelMix,
    PairFusion,
    SharedStream,
    SpatialAttention,
    ordered_weights,
    render,
)
from manyheads.core.part import OptionError


def maps(n, c=6):
    return [torch.randn(2, c, 4, 3, dtype=torch.float64) for _ in range(n)]


def test_ordered_weights_telescope():
    s = torch.rand(5, 7, dtype=torch.float64)
    found = ordered_weights(s)
    for i in range(5):
        wanted = s[i]
        for j in range(i + 1, 5):
            wanted = wanted * (1 - s[j])
        torch.testing.assert_close(found[i], wanted)
    torch.testing.assert_close(found.sum(0), 1 - (1 - s).prod(0))


@torch.no_grad()
def test_layers_against_a_loop():
    fusion, parts = LayerFusion(6, ratio=2).double().eval(), maps(3)
    s, c = [fusion.space(f).sigmoid() for f in parts], [fusion.channel(f) for f in parts]
    wanted = 0
    for i in range(3):
        w = v = 1.0
        for j in range(i + 1, 3):
            w, v = w * (1 - s[j]), v * (1 - c[j])
        wanted = wanted + s[i] * w * c[i] * v * parts[i]
    torch.testing.assert_close(fusion(parts), wanted)
    assert (fusion(parts[::-1]) - wanted).abs().max() > 1e-3


@torch.no_grad()
def test_channel_attention_pools_twice_with_the_same_weights():
    layer, x = ChannelAttention(6, ratio=3).double().eval(), maps(1)[0]
    each = [layer.up(layer.norm(layer.down(p)).relu()) for p in (x.mean((2, 3)), x.amax((2, 3)))]
    torch.testing.assert_close(layer(x)[..., 0, 0], sum(each).sigmoid())
    torch.testing.assert_close(layer(x.flatten(2))[..., 0], sum(each).sigmoid())  # tokens need no grid


@pytest.mark.parametrize(("s", "c", "of_x", "of_f"), [(1, 0, 1, 0), (0, 1, 0, 1), (0.5, 0.5, 0.25, 0.25)])
def test_a_pair_at_its_corners(s, c, of_x, of_f):
    fusion, (x, f) = PairFusion(6), maps(2)
    logit = torch.logit(torch.tensor(float(s)))
    fusion.space, fusion.channel = (_Constant(logit), _Constant(torch.tensor(float(c))))
    torch.testing.assert_close(fusion(x, f), of_x * x + of_f * f)


class _Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value.double()


def test_parameters_are_what_they_are_said_to_be():
    conv = sum(p.numel() for m in SpatialAttention(32).modules() if isinstance(m, nn.Conv2d) for p in m.parameters())
    assert conv == 2 * 9 * 32**2 + 32
    linear = sum(p.numel() for m in ChannelAttention(32).modules() if isinstance(m, nn.Linear) for p in m.parameters())
    assert linear == 2 * 32**2 // 16


def scales(n=3):
    return [torch.randn(2, 1, 4, 3, dtype=torch.float64) for _ in range(n)], [x.softmax(1) for x in maps(n, 5)]


def test_scales_are_rendered():
    z, p = scales()
    wanted, left = 0, 1.0
    for logit, prediction in zip(z, p, strict=True):
        wanted = wanted + (1 - (-logit.abs()).exp()) * left * prediction
        left = left * (-logit.abs()).exp()
    found = render(z, p)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found.sum(1, keepdim=True), 1 - (-sum(x.abs() for x in z)).exp())
    torch.testing.assert_close(render(z, p, renormalise=True).sum(1), torch.ones(2, 4, 3, dtype=torch.float64))
    assert (render(z[::-1], p[::-1]) - found).abs().max() > 1e-3


def test_opaque_clear_and_split_scales():
    z, p = scales()
    torch.testing.assert_close(render([z[0] + 1e4, *z[1:]], p), p[0])
    torch.testing.assert_close(render([z[0], 0 * z[1], z[2]], p), render([z[0], z[2]], [p[0], p[2]]))
    split = render([z[0], 0.3 * z[1], 0.7 * z[1], z[2]], [p[0], p[1], p[1], p[2]])
    torch.testing.assert_close(split, render(z, p))
    torch.testing.assert_close(render([z[1], z[0]], [p[0], p[0]]), render([z[0], z[1]], [p[0], p[0]]))
    soft = [torch.nn.functional.softplus(x) for x in z]
    torch.testing.assert_close(render(z, p, soft=True), render(soft, p))


def mixer(n=3, c=6, **options):
    return ModelMix(n, c, 8, heads=2, **options).double()


def test_at_the_start_models_are_averaged():
    mix, parts = mixer(time=5, text=4), maps(3)
    time, text = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    torch.testing.assert_close(mix(parts, time, text), sum(parts) / 3)
    nn.init.normal_(mix.last.weight)
    weights = mix.weights(parts, time, text)
    torch.testing.assert_close(weights.sum(1), torch.ones(2, 4, 3, dtype=torch.float64))
    torch.testing.assert_close(mix(parts, time, text), sum(weights[:, i : i + 1] * parts[i] for i in range(3)))
    assert (weights - mix.weights(parts, time + 1, text)).abs().max() > 1e-6
    assert (weights - mix.weights(parts, time, text + 1)).abs().max() > 1e-6
    torch.testing.assert_close(mix([parts[0]] * 3, time, text), parts[0])


def test_models_in_another_order_with_their_channels():
    mix, other, parts, order = mixer(), mixer(), maps(3), [2, 0, 1]
    nn.init.normal_(mix.last.weight)
    other.load_state_dict(mix.state_dict())
    with torch.no_grad():
        for name in ("enter", "skip"):
            weight = getattr(mix, name).weight.unflatten(1, (3, 6))
            getattr(other, name).weight.copy_(weight[:, order].flatten(1, 2))
        other.last.weight.copy_(mix.last.weight[order])
        other.last.bias.copy_(mix.last.bias[order])
    torch.testing.assert_close(other.weights([parts[i] for i in order]), mix.weights(parts)[:, order])


def blocks(depth=3, skip=False):
    widths = [6] * (depth - 1) + [12 if skip else 6]
    return [nn.Sequential(nn.Conv2d(w, 6, 3, padding=1), nn.Tanh()).double() for w in widths]


class _OneHot(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, parts):
        return parts[self.model]


@torch.no_grad()
def test_one_hot_everywhere_is_one_model_and_equal_models_are_it():
    models, x = [blocks(skip=True) for _ in range(3)], maps(1)[0]

    def alone(model):
        a = model[0](x)
        return model[2](torch.cat([model[1](a), a], 1))

    for i in range(3):
        stream = SharedStream(models, [_OneHot(i)] * 3, {2: 0})
        torch.testing.assert_close(stream(x), alone(models[i]))
    mixers = [mixer() for _ in range(3)]
    for each in mixers:
        nn.init.normal_(each.last.weight)
    torch.testing.assert_close(SharedStream([models[0]] * 3, mixers, {2: 0})(x), alone(models[0]))
    single = SharedStream([models[1]], [mixer(1) for _ in range(3)], {2: 0})
    torch.testing.assert_close(single(x), alone(models[1]))


@torch.no_grad()
def test_mixed_at_the_last_block_alone_it_is_an_ensemble_of_outputs():
    """One stream has one hidden state, so that this holds for models that differ in their last block."""
    trunk = blocks(2)
    models, x = [[*trunk, blocks(1)[0]] for _ in range(3)], maps(1)[0]
    stream = SharedStream(models, [_OneHot(0), _OneHot(1), mixer()])
    torch.testing.assert_close(stream(x), sum(m[2](trunk[1](trunk[0](x))) for m in models) / 3)


def test_mixers_alone_are_trained_through_frozen_blocks():
    stream, x = SharedStream([blocks() for _ in range(2)], [mixer(2, time=3) for _ in range(3)]), maps(1)[0]
    for each in stream.mixers:
        nn.init.normal_(each.last.weight, std=0.1)
    calls = []

    def run(block, h):
        calls.append(h)
        return block(h)

    y = stream(x, run=run, time=torch.randn(2, 3, dtype=torch.float64))
    y.square().sum().backward()
    assert len(calls) == 6 and calls[2] is calls[3]  # both models read one mixture
    assert all(p.grad is None for p in stream.models.parameters())
    assert all(each.last.weight.grad.abs().sum() > 0 for each in stream.mixers)


def test_what_does_not_fit_is_refused():
    x, y = maps(1)[0], torch.randn(2, 6, 4, 4)
    for call in (lambda: LayerFusion(6)([x, y]), lambda: PairFusion(6)(x, y), lambda: LayerFusion(6)([])):
        with pytest.raises(ValueError, match="what is fused has one shape"):
            call()
    with pytest.raises(ValueError, match="1 logits for 2 predictions"):
        render([x], [x, x])
    with pytest.raises(ValueError, match="it mixes 3 models, given time; here are 2"):
        mixer(time=4)(maps(2))
    with pytest.raises(ValueError, match="given no condition"):
        mixer()(maps(3), torch.randn(2, 4))
    with pytest.raises(OptionError, match="hidden=8 is no multiple of heads=3"):
        ModelMix(2, 6, 8, heads=3)
    with pytest.raises(OptionError, match="a mixer for each block"):
        SharedStream([blocks(), blocks(2)], [mixer()] * 3)
    with pytest.raises(OptionError, match="skips="):
        SharedStream([blocks()], [mixer(1)] * 3, {0: 1})
