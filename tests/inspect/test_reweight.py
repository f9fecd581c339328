"""Interventions on where heads look: keys hidden, spans raised, directions in queries and keys, heads switched off."""

import pytest
import torch
from tests.inspect import models

import manyheads as mh
from manyheads import Attention, capture, steer
from manyheads.inspect import (
    Between,
    Directions,
    Example,
    bake_focus,
    contextual_scores,
    focus,
    hide,
    measures,
    split_softmax,
    train_focus,
)
from manyheads.inspect.measures import sahara, ships, subspace_angle, switched_off
from manyheads.inspect.measures.switched import last_states


def stock():
    return models.decoder().double(), models.ids()


def adopted():
    return mh.adopt(models.decoder().double()), models.ids()


def lone():
    return Attention("gqa(kv_heads=2) + softmax(cap=2.0)", 32, 4).double().eval(), torch.randn(2, 9, 32).double()


def first(model, inputs):
    with torch.no_grad():
        out = model(inputs)
    return getattr(out, "logits", out)


def maps(model, inputs, *around):
    with torch.no_grad(), capture(model, layers=0, what={"weights"}) as tape:
        if around:
            with around[0]:
                model(inputs)
        else:
            model(inputs)
    return tape[0].weights


MAKE = pytest.mark.parametrize("make", [stock, adopted, lone])


@MAKE
def test_hidden_keys_leave_what_they_had_to_the_others(make):
    model, inputs = make()
    before, plain = first(model, inputs), maps(model, inputs)
    got = maps(model, inputs, hide(model, {0: [1, 2]}, keys=Between(0, 2)))
    want = plain.clone()
    want[:, 1:3, 2:, :2] = 0
    want[:, 1:3, 2:] /= want[:, 1:3, 2:].sum(-1, keepdim=True)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-7)  # the first two queries see nothing else
    assert torch.equal(first(model, inputs), before)


@MAKE
@pytest.mark.parametrize("power", [0.4, 2.5])
def test_the_mass_of_a_span_becomes_its_power(make, power):
    model, inputs = make()
    before, plain = first(model, inputs), maps(model, inputs)
    got = maps(model, inputs, split_softmax(model, {0: [3]}, (1, 4), power))
    a = plain[:, 3, :, 1:4].sum(-1, keepdim=True)
    inside = torch.zeros(9, dtype=torch.bool)
    inside[1:4] = True
    want = plain.clone()
    raised = a**power
    direct = torch.where(inside, plain[:, 3] * raised / a.clamp_min(1e-300), plain[:, 3] * (1 - raised) / (1 - a))
    want[:, 3] = torch.where(a > 0, direct, plain[:, 3])
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]))
    with split_softmax(model, {0: [3]}, (1, 4), 1.0):
        assert torch.equal(first(model, inputs), before)
    assert torch.equal(first(model, inputs), before)


def test_what_cannot_be_reweighted_is_refused():
    model, _ = stock()
    for bad in (
        lambda: split_softmax(model, {0: [1]}, (0, 2), 0.0),
        lambda: split_softmax(model, {0: [1]}, (2, 2), 0.5),
    ):
        with pytest.raises(ValueError, match=r"power=|a span"), bad():
            pass
    with (
        pytest.raises(ValueError, match="not the softmax"),
        split_softmax(Attention("gqa + talking_heads", 32, 4), {0: [1]}, (0, 1), 0.5),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no weights of its own"),
        hide(Attention("retnet", 32, 4), {0: [1]}, keys=Between(0, 1)),
    ):
        pass


# --- directions


def directions(n=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    one = lambda: {0: torch.randn(n, 8, generator=g, dtype=torch.float64)}
    return Directions({0: (0, 1)}, one(), one())


@pytest.mark.parametrize("make", [stock, adopted])
def test_a_baked_bias_is_the_same(make):
    model, ids = make()
    before = first(model, ids)
    u = directions()
    u.k[0][1] = u.k[0][0]  # both read the same keys
    with focus(model, u, 0.7):
        want = first(model, ids)
    with focus(model, u, 0.0):
        assert torch.equal(first(model, ids), before)
    assert not torch.allclose(want, before, atol=1e-4) and torch.equal(first(model, ids), before)
    if make is stock:
        bake_focus(model, u, 0.7)
        torch.testing.assert_close(first(model, ids), want, atol=1e-7, rtol=1e-6)
        with pytest.raises(ValueError, match="share keys"):
            bake_focus(model, directions())


def test_decoding_is_focused_as_the_full_pass_is():
    model, ids = adopted()
    with torch.no_grad(), focus(model, directions()):
        cache = mh.Cache()
        steps = torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(9)], 1)
        torch.testing.assert_close(steps, model(ids).logits, atol=1e-7, rtol=1e-6)


def test_without_rotation_one_key_direction_changes_nothing():
    layer, x = Attention("gqa + rope(none)", 32, 4).double().eval(), torch.randn(1, 7, 32).double()
    u = directions()
    plain = maps(layer, x)
    still = Directions(u.heads, {0: torch.zeros_like(u.q[0])}, u.k)
    torch.testing.assert_close(maps(layer, x, focus(layer, still)), plain)
    asking = Directions(u.heads, u.q, {0: torch.zeros_like(u.k[0])})
    with torch.no_grad(), capture(layer, what={"k", "scores"}) as tape:
        layer(x)
        with focus(layer, asking):
            layer(x)
    one, other = tape.passes(0)
    gained = torch.einsum("he,bhse->bhs", u.q[0], one.k[:, :2])[:, :, None] * layer.layout.scale
    torch.testing.assert_close(other.scores[:, :2], one.scores[:, :2] + gained)


def test_masses_of_spans_and_directions_that_raise_them():
    model, ids = adopted()
    example = Example(ids[:1], answer=(6, 9), relevant=(1, 3), others=((3, 4), (4, 6)))
    found = contextual_scores(model, [example])
    weights = maps(model, ids[:1])[0][:, 5:8]
    spans = {"relevant": weights[..., 1:3], "others": weights[..., 3:6], "sink": weights[..., :1]}
    for name, of in spans.items():
        torch.testing.assert_close(found[name][0], of.sum(-1).mean(-1))
    worst = torch.maximum(weights[..., 3], weights[..., 4:6].sum(-1)).mean(-1)
    torch.testing.assert_close(found["worst"][0], worst)
    learnt = train_focus(model, [example], {0: [0, 1]}, steps=4, lr=0.05)
    masses = []
    for strength in (-1.0, 0.0, 1.0):
        with focus(model, learnt, strength):
            masses.append(contextual_scores(model, [example])["relevant"][0][:2])
    assert (masses[0] < masses[1]).all() and (masses[1] < masses[2]).all()
    with pytest.raises(ValueError, match="a span"):
        Example(ids[:1], (6, 12), (1, 3))


# --- heads switched off


@MAKE
def test_an_even_head_is_the_running_mean_of_its_values(make):
    model, inputs = make()
    got = maps(model, inputs, switched_off(model, {0: [2]}))
    torch.testing.assert_close(got[0, 2], (torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]).double())
    torch.testing.assert_close(got[:, :2], maps(model, inputs)[:, :2])


def test_ships_by_hand():
    model, ids = stock()
    found = ships(model, ids, layers=[0])
    p = first(model, ids)[:, -1].softmax(-1) + 1e-12
    with switched_off(model, {0: [1]}, "even", 1e-4):
        other = first(model, ids)[:, -1].softmax(-1) + 1e-12
    torch.testing.assert_close(found[0][1], (p * (p / other).log()).sum(-1).mean())
    assert (found[0] > 0).all()
    assert ships(model, ids, layers=[0], factor=1.0)[0].abs().max() < 1e-12
    with switched_off(model, {0: [1]}, "scale", 0.3):
        got = first(model, ids)
    with steer(model, {0: [1]}, scale=0.3):
        assert torch.equal(got, first(model, ids))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, 8:16] = 0
    assert ships(model, ids, layers=[0], how="even")[0][1] == ships(model, ids, layers=[0], how="scale")[0][1] == 0
    padded = {"input_ids": torch.cat([ids, ids[:, :2]], 1), "attention_mask": torch.ones(2, 11, dtype=torch.long)}
    padded["attention_mask"][:, 9:] = 0
    torch.testing.assert_close(ships(model, padded, layers=[0])[0], ships(model, ids, layers=[0])[0])


def test_angles_between_what_prompts_look_like():
    m = torch.randn(5, 12, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    assert subspace_angle(m, m @ turn, 3) == pytest.approx(0, abs=1e-5)
    other = torch.randn(5, 12, dtype=torch.float64)
    order = torch.randperm(5)
    assert subspace_angle(m, other, 2) == pytest.approx(subspace_angle(m[order], other[order], 2))
    assert subspace_angle(m, other) == pytest.approx(subspace_angle(m, -other)) and subspace_angle(m, other) <= 90
    assert subspace_angle(torch.eye(3), torch.eye(3).flip(0) * torch.tensor([[1.0], [2.0], [3.0]])) <= 90
    assert subspace_angle(m, m @ turn, axis="features") > 1
    with pytest.raises(ValueError, match="rank=6"):
        subspace_angle(m, m, 6)


def test_the_greedy_group_starts_with_the_head_that_turns_furthest():
    model, ids = stock()
    ids = models.ids(4)
    base = last_states(model, ids)
    each = {}
    for layer in (0, 1):
        for head in range(4):
            with switched_off(model, {layer: [head]}, "even", 1e-5):
                each[layer, head] = subspace_angle(base, last_states(model, ids))
    found = sahara(model, ids, steps=2)
    best = max(each, key=each.get)
    assert found[0][:2] == best and found[0][2] == pytest.approx(each[best]) and found[1][:2] != best
    assert measures.ships(model, ids, layers=[1])[1].shape == (4,)
