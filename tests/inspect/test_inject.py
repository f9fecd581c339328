"""Patterns in maps, and heads that are fixed to them."""

import pytest
import torch
from tests.inspect import models

import manyheads as mh
from manyheads import capture
from manyheads.core.mask import Axis
from manyheads.inspect import PatternLayer, inject, measures
from manyheads.inspect.measures import measure

IDS = torch.tensor([[5, 9, 5, 7, 8, 9, 3, 8], [4, 4, 7, 6, 5, 7, 2, 1]])
everything = lambda ids, axis: lambda q, k: torch.ones(1, 1, q.length, k.length, dtype=torch.bool)


def maps(model, heads, pattern, how, ids=IDS):
    with torch.no_grad(), capture(model, what={"weights", "v", "out"}) as plain:
        before = model(ids)[0]
    with torch.no_grad(), inject(model, heads, pattern, how), capture(model, what={"weights", "v", "out"}) as tape:
        after = model(ids)[0]
    with torch.no_grad():
        assert torch.equal(model(ids)[0], before)
    return plain[0], tape[0], before, after


def test_rules_of_patterns():
    axis = Axis(8, 0)
    token = measures.same_token(IDS, axis)(axis, axis)
    assert torch.equal(token, token.mT) and token[0, 0, 0].nonzero().flatten().tolist() == [2]
    sentence = measures.same_sentence([7])(IDS, axis)(axis, axis).long()[:, 0]
    assert torch.equal(sentence, sentence.mT) and (sentence.diagonal(dim1=1, dim2=2) == 1).all()
    assert torch.equal((sentence @ sentence > 0).long(), sentence)  # of a friend of mine a friend
    assert sentence[0, 0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0] and sentence[1, 5].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert measures.offset(-1)(None, axis)(axis, axis)[0, 0].nonzero().tolist() == [[t, t - 1] for t in range(1, 8)]
    with pytest.raises(ValueError, match="needs token ids"):
        measures.same_token(None, axis)


@pytest.mark.parametrize("make", [models.decoder, models.bert, lambda: mh.adopt(models.decoder())])
def test_a_synthesised_head_gives_the_mean_of_the_pattern(make):
    model = make().double()
    plain, tape, before, after = maps(model, {0: [1]}, measures.offset(-1), "synthesize")
    v, out = plain.v[:, 1], tape.out[:, 1]
    torch.testing.assert_close(out[:, 1:], v[:, :-1])
    first = v[:, :1] if make is not models.bert else v.mean(1, keepdim=True)  # a first token sees nobody before it
    torch.testing.assert_close(out[:, :1], first)
    assert torch.equal(tape.weights[:, [0, 2, 3]], plain.weights[:, [0, 2, 3]]) and not torch.allclose(before, after)
    followed = measures.relevance(measures.offset(-1))
    with inject(model, {0: [1]}, measures.offset(-1), "synthesize"):
        found = measure(model, IDS, {"it": followed}, fewest=1)["it"][0]
    assert found[1].item() == pytest.approx(1)
    assert measure(model, IDS, {"it": measures.relevance(everything)}, fewest=1)["it"][0].tolist() == pytest.approx(
        [1] * 4
    )


@pytest.mark.parametrize("make", [models.decoder, models.bert])
def test_a_masked_head_keeps_its_proportions_within_the_pattern(make):
    model = make().double()
    plain, tape, before, after = maps(model, {0: [0, 2]}, measures.same_token, "mask")
    axis = Axis(8, 0)
    rule = measures.same_token(IDS, axis)(axis, axis)[:, 0].expand(2, 8, 8)
    old, new = plain.weights[:, 2], tape.weights[:, 2]
    inside = old * rule
    partner = inside.sum(-1) > 0
    assert partner.any() and not partner.all()
    torch.testing.assert_close(new[partner], (inside / inside.sum(-1, keepdim=True))[partner])
    torch.testing.assert_close(new[~partner], old[~partner])
    _, _, before, after = maps(model, {0: [0, 2]}, everything, "mask")
    torch.testing.assert_close(after, before)


def test_patterns_of_cached_tokens_and_of_positions_with_a_bias():
    for spec in ("gqa", "gqa + alibi"):
        model = mh.Decoder(12, spec, 32, 4, layers=2).double().eval()
        for how in ("mask", "synthesize"):
            with torch.no_grad(), inject(model, {0: [1], 1: None}, measures.same_token, how):
                whole, cache = model(IDS), mh.Cache()
                steps = [model(IDS[:, :5], cache=cache), *(model(IDS[:, t : t + 1], cache=cache) for t in range(5, 8))]
            torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_a_model_trains_inside():
    model = mh.Decoder(12, "gqa", 32, 4, layers=2)
    with inject(model, {0: [0]}, measures.same_token), inject(model, {0: [1]}, measures.offset(-1), "synthesize"):
        measures.next_token_loss(model(IDS), IDS).mean().backward()
    grads = model.stack.blocks[0].attention.project.q_proj.weight.grad.unflatten(0, (4, 8)).flatten(1).norm(dim=1)
    assert grads.isfinite().all() and grads[1] == 0 and (grads[[0, 2, 3]] > 0).all()


@pytest.mark.parametrize("make", [models.decoder, lambda: mh.adopt(models.decoder())])
def test_importance_by_a_heads_own_weights(make):
    model = make().double()
    ids = models.ids(3, 8)
    with torch.no_grad():
        layer = measures.weights.chosen(model, 1)[0]
        o = layer.output if layer.output is not None else layer.module.project.o_proj
        o.weight[:, 8:16] = 0
    found = measures.weight_importance(model, ids, normalised=False)
    place = layer.module if layer.output is not None else layer.module.project
    weights = {name: getattr(place, f"{name}_proj").weight for name in "qkvo"}
    model.zero_grad()
    for p in weights.values():
        p.requires_grad_(True)
    measures.next_token_loss(model(ids), ids).mean().backward()
    square = {name: (p * p.grad).square().detach() for name, p in weights.items()}
    want = torch.stack([
        square["q"].unflatten(0, (4, 8))[h].sum() + square["o"].unflatten(1, (4, 8))[:, h].sum()
        + sum(square[n].unflatten(0, (2, 8))[h // 2].sum() for n in "kv") for h in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(found[1], want)
    assert (found.grid >= 0).all()
    alone = square["q"].unflatten(0, (4, 8))[1].sum() + square["o"].unflatten(1, (4, 8))[:, 1].sum()
    assert alone == 0  # what is said of it is of the keys it shares
    assert measures.weight_importance(model, ids)[0].max() == 1
    zero = measures.weight_importance(model, ids, lambda out, ids: 0 * out.logits.sum((1, 2)))
    assert (zero.grid == 0).all()
    with pytest.raises(ValueError, match="not one matrix each"):
        measures.weight_importance(models.gpt2(), ids)


def test_heads_that_follow_a_pattern_stand_out_of_random_ones():
    rows = {0: torch.tensor([0.9, 0.1, 0.2, 0.8]).double(), 1: torch.rand(12).double() * 0.3}
    table = measures.HeadTable("it", rows)
    assert measures.stands_out(table, {0: [0, 3]}) < 0.05 < measures.stands_out(table, {0: [1, 2]})
    assert measures.stands_out(table, {0: None, 1: None}) == 1.0
    with pytest.raises(ValueError, match="the table has layers"):
        measures.stands_out(table, {5: None})


def test_a_layer_of_patterns_beside_a_block():
    torch.manual_seed(0)
    patterns = [(measures.same_token, "mask"), (measures.offset(-1), "synthesize"), (measures.offset(1), "synthesize")]
    layer, x = PatternLayer(10, 6, patterns).double(), torch.randn(2, 8, 10, dtype=torch.float64)
    assert torch.equal(layer(x, IDS), x) and sum(p.numel() for p in layer.parameters()) == 2 * 10 * 6 + 3 * 36
    torch.nn.init.normal_(layer.up.weight)
    v = layer.v_proj(layer.down(x)).unflatten(-1, (3, 2))
    with torch.no_grad():
        layer.up.weight[:, :2] = 0  # the synthesised heads alone
    before, after = v[:, :, 1].roll(1, 1), v[:, :, 2].roll(-1, 1)
    before[:, 0], after[:, -1] = v[:, :, 1].mean(1), v[:, :, 2].mean(1)
    o = torch.cat([torch.zeros_like(before), before, after], -1)
    torch.testing.assert_close(layer(x, IDS), x + torch.nn.functional.gelu(layer.up(o)))
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[:, 6:] = False
    torch.testing.assert_close(layer(x, IDS, valid)[:, :6], layer(x[:, :6], IDS[:, :6]))
    with pytest.raises(ValueError, match="width=7"):
        PatternLayer(10, 7, patterns)


def test_what_does_not_fit_is_refused_at_once():
    with pytest.raises(ValueError, match="how='fix'"), inject(models.decoder(), {0: [1]}, measures.offset(-1), "fix"):
        pass
    with pytest.raises(ValueError, match="there is no head 9"), inject(models.decoder(), {0: [9]}, measures.offset(-1)):
        pass
