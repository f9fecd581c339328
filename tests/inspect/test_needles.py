"""Heads that copy and count: planted ones, matched random ones, rotary pairs taken out."""

import pytest
import torch
from tests.inspect import models
from tests.inspect.planted import Copier, counting

import manyheads as mh
from manyheads import Attention, Decoder, capture
from manyheads.inspect import HeadTable, layers_of, measures, rotary_pairs, without_pairs
from manyheads.inspect.measures import discoveries, knock_out, layer_test, matched, needles, retrieval_heads
from manyheads.inspect.measures.behaviour import copies


def planted():
    hay = torch.tensor([9, 8, 7, 10, 11, 12, 13, 14, 15, 16])
    return Copier().eval(), needles(hay, [[1, 2, 3, 4], [20, 21, 22, 23]], [[1], [20]], 12, (0.2, 0.5, 1.0))


def test_prompts_are_what_they_say():
    _, given = planted()
    assert given.prompts.shape == (6, 12) and len(given) == 6
    assert given.spans[:3] == ((1, 5), (4, 8), (7, 11)) and given.ids == [[1, 2, 3, 4]] * 3 + [[20, 21, 22, 23]] * 3
    for row, (first, last) in zip(given.prompts, given.spans, strict=True):
        assert [*row[:first].tolist(), *row[last:-1].tolist()] == [9, 8, 7, 10, 11, 12, 13]
    with pytest.raises(ValueError, match="has -1 of haystack"):
        needles(torch.arange(5), [[1, 2]], [[3]], 2)


def test_a_planted_head_copies_and_taking_it_out_loses_the_needle():
    model, given = planted()
    scores = retrieval_heads(model, given, new_tokens=3)
    assert scores[1].tolist() == [0.75, 0.0] and scores[0].tolist() == [0.0, 0.0]  # the first token is in the question
    found = knock_out(model, given, {1: [0]}, new_tokens=3, draws=2)
    assert (found.intact == 0.75).all() and (found.without < 0.3).all()
    assert all(torch.equal(each, found.intact) for each in found.random)
    assert found.drawn == ({1: [1]}, {1: [1]})
    alone = [measures.retrieval(model, row[None], span, 3) for row, span in
             zip(given.prompts, given.spans, strict=True)]  # fmt: skip
    batch = copies(model, given.prompts, given.spans, 3)
    assert [one.written for one in alone] == batch.written
    assert torch.equal(torch.stack([one.scores[1] for one in alone]), batch.scores[1])


def test_prompts_that_are_not_answered_do_not_count():
    model, given = planted()
    assert retrieval_heads(model, given, new_tokens=1).grid.isnan().all()  # a quarter of a needle is no answer


def test_random_heads_match_by_layer():
    model = Decoder(50, "gqa", 32, 4, layers=3)
    for seed in range(4):
        found = matched(model, {0: [1, 2], 2: [3]}, seed)
        assert [len(of) for of in found.values()] == [2, 1] and found[0] == [0, 3] and 3 not in found[2]
    short = matched(model, {1: [0, 1, 2]})
    assert sum(map(len, short.values())) == 3 and short[1] == [3]
    assert matched(model, {0: [1]}, 5) == matched(model, {0: [1]}, 5)
    with pytest.raises(ValueError, match="more than half"):
        matched(model, {0: None, 1: None})


def test_layers_exchange_their_labels_whole():
    values = torch.rand(8, 4, dtype=torch.float64)
    values[:4] += 2
    values[0] += 2
    table = HeadTable("it", dict(enumerate(values)))
    found = layer_test(table, {0: [0, 1, 2, 3]}, draws=2000)
    assert found.d > 1 and found.p == pytest.approx(1 / 8, abs=0.03)  # four heads, but one layer of eight
    assert layer_test(table, {layer: [0, 1, 2, 3] for layer in range(4)}, draws=4000).p < 0.06
    assert discoveries([0.001, 0.03, 0.04, 0.5]) == [True, False, False, False]
    assert discoveries([0.04, 0.001, 0.02, 0.03]) == [True] * 4
    with pytest.raises(ValueError, match="all or none"):
        layer_test(table, {})


# --- rotary pairs


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_pairs_are_read_off_the_rotation(pairing):
    layer = layers_of(Attention(f"gqa + rope(pairing={pairing})", 32, 4))[0]
    pairs, angle = rotary_pairs(layer.module, layer)
    want = [[p, p + 4] if pairing == "half" else [2 * p, 2 * p + 1] for p in range(4)]
    assert pairs.tolist() == want
    torch.testing.assert_close(angle, 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4), atol=1e-6, rtol=1e-4)
    stock = models.decoder()
    theirs, _ = rotary_pairs(stock, layers_of(stock)[0])
    assert theirs.tolist() == [[p, p + 4] for p in range(4)]
    part = layers_of(Attention("gqa + rope(fraction=0.5)", 32, 4))[0]
    assert rotary_pairs(part.module, part)[0].tolist() == [[0, 2], [1, 3]]
    for spec in ("gqa + rope(none)", "gqa + alibi"):
        none = layers_of(Attention(spec, 32, 4))[0]
        with pytest.raises(ValueError, match="turn"):
            rotary_pairs(none.module, none)


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_zeroed_pairs_take_their_terms_out_of_the_scores(make):
    model, ids = make(), models.ids()
    with torch.no_grad():
        before = model(ids).logits
        with capture(model, what={"q", "k", "scores"}) as plain:
            model(ids)
        with without_pairs(model, {0: [1, 2]}, 3), capture(model, layers=0, what={"scores", "weights"}) as seen:
            model(ids)
        with without_pairs(model, {0: [1, 2]}, 3, of="k"), capture(model, layers=0, what="scores") as keys:
            model(ids)
        q = plain[0].q.clone()
        q[:, 1:3][..., [1, 2, 3, 5, 6, 7]] = 0
        hidden = plain[0].scores == -torch.inf
        want = (q @ plain[0].k.mT * 8**-0.5).masked_fill(hidden, -torch.inf)
        torch.testing.assert_close(seen[0].scores, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(keys[0].scores, want, atol=1e-5, rtol=1e-5)
        with without_pairs(model, {0: [1]}, 4), capture(model, layers=0) as even:
            model(ids)
        torch.testing.assert_close(even[0].weights[0, 1], torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None])
        with without_pairs(model, {0: [1]}, 0):
            assert torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
    with pytest.raises(ValueError, match=r"4 pairs, 0 .the fastest. to 3"), without_pairs(model, {0: [1]}, [4]):
        pass


def test_slow_pairs_hardly_change_with_distance():
    layer = Attention("gqa + rope", 64, 2).double().eval()
    x = torch.randn(1, 1, 64, dtype=torch.float64).expand(1, 9, 64)
    with torch.no_grad(), without_pairs(layer, {0: None}, range(12)), capture(layer, what="scores") as tape:
        layer(x)  # of 16 pairs the slowest 4: 1e-3 radians a token at most
    row = tape[0].scores[0, :, -1]
    torch.testing.assert_close(row, row[:, -1:].expand_as(row), atol=0.05, rtol=1e-2)


# --- successors


def test_what_the_right_token_is_held_against_and_the_ends_of_a_round():
    model, lists = counting(), [[2, 3, 4, 5, 6], [0, 4, 1]]
    for among in ("list", "lists", "vocab"):
        got = measures.successor(model, lists[:1], among=among)
        assert got.grid.tolist() == [[1.0, 0.0]] * 2
    round_ = [[*range(12)]]
    assert measures.successor(model, round_, ends=True).grid.tolist() == [[1.0, 0.0]] * 2  # 11 becomes 0
    assert measures.successor(model, lists[:1], ends=True).grid.tolist() == [[0.0, 0.0]] * 2  # 6 becomes 7, not 2
    assert measures.successor(model, lists[:1], step=-1).grid.tolist() == [[0.0, 0.0]] * 2
    with torch.no_grad():
        weight = model.stack.blocks[1].attention.project.o_proj.weight
        before = measures.successor(model, lists).grid
        weight.mul_(3)
        assert torch.equal(measures.successor(model, lists).grid, before)
        weight.mul_(-1)  # what was highest is lowest
        assert measures.successor(model, lists[:1])[1].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="among="):
        measures.successor(model, lists, among="all")


def test_ordinals_are_runs_of_single_tokens():
    table = {f" {word}": 100 + at for at, word in enumerate(["Mon", "Tue", "Wed", "Thu", "Sat"])} | {"0": 0, "1": 1}

    def tokenizer(text, add_special_tokens):
        return {"input_ids": [table[text]] if text in table else [7, 8]}

    assert measures.ordinals(tokenizer) == {"short days _": [100, 101, 102, 103]}
    assert measures.ordinals(tokenizer, {"bits": ["0", "1"]}, fewest=2) == {"bits": [0, 1]}


def test_the_least_important_heads_go_first_and_layers_keep_some():
    table = HeadTable("importance", {0: torch.tensor([0.1, 0.2, 0.3]), 1: torch.tensor([5.0, 0.4, 6.0])})
    assert measures.least_important(table, 0.5) == {0: [0, 1], 1: [1]}
    assert measures.least_important(table, 0.5, keep=0) == {0: [0, 1, 2]}
    assert measures.least_important(table, 1.0) == {0: [0, 1], 1: [0, 1]}
    assert measures.least_important(table, 0) == {}
    with pytest.raises(ValueError, match="share="):
        measures.least_important(table, 1.5)


def test_a_role_that_weights_alone_tell():
    from manyheads.inspect import ROLES, roles

    model = counting()
    found = roles(model, torch.arange(12)[None], torch.arange(12).repeat(1, 2), ordinals=[[2, 3, 4, 5, 6]])
    assert found.scores["successor"].grid.tolist() == [[1.0, 0.0]] * 2 and found.chance["successor"][0][0] == 0.2
    assert "successor" in found.labels[0, 0] and "successor" not in found.labels.get((0, 1), ())
    assert [role.name for role in ROLES][-1] == "successor"
