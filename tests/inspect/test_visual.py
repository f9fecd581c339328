"""Sink tokens by massive activations, heads that look at an image, and what sinks hand over to it."""

import pytest
import torch
from tests.inspect import models

import manyheads as mh
from manyheads import capture
from manyheads.core.kernel import Call, attend
from manyheads.core.mask import Axis, Mask, cols_of
from manyheads.inspect import measures, redistribute

IMAGE = slice(2, 7)
CHANNELS = [3, 11]
OPTIONS = {"layers": [0, 1], "level": 3.0, "least": 0.0, "most": 1.0}


def sunk(make=models.decoder, tokens=(0, 4)):
    """A model in which token 7 of the vocabulary is a sink, put at some places of the text."""
    model, ids = make(), models.ids(2, 11, seed=3) % 90 + 9
    ids[:, list(tokens)] = 7
    with torch.no_grad():
        model.get_input_embeddings().weight[7, CHANNELS[0]] = 40.0
    return model.double(), ids


def maps(model, ids, **options):
    with torch.no_grad(), capture(model) as plain:
        before = model(ids).logits
    with torch.no_grad(), redistribute(model, IMAGE, CHANNELS, **{**OPTIONS, **options}), capture(model) as tape:
        after = model(ids).logits
    return plain, tape, before, after


def test_sink_values():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    found = measures.sink_values(x, CHANNELS)
    want = 32**0.5 * x[..., CHANNELS].abs().amax(-1) / x.norm(dim=-1)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(measures.sink_values(100 * x, CHANNELS), found)
    assert (found <= 32**0.5).all() and (measures.sink_values(torch.zeros(1, 32), CHANNELS) == 0).all()
    alone = torch.zeros(1, 32)
    alone[0, 3] = -2
    assert measures.sink_values(alone, CHANNELS).item() == pytest.approx(32**0.5)


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_channels_of_sinks_are_found_again(make):
    model, ids = sunk(make)
    assert measures.sink_channels(model, ids, layers=[0], level=4.0) == [CHANNELS[0]]
    assert measures.sink_channels(model, ids[:, 1:], layers=[0], level=4.0) == []


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_mass_of_sinks_goes_to_the_rest_of_the_image(make):
    model, ids = sunk(make)
    plain, tape, before, after = maps(model, ids)
    old, new, kept = plain[0].weights, tape[0].weights, 0.6
    image, sink = torch.zeros(11, dtype=torch.bool), torch.zeros(11, dtype=torch.bool)
    image[IMAGE], sink[[0, 4]] = True, True
    assert torch.equal(new[:, :, :7], old[:, :, :7])  # queries before the image's end
    old, new = old[:, :, 7:], new[:, :, 7:]
    budget = (1 - kept) * (old * sink).sum(-1)
    torch.testing.assert_close(new[..., sink], kept * old[..., sink])
    assert torch.equal(new[..., ~sink & ~image], old[..., ~sink & ~image])
    rest = image & ~sink
    torch.testing.assert_close(new[..., rest].sum(-1), old[..., rest].sum(-1) + budget)
    torch.testing.assert_close(new[..., rest] / new[..., rest].sum(-1, keepdim=True),
                               old[..., rest] / old[..., rest].sum(-1, keepdim=True))  # fmt: skip
    torch.testing.assert_close(new.sum(-1), torch.ones_like(budget), atol=1e-6, rtol=0)
    assert not torch.allclose(before, after, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_heads_that_are_not_centred_on_the_image_are_left_alone():
    model, ids = sunk()
    plain, tape, _, _ = maps(model, ids, least=0.4, most=0.5)
    old, new = plain[0].weights[:, :, 7:], tape[0].weights[:, :, 7:]
    mass, on = old[..., IMAGE].sum(-1), old[..., 4]
    centred = (mass >= 0.4) & (on <= 0.5 * mass)
    assert 0 < centred.sum() < centred.numel()
    assert torch.equal(new[~centred], old[~centred]) and (new[centred] != old[centred]).any(-1).all()
    found = measures.visual_heads(model, ids, IMAGE, CHANNELS, layers=[0], level=3.0, least=0.4, most=0.5)
    torch.testing.assert_close(found.centred[0], centred.double().mean((0, 2)))
    torch.testing.assert_close(found.image[0], mass.mean((0, 2)))
    torch.testing.assert_close(found.sinks[0], (on / mass).mean((0, 2)))
    torch.testing.assert_close(found.text_sinks[0], old[..., 0].mean((0, 2)))
    assert (found.values[0][0] > 3).nonzero()[:, 1].tolist() == [0, 4, 0, 4]


def test_what_changes_nothing():
    model, ids = sunk()
    for options in ({"kept": 1.0}, {"level": 1e9}):
        _, _, before, after = maps(model, ids, **options)
        assert torch.equal(before, after)
    model, ids = sunk(tokens=(0,))  # no sink in the image
    _, _, before, after = maps(model, ids)
    assert torch.equal(before, after)
    model, ids = sunk(tokens=(2, 3, 4, 5, 6))  # an image of sinks alone has nobody to hand over to
    _, _, _, after = maps(model, ids, layers=[0])
    assert after.isfinite().all()
    torch.testing.assert_close(after, model(ids).logits)


def test_the_same_from_three_partial_attentions():
    """o' = p o(sinks) + o(others) + (1 + Ω/u) o(rest of the image), each with its mass."""
    model, ids = sunk()
    with torch.no_grad(), capture(model, layers=0, what={"q", "k", "v"}) as tape:
        model(ids)
    q, k, v = tape[0].q[:, :, -1:], tape[0].k, tape[0].v
    place = torch.arange(11)
    sink, image = (place == 0) | (place == 4), (place >= 2) & (place < 7)

    def part(where):
        call = Call(q, k, v, Mask(Axis(1, 10), Axis(11, 0), (lambda a, b: cols_of(where[None]),)), 8**-0.5)
        out = attend(call, need_lse=True)
        return out.o, out.lse

    parts = [part(where) for where in (sink, ~sink & ~image, image & ~sink)]
    whole = torch.stack([lse for _, lse in parts]).logsumexp(0)
    (s, s_mass), (o, o_mass), (r, r_mass) = [(out, (lse - whole).exp()[..., None]) for out, lse in parts]
    want = 0.6 * s_mass * s + o_mass * o + (r_mass + 0.4 * s_mass) * r
    with torch.no_grad(), redistribute(model, IMAGE, CHANNELS, **OPTIONS), capture(model, layers=0, what="out") as seen:
        model(ids)
    torch.testing.assert_close(seen[0].out[:, :, -1:], want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_step_by_step_as_in_one_pass(make):
    model, ids = sunk(make)
    with torch.no_grad(), redistribute(model, IMAGE, CHANNELS, **OPTIONS):
        whole = model(ids).logits[:, -3:]
        cache = model(ids[:, :8], use_cache=True).past_key_values
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(8, 11)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: redistribute(m, IMAGE, CHANNELS), "there are no others"),
        (lambda m: redistribute(m, IMAGE, [], [0]), "channels one or more"),
        (lambda m: redistribute(m, IMAGE, CHANNELS, [0], kept=1.2), "kept=1.2"),
        (lambda m: redistribute(m, slice(4, 4), CHANNELS, [0]), "no set of tokens"),
        (lambda m: redistribute(m, [-1], CHANNELS, [0]), "no set of tokens"),
        (lambda m: redistribute(m, IMAGE, CHANNELS, [9]), "there is no layer 9"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(change, says):
    with pytest.raises(ValueError, match=says), change(models.decoder()):
        raise AssertionError("the block must not run")
