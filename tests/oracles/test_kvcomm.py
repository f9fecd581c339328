"""KVComm, arXiv 2510.03346: rows of some layers handed from one model to another."""

import pytest
import torch
from tests.stack import tiny

import manyheads as mh
from manyheads.core.prefix import PrefixCache
from manyheads.stack.handover import Handover, choose, source_layers

N, T = 9, 5
CONTEXT = torch.randint(tiny.VOCAB, (1, N), generator=torch.Generator().manual_seed(2))
ASKED = torch.randint(tiny.VOCAB, (2, T), generator=torch.Generator().manual_seed(3))
PLACES = N + torch.arange(T)[None]


def make(seed=0, body="own", case="gqa", **options):
    model = tiny.model(case, body, **options).double()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False)


def asked(model, cache, cut=slice(None)):
    return model(ASKED[:, cut], cache=cache, position_ids=PLACES[:, cut]).logits


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("body", tiny.BODIES)
def test_all_layers_of_the_same_model_are_the_context_itself(body):
    model = make(body=body)
    handover = Handover(model, model)
    context = handover.read(CONTEXT)
    got = asked(model, handover.give(context, range(4)).branch(2))
    same(got, model(torch.cat([CONTEXT.expand(2, -1), ASKED], 1), use_cache=False).logits[:, N:])


def test_without_chosen_layers_only_the_first_reads_the_context():
    sender, receiver = make(1), make(2)
    handover = Handover(sender, receiver)
    context = handover.read(CONTEXT)
    given = handover.give(context, choose(torch.rand(4), 0.0))
    want = asked(receiver, given.branch(2))
    for layer in (1, 2, 3):
        for growing in context.site(layer).growing.values():
            growing.rows()[:, :, 1:] = 7.0
    same(asked(receiver, handover.give(context, []).branch(2)), want)
    for growing in context.site(0).growing.values():
        growing.rows()[:, :, 1:] = 7.0
    assert not torch.allclose(asked(receiver, handover.give(context, []).branch(2)), want)


@pytest.mark.parametrize("shift_back", [False, True])
def test_token_by_token_is_the_pass_at_once_and_both_are_attention_over_those_rows(shift_back):
    """Written out: a layer that holds the sink alone reads it at position 0, or right before the queries."""
    sender, receiver = make(1), make(2)
    handover = Handover(sender, receiver)
    context = handover.read(CONTEXT)
    given = handover.give(context, [2], shift_back=shift_back)
    whole, cache = asked(receiver, given.branch(2)), given.branch(2)
    same(torch.cat([asked(receiver, cache, slice(at, at + 1)) for at in range(T)], 1), whole)

    stack, x = receiver.model.decoder, receiver.get_input_embeddings()(ASKED)
    for index, (layer, block) in enumerate(zip(receiver.attentions, stack.stack.blocks, strict=True)):
        rows = slice(None) if index in (0, 2) else slice(1)
        k, v = (context.site(index).growing[name].rows()[:, :, rows].expand(2, -1, -1, -1) for name in "kv")
        turn = layer.positions[0].turn
        z = block.attention_norm(x)
        q, own_k, own_v = (
            getattr(layer.project, f"{name}_proj")(z).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv"
        )
        first = 1 if shift_back and index in (1, 3) else N  # the positions of q and of the receiver's keys
        axis = mh.Axis(T, first)
        keys, values = torch.cat([k, turn(own_k, axis)], 2), torch.cat([v, own_v], 2)
        past = keys.shape[2] - T
        seen = torch.ones(T, past + T, dtype=torch.bool).tril(past)
        scores = turn(q, axis) @ keys.repeat_interleave(2, 1).mT / 8**0.5
        o = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values.repeat_interleave(2, 1)
        x = x + layer.project.o_proj(o.transpose(1, 2).flatten(2))
        x = x + block.ffn(block.ffn_norm(x))
    same(stack.head(stack.norm(x)), whole)


def test_importance_is_the_attention_to_the_context_without_its_first_token():
    sender, receiver = make(1), make(2)
    handover = Handover(sender, receiver)
    context = handover.read(CONTEXT)
    found = handover.importance(context, ASKED)
    assert found.shape == (4,) and (found >= 0).all() and (found <= 1).all()
    layer, block = receiver.attentions[0], receiver.model.decoder.stack.blocks[0]
    z, axis = block.attention_norm(receiver.get_input_embeddings()(ASKED)), mh.Axis(T, N)
    q, k = (getattr(layer.project, f"{name}_proj")(z).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qk")
    q, k = (layer.positions[0].turn(each, axis) for each in (q, k))
    keys = torch.cat([context.site(0).growing["k"].rows().expand(2, -1, -1, -1), k], 2).repeat_interleave(2, 1)
    seen = torch.ones(T, N + T, dtype=torch.bool).tril(N)
    weights = (q @ keys.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    same(found[0], weights[..., 1:N].sum(-1).mean())
    assert handover.importance(handover.read(CONTEXT[:, :1]), ASKED).tolist() == [0.0] * 4


def test_the_choice():
    importance = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.0, 0.5, 0.6, 0.7])
    assert choose(importance, 0.3) == [1, 3, 9] and choose(importance, 0.0) == []
    assert choose(importance, 1.0) == [*range(10)] and choose(torch.ones(4), 0.5) == [0, 1]
    for ratio in (0.1, 0.29, 0.3, 0.5, 0.7):
        assert len(choose(importance, ratio, alpha=0.5)) == int(ratio * 10 + 1e-9)
    assert choose(importance, 0.4, alpha=0.0, sigma=2.0) == [3, 4, 5, 6]  # around the middle, 4.5
    assert choose(importance, 0.3, alpha=0.0, mu=7.0) == [6, 7, 8]
    for wrong in ({"ratio": 1.5}, {"ratio": 0.5, "alpha": -1}, {"ratio": 0.5, "sigma": 0}):
        with pytest.raises(ValueError, match="lie between 0 and 1"):
            choose(importance, **wrong)


def test_the_map_of_layers():
    assert source_layers(7, 7) == [*range(7)]
    for a in range(1, 9):
        for b in range(1, 9):
            found = source_layers(a, b)
            assert len(found) == b and found == sorted(found) and found[0] >= 0 and found[-1] < a
    deep = make(1, num_hidden_layers=6)
    handover = Handover(deep, make(2))
    assert handover.sources == [0, 2, 3, 5]
    context = handover.read(CONTEXT)
    own = PrefixCache()
    deep(CONTEXT, cache=own)
    same(context.site(1).growing["k"].rows(), own.site(2).growing["k"].rows())


def test_bytes_are_those_of_the_rows_handed_over():
    handover = Handover(make(1), make(2))
    row, context = 2 * 2 * 8 * 8, handover.read(CONTEXT)
    for layers in ([0], [0, 2], [0, 1, 2, 3]):
        m = len(layers)
        assert handover.give(context, layers).bytes() == row * (m * N + (4 - m))
    given = handover.give(context, [0, 2])
    assert given.branch(5).bytes() == given.bytes()  # however many questions are about it


def test_what_cannot_be_handed_over_is_refused_at_once():
    model = make()
    for other, says in (
        (make(case={"specs": "gqa(kv_heads=4)"}), r"2 x 8 k, 2 x 8 v are not 4 x 8 k, 4 x 8 v"),
        (make(case={"specs": "gqa(kv_heads=2) + rope(base=500.0)"}), "positions enter them in another way"),
        (make(case="window"), "forgets old rows"), (make(case="mtla"), "mtla breaks 'token keys'"),
        (make(case={"specs": "retnet"}), "breaks"), (make(case="shared"), "reads those of another layer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            Handover(model, other)
    handover = Handover(model, model)
    for ids, says in (
        (ASKED, r"one sequence of tokens, \[1, n\]"), (CONTEXT[:, :0], r"this is \[1, 0\]"), (CONTEXT + 99, "outside")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            handover.read(ids)
    short = make(body="llama", max_position_embeddings=8)
    with pytest.raises(ValueError, match="has 9 tokens; the model was made for 8 positions"):
        Handover(short, short).read(CONTEXT)
    context = handover.read(CONTEXT)
    with pytest.raises(ValueError, match="there is no layer 4; the receiver has 4"):
        handover.give(context, [4])
    with pytest.raises(ValueError, match="no context that"):
        handover.give(context.branch(2), [1])
    wide = make(case={"specs": "gqa(kv_heads=4)"})
    with pytest.raises(
        ValueError, match=r"has 4 x 8 numbers of 'k' a token at layer 0, torch.float64; this layer has 2"
    ):
        handover.give(Handover(wide, wide).read(CONTEXT), [1])
    with pytest.raises(ValueError, match="moves rows that are cached rotated"):
        late = make(case={"specs": "mhe"})
        late_handover = Handover(late, late)
        late_handover.give(late_handover.read(CONTEXT), [1], shift_back=True)
