"""Without one of its principles attention cannot do one task or another; beside a standard layer it can."""

import pytest
import torch
from examples.attention_deconstruction import BACK, LENGTH, MODELS, STATIC, WORDS, accuracy, back, model, recall

import manyheads as mh


def test_what_is_to_be_said():
    ids, answers = back(4)
    assert (answers[:, :BACK] == -100).all() and torch.equal(answers[:, BACK:], ids[:, :-BACK])
    ids, answers = recall(64)
    for row, wanted in zip(ids.tolist(), answers.tolist(), strict=True):
        assert wanted[1::2] == [-100] * (LENGTH // 2)
        for t in range(0, LENGTH, 2):
            before = [row[s + 1] for s in range(0, t, 2) if row[s] == row[t]]
            assert wanted[t] == (before[-1] if before else -100) and len({*before, row[t + 1]}) == 1


def test_uniform_weights_are_a_running_mean_of_values():
    for spec in ("gqa(scale=0.0) + rope(none)", STATIC):  # whose bias is zero at first
        layer = mh.Attention(spec, 16, 2).double()
        x = torch.randn(1, 6, 16, dtype=torch.float64)
        mean = layer.project.v_proj(x).cumsum(1) / torch.arange(1, 7)[:, None]
        torch.testing.assert_close(layer(x), layer.project.o_proj(mean))


def test_without_mixing_a_token_depends_on_itself_alone():
    decoder = model("no mixing")
    ids = torch.randint(WORDS, (1, 6))
    other = ids.clone()
    other[0, 2] = (ids[0, 2] + 1) % WORDS
    with torch.no_grad():
        same = torch.isclose(decoder(ids), decoder(other), atol=1e-6).all(-1)[0]
    assert same.tolist() == [True, True, False, True, True, True]


def test_weights_by_position_do_not_see_the_words():
    layer = mh.Attention(STATIC, 16, 2)
    torch.nn.init.normal_(layer.positions[0].weight)
    with mh.capture(layer) as tape:
        for _ in range(2):
            layer(torch.randn(1, 6, 16))
    one, two = (each.weights for each in tape.passes(0))
    torch.testing.assert_close(one, two)
    assert (one.sum(-1) - 1).abs().max() < 1e-6 and one.std() > 0.01


def test_maps_of_the_first_layer_make_no_queries_and_keys_later():
    decoder = model("maps of the first layer")
    assert decoder.stack.attn_source == [None, 0]
    assert {n.split(".")[-2] for n, _ in decoder.stack.attentions[1].named_parameters()} == {"v_proj", "o_proj"}


@pytest.mark.parametrize("name", MODELS)
def test_decoding_is_the_full_pass(name):
    decoder, cache = model(name).eval(), mh.Cache()
    ids = torch.randint(WORDS, (2, 7))
    with torch.no_grad():
        steps = torch.cat([decoder(ids[:, t : t + 1], cache=cache) for t in range(7)], 1)
        torch.testing.assert_close(steps, decoder(ids), atol=1e-5, rtol=1e-5)


def test_back_needs_mixing():
    mixed, alone = (accuracy(name, "back", 0, 60) for name in ("standard", "no mixing"))
    assert alone < 0.12 < 0.3 < mixed


@pytest.mark.slow
def test_the_published_setting():
    """Chance is 1/16, of values 1/8, of values of the sequence about 1/3."""

    def reached(name, task):
        return accuracy(name, task, 0, 300)

    for name in ("standard", "by position, then standard"):
        assert min(reached(name, task) for task in ("back", "recall")) > 0.9
    for name in ("weights by position", "maps of the first layer"):
        assert reached(name, "back") > 0.8 and reached(name, "recall") < 0.5
    assert reached("no mixing", "back") < 0.1 and reached("no mixing", "recall") < 0.2
