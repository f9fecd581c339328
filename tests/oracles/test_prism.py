"""Oracles of Prism: head counts that grow with depth cost nothing and change no weight's shape."""

import pytest
import torch
from tests.oracles.reference import close, heads_of, join, make, rope, weights
from tests.oracles.stacks import decoded, make_stack
from torch import nn

from manyheads import Cache, OptionError, SpecError
from manyheads.stack import Decoder, ManyheadsConfig, Stack
from manyheads.stack.heads import Geometric, Prism, Step, head_counts

DIM = 24
GROWING = ["step(2, 4)", "step(1, 12, switch=1)", "geometric(2, 12)", [1, 2, 2, 6], "step(2, 6, reverse=true)"]


def build(heads, specs="gqa", layers=4, seed=0):
    torch.manual_seed(seed)
    stack = Stack(specs, DIM, heads, layers).double().eval()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack


def batch(tokens=9):
    return torch.randn(2, tokens, DIM, dtype=torch.float64)


# schedules


@pytest.mark.parametrize(
    ("heads", "dim", "layers", "counts"),
    [
        (3, 24, 3, [3, 3, 3]),
        ("3", 24, 3, [3, 3, 3]),
        ([2, 6], 24, 2, [2, 6]),
        ("2, 6", 24, 2, [2, 6]),
        ("[2, 2, 6]", 24, 3, [2, 2, 6]),
        ("prism", 768, 4, [3, 3, 6, 6]),
        ("prism", 1024, 2, [4, 8]),
        ("prism(switch=1)", 1536, 4, [6, 12, 12, 12]),
        ("step(3, 6)", 768, 5, [3, 3, 6, 6, 6]),
        ("step(3, 6, switch=1, reverse=true)", 768, 3, [6, 6, 3]),
        ("step(early=3, late=3)", 768, 2, [3, 3]),
        (Step(3, 6, switch=2), 768, 2, [3, 3]),
        ("geometric(2, 16)", 64, 4, [2, 4, 8, 16]),
        ("geometric(2, 16)", 64, 1, [2]),
        ("geometric(1, 24)", 24, 6, [1, 2, 4, 6, 12, 24]),
        ("geometric(3, 24)", 192, 6, [3, 4, 6, 12, 16, 24]),
        ("geometric(4, 24, multiple=4)", 96, 4, [4, 8, 12, 24]),
        (Geometric(2, 16, reverse=True), 64, 4, [16, 8, 4, 2]),
    ],
)
def test_counts(heads, dim, layers, counts):
    assert head_counts(heads, dim, layers) == counts


def test_text():
    for one in (Step(3, 6), Step(3, 6, switch=4, reverse=True), Prism(), Geometric(4, 16, multiple=2)):
        assert head_counts(str(one), 768, 6) == one.counts(768, 6)
    assert str(Step(3, 6)) == "step(early=3, late=6)" and str(Prism()) == "prism"


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ("step(5, 6)", r"step\(early=5, late=6\): dim=24 in layer 0 as 5 heads which do not divide it; .*\[1, 2, 3, 4"),
        ("step(2, 5)", "layer 2 as 5 heads"),
        ("step(2, 5, reverse=true)", "layer 1 as 5 heads"),
        ("step(0, 6)", "layer 0 as 0 heads"),
        ("step(6, 2)", "6 heads, then 2 in layer 2; name the smaller count first, and reverse=true"),
        ("step(2, 6, switch=5)", "a switch in layer 5 of 4; it may be 0 to 4"),
        ("prism", r"dim=24 is no multiple of a head's 256 channels; it may have \[1, 2, 3, 4, 6, 8, 12, 24\]"),
        ("geometric(2, 5)", r"5 heads do not fit dim=24; they may be \[1, 2, 3"),
        ("geometric(12, 2)", "12 heads, then .* in layer 1"),
        ("geometric(3, 12, multiple=2)", r"3 heads do not fit dim=24; they may be \[2, 4, 6"),
        ([2, 6], "2 head counts for 4 layers"),
        ("step(3)", "late"),
    ],
)
def test_refusals(heads, said):
    with pytest.raises(ValueError, match=said):
        Stack("gqa", DIM, heads, 4)


def test_widths_that_kernels_do_not_take():
    with pytest.raises(OptionError, match=r"dim=1536 in layer 0 as 3 heads of 512 channels; heads may be \[6, 8, 12"):
        head_counts("step(3, 6)", 1536, 2)
    assert head_counts([3, 6], 1536, 2) == [3, 6]


def test_errors_of_the_text_point_at_the_token():
    with pytest.raises(SpecError, match=r"no schedule of heads 'stair'; there are step, prism, geometric[^^]*\^"):
        head_counts("stair(2)", 24, 2)
    with pytest.raises(SpecError, match="only the first 2 options of 'step' may go without its name"):
        head_counts("step(2, 4, 6)", 24, 2)
    with pytest.raises(SpecError, match="expected the end, found '\\+'"):
        head_counts("step(2, 4) + kha", 24, 2)


def test_a_layer_whose_spec_does_not_fit_is_named():
    with pytest.raises(OptionError, match=r"layer 1: gqa: heads=3 do not make groups of 2; group may be \[1, 3\]"):
        Stack("gqa(group=2)", DIM, [2, 3], 2)
    with pytest.raises(OptionError, match="layer 0: gqa: kv_heads=2 and group=2 say the same thing"):
        Stack("gqa(kv_heads=2, group=2)", DIM, 4, 2)


# what a schedule does not change


def test_a_constant_schedule_is_the_uniform_model():
    x = batch()
    assert torch.equal(build("step(4, 4)")(x), build(4)(x))
    assert torch.equal(build("geometric(4, 4)")(x), build([4] * 4)(x))


@pytest.mark.parametrize("heads", GROWING)
def test_equal_cost(heads):
    one, other = build(heads).cost, build(4).cost
    assert one.parameters == other.parameters
    assert one.token_flops == other.token_flops and one.pair_flops == other.pair_flops
    assert one.cache_floats == other.cache_floats


@pytest.mark.parametrize("specs", ["gqa", "gqa(group=2)"])
def test_weights_load_across_schedules(specs):
    one, other, x = build("step(2, 6)", specs, seed=1), build(4, specs, seed=2), batch()
    mine, yours = one.state_dict(), other.state_dict()
    assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in yours.items()}
    other.load_state_dict(mine)
    assert (other(x) - one(x)).abs().max() > 1e-3  # the same weights, regrouped, are another function


@pytest.mark.parametrize("specs", ["gqa", "gqa(group=2)"])
def test_cache_bytes(specs):
    seen = set()
    for heads in (4, "step(2, 4)", "geometric(2, 12)", "step(2, 6, reverse=true)"):
        if specs != "gqa" and heads == "geometric(2, 12)":
            heads = "geometric(2, 12, multiple=2)"
        cache, stack = Cache(), build(heads, specs)
        with torch.no_grad():
            stack(batch(), cache=cache)
        seen.add(cache.bytes())
        assert stack.cost.cache_bytes(9, 8) * 2 == cache.bytes()
    assert seen == {4 * 2 * DIM * 2 * 9 * 8 // (1 if specs == "gqa" else 2)}


@pytest.mark.parametrize("heads", GROWING)
@pytest.mark.parametrize("specs", ["gqa", "gqa + kha + qk-norm"])
def test_decoding(heads, specs):
    stack, x = make_stack(specs, 4), batch()
    stack = build(heads, specs)
    for block in (1, 4):
        close(decoded(stack, x, block), stack(x), 1e-9)


def test_one_head_is_single_head_attention_of_width_d():
    layer, x = make("gqa", DIM, 1), batch()
    p = layer.project
    q, k, v = (heads_of(f(x), 1) for f in (p.q_proj, p.k_proj, p.v_proj))
    assert q.shape[-1] == DIM
    close(layer(x), join(weights(rope(q), rope(k), DIM**-0.5) @ v, p.o_proj))


def test_a_wide_head_has_scores_of_higher_rank():
    x = torch.randn(1, 16, DIM, dtype=torch.float64)
    for layer in build("step(2, 6)").attentions:
        p, width = layer.project, DIM // layer.heads
        q, k = (heads_of(f(x), layer.heads)[0] for f in (p.q_proj, p.k_proj))
        ranks = torch.linalg.matrix_rank(q @ k.transpose(-1, -2))
        assert (ranks == width).all()


def test_in_a_model(tmp_path):
    config = ManyheadsConfig(
        specs="gqa(group=2)", heads="step(2, 4)", num_hidden_layers=3, hidden_size=24, vocab_size=50
    )
    assert config.heads == [2, 4, 4]
    config.save_pretrained(tmp_path)
    assert ManyheadsConfig.from_pretrained(tmp_path).heads == [2, 4, 4]
    model = Decoder(50, "gqa(group=2)", 24, "step(2, 4)", 3)
    assert [layer.heads for layer in model.stack.attentions] == [2, 4, 4]
    with pytest.raises(OptionError, match="layer 1 as 5 heads"):
        ManyheadsConfig(heads="step(2, 5)", num_hidden_layers=2, hidden_size=24)
