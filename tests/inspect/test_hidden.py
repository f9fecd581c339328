"""Hidden attention: the maps are what scans do, and what reads maps reads them."""

import pytest
import torch
from torch import nn

from manyheads import Attention, Decoder, capture
from manyheads.inspect import CaptureError, attributions, hidden_attention, layers_of, rollout, watching
from manyheads.inspect.hidden import both_ways, headwise_map, minmax, selective_map

SCANS = ["retnet", "mamba2", "gqa + features + linear", "gqa(kv_heads=2) + gated_linear", "gated_delta_net",
         "gqa(kv_heads=2) + linear(normaliser=false)"]  # fmt: skip


def lively(spec, dim=32, heads=4, **options):
    layer = Attention(spec, dim, heads, **options).double().eval()
    with torch.no_grad():
        for p in layer.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.4)
    return layer


@pytest.mark.parametrize("spec", SCANS)
def test_maps_times_values_are_what_the_scan_returned(spec):
    layer = lively(spec)
    x = torch.randn(2, 11, 32).double()
    found = hidden_attention(layer, x)[0]
    looks = []
    with torch.no_grad(), watching(layers_of(layer), looks.append):
        want = layer(x)
        assert torch.equal(layer(x), want)
    call, read = looks[0].call, looks[0].read
    each = found.weights.shape[1] // read.shape[1]
    v = call.v.unflatten(-1, (layer.layout.values, -1)).transpose(2, 3)
    v = v.repeat_interleave(read.shape[1] // call.v.shape[1], 1).flatten(1, 2)
    got = (found.weights @ v).unflatten(1, (read.shape[1], each)).transpose(2, 3).flatten(3)
    torch.testing.assert_close(got, read, atol=1e-10, rtol=1e-8)
    assert found.weights.triu(1).abs().max() == 0
    some = hidden_attention(layer, x, rows=[-1, 3])[0]
    assert some.rows == (10, 3) and torch.equal(some.weights, found.weights[:, :, [10, 3]])
    short = hidden_attention(layer, x[:, :5])[0]  # a row is told from what came before it
    torch.testing.assert_close(short.weights, found.weights[:, :, :5, :5])


def test_a_selective_state_space_by_its_equation():
    layer, x = lively("mamba"), torch.randn(2, 9, 32).double()
    ssm = layer.project.ssm
    with torch.no_grad():
        ssm.A_log.add_(torch.randn_like(ssm.A_log))
        ssm.conv.bias.zero_()
    everything = range(ssm.inner)
    found = hidden_attention(layer, x, channels=everything)[0]
    looks, inner = [], []
    hook = ssm.register_forward_pre_hook(lambda m, args: inner.append(args[0]))
    seen = []
    conv = ssm.conv.register_forward_hook(lambda m, a, out: seen.append(out[:, 0]))
    with torch.no_grad(), watching(layers_of(layer), looks.append):
        layer(x)
    hook.remove(), conv.remove()
    u = nn.functional.silu(seen[0])
    y = torch.einsum("bcts,bsc->btc", found.channels, u) + ssm.skip * u
    torch.testing.assert_close(y, looks[0].read.transpose(1, 2).flatten(2))
    torch.testing.assert_close(found.weights, found.channels.unflatten(1, (4, -1)).mean(2))
    assert found.channels.triu(1).abs().max() == 0
    whole = hidden_attention(layer, x, channels=everything, full=True)[0].channels
    torch.testing.assert_close(torch.einsum("bcts,bsc->btc", whole, inner[0]), looks[0].out.transpose(1, 2).flatten(2))
    row = hidden_attention(layer, x, rows=[8], channels=[3])[0]
    torch.testing.assert_close(row.channels[:, 0, 0], found.channels[:, 3, 8])


def test_limits_of_the_equation():
    q, k = torch.randn(2, 1, 6, 3, dtype=torch.float64)
    step = torch.rand(1, 6, 2, dtype=torch.float64)
    own = (q * k).sum(-1)[:, None] * step.mT
    torch.testing.assert_close(selective_map(q, k, step, torch.full((3, 2), -1e9).double()), torch.diag_embed(own))
    linear = selective_map(q, k, torch.ones_like(step), torch.zeros(3, 2).double())
    torch.testing.assert_close(linear[0, 0], (q @ k.mT)[0].tril())
    one = selective_map(q[:, :1], k[:, :1], step[:, :1], torch.randn(3, 2).double() - 5)
    torch.testing.assert_close(one[..., 0, 0], own[:, :, 0])
    rate = -torch.rand(2, dtype=torch.float64)
    alike = selective_map(q, k, step, rate.expand(3, 2))
    heads = headwise_map(q[:, None].expand(1, 2, 6, 3), k[:, None].expand(1, 2, 6, 3), step.mT, rate)
    torch.testing.assert_close(alike, heads)
    back = both_ways(alike, alike)
    torch.testing.assert_close(back, back.flip(-1, -2))
    far = selective_map(q, k, 1e4 * step, -torch.ones(3, 2).double())
    assert far.isfinite().all()


def test_padding_has_no_weight_and_what_has_no_map_says_so():
    layer, x = lively("mamba"), torch.randn(2, 9, 32).double()
    valid = torch.arange(9) >= torch.tensor([[0], [3]])
    found = hidden_attention(layer, lambda: layer(x, mask=valid))[0].weights
    torch.testing.assert_close(found[1, :, 3:, 3:], hidden_attention(layer, x[1:, 3:])[0].weights[0])
    assert found[1, :, :, :3].abs().max() == 0
    with pytest.raises(ValueError, match="capture shows"):
        hidden_attention(Attention("gqa", 32, 4), x.float())
    for spec, says in (("mossnet", "mixture"), ("gqa + aft", "no weighted sum")):
        try:
            layer = lively(spec)
        except ValueError:
            continue
        with pytest.raises(CaptureError, match=says):
            hidden_attention(layer, x)
    with pytest.raises(CaptureError, match="goes past padding"):
        layer = lively("mamba")
        hidden_attention(layer, lambda: layer(x, mask=valid), full=True)


def test_rollout_reads_weights_and_hidden_maps_alike():
    model = Decoder(40, ["gqa", "retnet", "mamba"], 32, 4, layers=3).double().eval()
    ids = torch.randint(40, (2, 7))
    found = hidden_attention(model, ids)
    with torch.no_grad(), capture(model, layers=0) as tape:
        model(ids)
    maps = [tape[0].weights, found[1].view, found[2].view]
    got = rollout(maps)
    want = torch.eye(7).double()
    for one in maps:
        each = one.mean(1) + torch.eye(7)
        want = each / each.sum(-1, keepdim=True) @ want
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 7).double())
    assert got.triu(1).abs().max() == 0
    factors = attributions(model, ids, output=5)
    assert [f.shape for f in factors] == [(2, 7)] * 2 and all(((f >= 0) & (f <= 1)).all() for f in factors)
    assert not torch.allclose(rollout(maps[1:], factors), rollout(maps[1:]))
    torch.testing.assert_close(found[1].sums, found[1].weights.sum(-1))
    torch.testing.assert_close(found[1].shares.sum(-1), torch.ones(2, 4, 7).double())
    assert minmax(torch.ones(2, 3), (-1,)).max() == 0
    with pytest.raises(ValueError, match="square"):
        rollout([torch.ones(1, 2, 3)])
