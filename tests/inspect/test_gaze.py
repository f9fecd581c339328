"""Heads that look where they are asked to, and heads that are made to."""

import math

import pytest
import torch
from tests.inspect import models

import manyheads as mh
from manyheads import Attention, capture
from manyheads.inspect import look_at, measures

REGIONS = [[2, 3], [4, 5], [6, 7]]


def pair(make):
    return make(), models.ids(2, 10)


def maps(model, ids, *args, **options):
    with torch.no_grad(), capture(model, what={"weights", "out"}) as plain:
        before = model(ids).logits
    with torch.no_grad(), look_at(model, *args, **options), capture(model, what={"weights", "out"}) as tape:
        after = model(ids).logits
    return plain, tape, before, after


both = pytest.mark.parametrize("make", [lambda: models.decoder().double(), lambda: mh.adopt(models.decoder()).double()])


def test_panels_and_boxes():
    each = measures.panels(2, 7, 3, first=5)
    assert sorted(token for panel in each for token in panel) == list(range(5, 19))
    columns = [{(token - 5) % 7 for token in panel} for panel in each]
    assert [max(c) for c in columns] == sorted(max(c) for c in columns) and all(columns)
    assert measures.panels(1, 3, 3) == [[0], [1], [2]]
    assert measures.box(2, 2, (0, 0, 0.5, 1.0), first=1) == [1, 2]
    with pytest.raises(ValueError, match="a column each"):
        measures.panels(2, 2, 3)
    with pytest.raises(ValueError, match="no token"):
        measures.box(2, 2, (0, 0, 0.1, 0.1))


class Asked(torch.nn.Module):
    """A prompt whose last token names a token; head 0 looks there, head 1 everywhere."""

    def __init__(self):
        super().__init__()
        self.layer = Attention("gqa(head_dim=12, scale=1.0) + rope(none)", 24, 2).eval()
        with torch.no_grad():
            self.layer.project.q_proj.weight.zero_()
            self.layer.project.q_proj.weight[:12, 12:] = 50 * torch.eye(12)
            self.layer.project.k_proj.weight[:12] = torch.eye(24)[:12]

    def forward(self, named):
        x = torch.zeros(len(named), 12, 24)
        x[:, :, :12] = torch.eye(12)
        x[range(len(named)), -1, 12 + named] = 1
        return self.layer(x)


def test_a_head_that_looks_where_it_is_asked_to():
    model = Asked()
    prompts = [[torch.tensor(region), torch.tensor(region[:1])] for region in REGIONS]
    found = measures.gaze(model, prompts, REGIONS)
    torch.testing.assert_close(found.matrix[0][0], torch.eye(3, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.scores[0], torch.tensor([1, 2 / 12], dtype=torch.float64), atol=1e-6, rtol=0)
    assert (found.matrix[0].sum(-1) <= 1 + 1e-6).all() and found.heads(1) == {0: [0]}
    with pytest.raises(ValueError, match="one about each"):
        measures.gaze(model, prompts[:2], REGIONS)
    with pytest.raises(ValueError, match="two or more"):
        measures.gaze(model, prompts[:1], REGIONS[:1])


def test_padding_on_either_side_is_not_the_last_token():
    model, ids = models.decoder().double(), models.ids(1, 8)
    pad = torch.zeros(1, 2, dtype=torch.long)
    want = measures.gaze(model, [ids, ids, ids], REGIONS).matrix.grid
    right = {"input_ids": torch.cat([ids, pad], 1), "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    right["attention_mask"][:, 8:] = 0
    torch.testing.assert_close(measures.gaze(model, [right] * 3, REGIONS).matrix.grid, want)


@both
def test_odds_grow_as_the_bias_says(make):
    model, ids = pair(make)
    plain, tape, before, after = maps(model, ids, {0: [1, 2]}, REGIONS, 1, bias=1.5)
    old, new = plain[0].weights[:, [1, 2], 8:], tape[0].weights[:, [1, 2], 8:]
    at = {
        name: lambda w, s=s: w[..., s].sum(-1)
        for name, s in (("to", [4, 5]), ("others", [2, 3, 6, 7]), ("text", [0, 1, 8]))
    }
    for name, power in (("text", 1), ("others", 2)):
        torch.testing.assert_close(at["to"](new) / at[name](new), math.exp(1.5 * power) * at["to"](old) / at[name](old))
    rest = [0, 3]
    assert torch.equal(tape[0].weights[:, rest], plain[0].weights[:, rest])  # of other heads, in the first such layer
    assert not torch.allclose(before, after)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert torch.equal(maps(model, ids, {0: [1, 2]}, REGIONS, 1, bias=0.0)[3], before)


@both
def test_at_a_large_bias_nothing_else_is_looked_at(make):
    model, ids = pair(make)
    plain, tape, _, _ = maps(model, ids, {0: [1]}, REGIONS, 1)
    old, new = plain[0].weights[:, 1, 6:, 4:6], tape[0].weights[:, 1, 6:, 4:6]
    torch.testing.assert_close(new, old / old.sum(-1, keepdim=True))
    single = model.float()
    _, tape, _, after = maps(single, ids, {0: [1]}, REGIONS, 1)
    torch.testing.assert_close(tape[0].weights[:, 1, 6:, 4:6], new.float(), atol=1e-5, rtol=1e-5)  # in float32 too
    assert after.isfinite().all()


def test_what_is_suppressed():
    model, ids = pair(lambda: models.decoder().double())
    plain, tape, _, _ = maps(model, ids, {0: [0]}, REGIONS, 1, raised=False)
    old, new = plain[0].weights[:, 0, 8:], tape[0].weights[:, 0, 8:].clone()
    assert new[..., [2, 3, 6, 7]].amax() == 0
    kept = [0, 1, 4, 5, 8, 9]
    torch.testing.assert_close(new[..., kept], old[..., kept] / old[..., kept].sum(-1, keepdim=True))
    with (
        torch.no_grad(),
        look_at(model, {0: [0]}, REGIONS, 1, raised=False, suppress="prompt", bias=1e4),
        capture(model) as tape,
    ):
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
    new = tape[0].weights[:, 0, 0]
    assert new[:, [0, 1, 2, 3, 6, 7, 8, 9]].amax() == 0 and (new[:, 10] > 0).all()  # what is written may be looked at


@both
def test_a_schedule_turns_heads_while_the_model_writes(make):
    model, ids = pair(make)
    heads = {0: [1], 1: [2]}
    turning, following = look_at(model, heads, REGIONS, [(1, 0), (3, 2)]), measures.trajectory(model, heads, REGIONS)
    with torch.no_grad(), turning, following as path:
        cache = model(ids, use_cache=True).past_key_values
        for t in range(4):
            cache = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).past_key_values
    assert path.masses.shape == (5, 2, 2, 3) and path.heads == [(0, 1), (1, 2)]
    assert path.looks_at()[1:].tolist() == [[0, 0], [0, 0], [2, 2], [2, 2]]
    torch.testing.assert_close(path.masses[1:3, ..., 0], torch.ones(2, 2, 2, dtype=torch.float64))
    assert path.masses[0].max() < 1
    with (
        torch.no_grad(),
        capture(model, layers=0, what={"weights", "v"}) as tape,
        measures.trajectory(model, {0: [1]}, REGIONS, sized=True) as sized,
    ):
        model(ids)
    want = (tape[0].weights[:, 1, -1] * tape[0].v[:, 1].norm(dim=-1))[:, 2:8].unflatten(1, (3, 2)).sum(-1)
    torch.testing.assert_close(sized.masses[0][:, 0], want)


def test_the_prompt_alone_is_spared():
    model, ids = pair(lambda: models.decoder().double())
    _, _, before, after = maps(model, ids, {0: [1]}, REGIONS, 1, decode_only=True)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: look_at(m, {0: [1]}, REGIONS, 3), "a region from 0 to 2"),
        (lambda m: look_at(m, {0: [1]}, REGIONS, [(-1, 0)]), "steps from 0"),
        (lambda m: look_at(m, {0: [1]}, REGIONS, 0, bias=-1.0), "bias=-1.0"),
        (lambda m: look_at(m, {0: [1]}, REGIONS, 0, suppress="text"), "suppress='text'"),
        (lambda m: look_at(m, {0: [9]}, REGIONS, 0), "there is no head 9"),
        (lambda m: look_at(m, {0: [1]}, [[1], []], 0), "region 1"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(change, says):
    with pytest.raises(ValueError, match=says), change(models.decoder()):
        raise AssertionError("the block must not run")
