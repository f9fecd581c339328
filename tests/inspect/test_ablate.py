"""`ablate` and `steer`: exact while they last, and nothing is left of them."""

import pytest
import torch
from tests.inspect import models

import manyheads as mh
from manyheads import Attention, ablate, capture, steer


def stock():
    return models.decoder(), models.ids()


def adopted():
    return mh.adopt(models.decoder()), models.ids()


def lone():
    return Attention("gqa(kv_heads=2) + moh(top=3)", 32, 4).eval(), torch.randn(2, 6, 32)


def encoder():
    return models.bert(), models.ids()


def first(model, inputs):
    with torch.no_grad():
        out = model(inputs)
    return out if isinstance(out, torch.Tensor) else out[0]


def output_weight(model):
    from manyheads.inspect import layers_of

    return layers_of(model)[0]


@pytest.mark.parametrize("make", [stock, adopted, lone, encoder])
def test_zero_is_what_a_head_without_output_weights_gives(make):
    """And afterwards the model gives the same bits."""
    model, inputs = make()
    before = first(model, inputs)
    with ablate(model, {0: [1, 3]}):
        got = first(model, inputs)
    assert torch.equal(first(model, inputs), before) and not torch.allclose(got, before, atol=1e-3)
    layer = output_weight(model)
    weight = layer.module.project.o_proj.weight if isinstance(layer.module, Attention) else layer.output.weight
    with torch.no_grad():
        weight.unflatten(1, (4, -1))[:, [1, 3]] = 0
    torch.testing.assert_close(got, first(model, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [stock, adopted, encoder])
def test_mean_and_resample_are_what_they_say(make):
    model, ids = make()
    other = models.ids(3, 12, seed=5)
    with capture(model, what="out") as tape:
        first(model, other)
    outs = tape[1].out
    for how, want in (("mean", outs.mean((0, 2))[None, [2], None]), ("resample", outs[:2, [2], :9])):
        with ablate(model, {1: [2]}, how, reference=other), capture(model, what="out") as seen:
            first(model, ids)
        torch.testing.assert_close(seen[1].out[:, [2]], want.expand(2, 1, 9, -1), atol=1e-5, rtol=1e-5)
    with capture(model, what="out") as tape, ablate(model, {1: [2]}, "resample"), capture(model, what="out") as seen:
        first(model, ids)
    with capture(model, what="out") as plain:
        first(model, ids)
    assert torch.equal(seen[1].out[:, 2], plain[1].out[:, 2].roll(1, 0))
    assert torch.equal(seen[1].out[:, [0, 1, 3]], plain[1].out[:, [0, 1, 3]])


def test_padding_is_not_in_the_mean():
    model, ids = adopted()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with capture(model, what="out") as tape, torch.no_grad():
        model(ids, attention_mask=mask)
    want = tape[0].out[:, 1][mask.bool()].mean(0)
    reference = {"input_ids": ids, "attention_mask": mask}
    with ablate(model, {0: 1}, "mean", reference=reference), capture(model, what="out") as seen:
        first(model, ids)
    torch.testing.assert_close(seen[0].out[:, 1], want.expand(2, 9, -1), atol=1e-5, rtol=1e-5)


def test_in_generation_and_nested_and_after_an_exception():
    model, ids = adopted()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before, logits = model.generate(ids, **options), first(model, ids)
    with ablate(model, {0: None}):
        alone = first(model, ids)
        with pytest.raises(RuntimeError), steer(model, {1: [0]}, scale=3.0):
            both = first(model, ids)
            raise RuntimeError
        assert torch.equal(first(model, ids), alone) and not torch.equal(both, alone)
        assert not torch.equal(model.generate(ids, **options), before)
    assert torch.equal(model.generate(ids, **options), before) and torch.equal(first(model, ids), logits)


def test_decoding_step_by_step_is_ablated_as_the_full_pass_is():
    model = mh.Decoder(50, "mla(rank=16, rope_dim=4)", 32, 4, layers=2).eval()
    ids, other = models.ids(2, 7, 50), models.ids(2, 9, 50, seed=3)
    for how in ("mean", "resample"):
        with torch.no_grad(), ablate(model, {0: [1], 1: [2, 3]}, how, reference=other):
            cache = mh.Cache()
            steps = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(7)], 1)
            torch.testing.assert_close(steps, model(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [stock, adopted, encoder])
def test_steered_scores_are_those_of_steered_queries_and_keys(make):
    model, ids = make()
    directions = torch.randn(2, 8)
    with capture(model, what={"q", "k", "v", "weights", "out", "scores"}) as plain:
        first(model, ids)
    before = first(model, ids)
    for name in ("q", "k", "v"):
        with steer(model, {0: [0, 3]}, **{name: directions}), capture(model, what={"q", "k", "v", "scores"}) as seen:
            first(model, ids)
        for other in ("q", "k", "v"):
            want = getattr(plain[0], other).clone()
            if other == name:
                want[:, [0, 3]] += directions[:, None]
            torch.testing.assert_close(getattr(seen[0], other), want)  # heads with the same keys keep theirs
    with steer(model, {0: [2]}, out=directions[0], scale=0.5), capture(model, layers=0, what="out") as seen:
        first(model, ids)
    want = plain[0].out.clone()
    want[:, 2] = 0.5 * want[:, 2] + directions[0]
    torch.testing.assert_close(seen[0].out, want)
    with steer(model, {0: None}, scale=1.0):
        assert torch.equal(first(model, ids), before)
    assert torch.equal(first(model, ids), before)


@pytest.mark.parametrize("make", [stock, adopted, encoder, lone])
def test_moved_mass_arrives_and_nothing_else_moves(make):
    model, inputs = make()
    before = first(model, inputs)
    with capture(model, layers=0) as plain:
        first(model, inputs)
    with steer(model, {0: [1]}, move=(0, 2, 0.25)), capture(model, layers=0, what={"weights", "out"}) as seen:
        changed = first(model, inputs)
    want = plain[0].weights.clone()
    sees = slice(0, None) if make is encoder else slice(2, None)
    moved = 0.25 * want[:, 1, sees, 0]
    want[:, 1, sees, 0] -= moved
    want[:, 1, sees, 2] += moved
    torch.testing.assert_close(seen[0].weights, want, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(changed, before, atol=1e-4) and torch.equal(first(model, inputs), before)


def test_moved_mass_in_decoding_equals_the_full_pass():
    layer, x = Attention("gqa(kv_heads=2) + window(size=4)", 32, 4).eval(), torch.randn(1, 9, 32)
    with torch.no_grad(), steer(layer, {0: [0, 2]}, move=[(3, 5), (4, 5, 0.5)]):
        cache = mh.Cache()
        steps = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(9)], 1)
        torch.testing.assert_close(steps, layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: ablate(m, {2: [0]}), "there is no layer 2"),
        (lambda m: ablate(m, {0: [4]}), "there is no head 4"),
        (lambda m: ablate(m, {0: [1, -1]}), "there is no -1 in .*: layers and heads count from 0 on"),
        (lambda m: ablate(m, {-1: None}), "there is no -1 in .*: layers and heads count from 0 on"),
        (lambda m: steer(m, {0: -2}, scale=0.5), "there is no -2"),
        (lambda m: ablate(m, [0]), "heads are given by layer"),
        (lambda m: ablate(m, {}), "heads are given by layer"),
        (lambda m: ablate(m, {0: [1]}, "median"), "replaced by zero, mean or resample"),
        (lambda m: ablate(m, {0: [1]}, "mean"), "give reference"),
        (lambda m: ablate(m, {0: [1]}, reference=torch.zeros(1, 2)), "zero needs no reference"),
        (lambda m: steer(m, {0: [1]}), "nothing is changed"),
        (lambda m: steer(m, {0: [1]}, scale=[1.0, 2.0]), "2 scales for 1 heads"),
        (lambda m: steer(m, {0: [1]}, move=(1, 1)), "move="),
        (lambda m: steer(m, {0: [1]}, move=(0, 1, 1.5)), "move="),
    ],
)
def test_what_does_not_fit_is_refused_at_once(change, says):
    model = models.decoder()
    with pytest.raises(ValueError, match=says), change(model):
        raise AssertionError("the block must not run")


def test_what_a_pass_cannot_do_is_refused_there():
    model, ids = adopted()
    with pytest.raises(ValueError, match="is \\[8\\] or"), steer(model, {0: [1]}, q=torch.zeros(5)):
        first(model, ids)
    short = ablate(model, {0: [1]}, "resample", reference=ids[:, :4])
    with pytest.raises(ValueError, match="the reference has 4 tokens"), short:
        first(model, ids)
    with pytest.raises(ValueError, match="which has one"), ablate(model, {0: [1]}, "resample"):
        first(model, ids[:1])
    layer = Attention("gqa + differential", 32, 4).eval()
    with pytest.raises(ValueError, match="no one map"), steer(layer, {0: [1]}, move=(0, 1)):
        layer(torch.randn(1, 4, 32))
    with pytest.raises(ValueError, match="has no weights"), steer(Attention("retnet", 32, 4), {0: [1]}, move=(0, 1)):
        pass
    latent = Attention("mla(rank=16, rope_dim=4)", 32, 4).eval()
    with pytest.raises(ValueError, match="keys that are not formed"), steer(latent, {0: [1]}, q=torch.zeros(12)):
        latent(torch.randn(1, 1, 32))
