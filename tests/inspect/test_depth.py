"""Sinks and depth: of maps and layers that are known, and of models by hand."""

from functools import partial

import pytest
import torch
from tests.inspect import models
from torch import nn

import manyheads as mh
from manyheads import Attention, Decoder, capture
from manyheads.inspect.measures import depth, measure, sinks


def one(layer, run, function, fewest=1):
    return measure(layer, run, {"it": function}, fewest=fewest)["it"][0]


def even(tokens=64):
    layer = Attention("gqa + rope(none)", 16, 2).double().eval()
    nn.init.zeros_(layer.project.q_proj.weight)
    return layer, torch.randn(1, tokens, 16).double()


def test_columns_of_even_and_of_own_maps():
    layer, x = even()
    n = torch.arange(1, 65, dtype=torch.float64)
    assert one(layer, x, sinks.column)[0].item() == pytest.approx(0.0741, abs=5e-5)
    torch.testing.assert_close(one(layer, x, partial(sinks.column, key=60))[0], (1 / n[60:]).mean())
    looks = []
    with torch.no_grad(), mh.inspect.watching(mh.inspect.layers_of(layer), looks.append):
        layer(x)
    every = sinks.columns(looks[0])[0, 0]
    torch.testing.assert_close(every, torch.stack([(1 / n[k:]).mean() for k in range(64)]))
    for rate, threshold in ((1.0, 0.0), (1.0, 0.07), (0.0, 0.075), (0.0, 1.0)):
        assert sinks.sink_rate(layer, x, threshold)[0].tolist() == [rate] * 2
    own = Attention("gqa + rope(none) + window(size=1)", 16, 2).double().eval()
    assert one(own, x, sinks.column).tolist() == [1.0, 1.0]  # later queries do not see it
    with pytest.raises(ValueError, match="threshold="):
        sinks.sink_rate(layer, x, 1.5)


def test_columns_are_those_of_the_map_and_padding_is_no_first_token():
    layer, x = Attention("gqa(kv_heads=2)", 32, 4).double().eval(), torch.randn(2, 9, 32).double()
    valid = torch.arange(9) >= torch.tensor([[0], [4]])
    run = lambda: layer(x, mask=valid)
    with torch.no_grad(), capture(layer) as tape:
        run()
    w = tape[0].weights
    want = torch.cat([w[0, :, :, 0], w[1, :, 4:, 4]], 1).mean(1)
    torch.testing.assert_close(one(layer, run, sinks.column), want)
    v = None
    with torch.no_grad(), capture(layer, what={"v", "k"}) as tape:
        run()
    v, k = tape[0].v.norm(dim=-1), tape[0].k.norm(dim=-1)
    for size, function in ((v, sinks.first_value), (k, sinks.first_key)):
        a, b = size[0, :, 0] / size[0].median(1).values, size[1, :, 4] / size[1, :, 4:].median(1).values
        torch.testing.assert_close(one(layer, run, function), (9 * a + 5 * b) / 14)


def test_a_head_that_rests_on_a_token_without_value_does_nothing():
    layer, x = Attention("gqa + rope(none)", 16, 2).double().eval(), torch.randn(1, 8, 16).double()
    x[:, 0] = 0
    x[..., 0] = torch.tensor([1.0, *[0.0] * 7])
    with torch.no_grad():
        layer.project.v_proj.weight[:, 0] = 0  # the first token has no value
        layer.project.q_proj.weight.zero_()
        layer.project.k_proj.weight.zero_()
        layer.project.k_proj.weight[0, 0] = 40
        x[..., 1] = 4.0
        layer.project.q_proj.weight[0, 1] = 40
        layer.project.v_proj.weight[:, 1] = 0
    found = one(layer, x, sinks.idle, fewest=2)
    assert found[0, 1] < 1e-9  # looks at the sink: nothing is added
    assert found[1, 1] > 0.05
    assert one(layer, x, sinks.first_value)[0] == 0


def test_mixing():
    model, ids = models.decoder(), models.ids(1, 8)
    changed = ids.clone()
    changed[0, 3] = (ids[0, 3] + 1) % 99
    moved = sinks.spread(model, ids, changed)
    assert (
        moved.shape == (3, 1, 8)
        and (moved[:, :, :3] == 0).all()
        and (moved[0, 0, 4:] == 0).all()
        and moved[0, 0, 3] > 0
    )
    assert (moved[1:, :, 4:] > 0).all()
    assert sinks.collapse(torch.ones(2, 5, 4)).max() == 0 and sinks.collapse(torch.randn(3, 5, 4)).shape == (3,)
    assert sinks.massive(torch.eye(9)[:1]).item() == pytest.approx(3) and sinks.massive(torch.ones(4)) == 1
    found = sinks.influence(model.double(), ids, 4, probes=400)
    assert (found[0, 5:] == 0).all()
    embeds = model.get_input_embeddings()(ids).detach()

    def last(x):
        seen = []
        hook = model.model.layers[-1].register_forward_hook(lambda m, a, out: seen.append(out))
        model(inputs_embeds=x)
        hook.remove()
        return (seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0])[0, 4]

    exact = torch.autograd.functional.jacobian(last, embeds)[:, 0].square().sum((0, 2)).sqrt()
    torch.testing.assert_close(found[0], exact, rtol=0.15, atol=1e-9)
    with pytest.raises(ValueError, match="that differ"):
        sinks.spread(model, ids, ids)


# --- layers


def stack(layers=3, ffn="swiglu"):
    model = Decoder(40, "gqa", 16, 2, layers=layers, ffn=ffn).double().eval()
    with torch.no_grad():
        for p in model.stack.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.4)
    return model, models.ids(2, 12, 40)


@pytest.mark.parametrize("make", [stack, lambda: (models.decoder().double(), models.ids(2, 12, 40))])
def test_an_idle_layer_scores_nothing(make):
    model, ids = make()
    blocks = model.stack.blocks if isinstance(model, Decoder) else model.model.layers
    before = {name: p.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(ids)
        effect = depth.causal_effect(model, ids)
    again = model(ids)
    assert torch.equal(getattr(again, "logits", again), getattr(logits, "logits", logits))
    assert effect.tril().isnan().logical_or(effect.tril() == 0).all() and effect[0, 1] > 0.01
    count = len(blocks)
    assert (depth.swap_effect(model, ids).diagonal() == 0).all() and depth.swap_effect(model, ids)[0, 1] > 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        for name, p in blocks[0].named_parameters():
            if "o_proj" in name or "down" in name:
                p.zero_()
    assert depth.causal_effect(model, ids)[0, 1:].abs().max() == 0
    j = depth.jacobian(model, ids, 0)
    torch.testing.assert_close(j, torch.eye(len(j)).double())
    assert depth.off_identity(j) == pytest.approx(
        {"distance": 0, "off": 0, "diagonal": 1, "deviation": 0, "frobenius": len(j) ** 0.5, "spectral": 1}, abs=1e-9
    )
    many = models.ids(8, 16, 40)
    ratios = depth.usefulness(model, many, ids)
    assert ratios[0].item() == pytest.approx(1, abs=1e-6) and len(ratios) == count
    with torch.no_grad():
        for p, q in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True):
            q.copy_(p)
    assert depth.swap_effect(model, ids)[0, 1] == 0


def test_a_skipped_layer_is_a_model_without_it():
    model, ids = stack()
    with torch.no_grad():
        whole = sinks.states(model, ids)
        effect = depth.causal_effect(model, ids)
        del model.stack.blocks[0]
        rest = [whole[0]]
        x = whole[0]
        for block in model.stack.blocks:
            x, _ = block(x, positions=mh.core.mask.Axis(12, 0))
            rest.append(x)
    less, full = torch.stack(rest).diff(dim=0), whole.diff(dim=0)[1:]
    want = (less - full).norm(dim=-1).mean((1, 2)) / full.norm(dim=-1).mean((1, 2))
    torch.testing.assert_close(effect[0, 1:], want)


def test_the_jacobian_and_its_estimate():
    model, ids = stack()
    j = depth.jacobian(model, ids, 1)
    x, y = depth._run_block(model, ids, 1)
    probe = torch.randn(16).double()
    (grad,) = torch.autograd.grad((y * probe).sum(), x)
    torch.testing.assert_close(probe @ j, grad.sum((0, 1)) / 24)
    estimate, error = depth.jacobian_distance(model, ids, 1, probes=64)
    assert abs(estimate - float((j - torch.eye(16)).norm())) < 3 * error
    assert depth.off_identity(j)["frobenius"] == pytest.approx(float(j.norm()))
    with pytest.raises(ValueError, match="no layer 3"):
        depth.jacobian(model, ids, 3)


def test_variance_similarity_and_sparsity():
    model, ids = stack()
    stream = sinks.states(model, ids)
    torch.testing.assert_close(depth.variance(model, ids)[2], stream[2].var(-1, correction=0).mean())
    found = depth.similarity(model, ids)
    torch.testing.assert_close(found.diagonal(), torch.ones(4).double())
    torch.testing.assert_close(found[1, 3], torch.cosine_similarity(stream[1], stream[3], dim=-1).mean())
    assert depth.small_weights(model, 100.0).tolist() == [1.0] * 3
    assert depth.small_weights(model, 0.1).tolist() == pytest.approx([0.08] * 3, abs=0.03)
    layer, x = even(9)
    assert one(layer, x, partial(depth.small_mass, times=0.9), 2).tolist() == [0.0, 0.0]
    assert one(layer, x, partial(depth.small_mass, times=1.1), 2).tolist() == [1.0, 1.0]
    assert depth.count_useful(torch.tensor([1.0, 1.2, 1.11])) == pytest.approx(2 / 3)
