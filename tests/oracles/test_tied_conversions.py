"""Conversions to keys that are values (arXiv 2606.04032) and to one wide head (arXiv 2412.19255)."""

import pytest
import torch
from tests.convert.tiny import BASE, DIM, HEADS, WIDTH, decode, error, inputs, layer, measured, out
from tests.oracles.reference import close, differ

from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.mfa import ToMFA
from manyheads.convert.moves.qkv_sharing import ToTied
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec

PLAIN = "gqa(kv_heads=2)"
SPECS = [PLAIN, "gqa", "gqa(kv_heads=1)", f"{PLAIN} + rope(pairing=interleaved)", "gqa(kv_heads=2, head_dim=8)"]


def values_from_keys(source, over):
    """Values that are a random linear map of a head's own keys, or of all heads' (over=all), and a constant."""
    k, v, g, d = source.project.k_proj, source.project.v_proj, source.layout.kv, source.layout.qk_width
    generator = torch.Generator().manual_seed(3)
    maps = torch.randn(g, d, g if over == "all" else 1, d, generator=generator, dtype=torch.float64)
    rows = k.weight.view(g, d, -1)
    made = torch.einsum("gvhd,hde->gve", maps, rows) if over == "all" else maps[:, :, 0] @ rows
    v.weight.copy_(made.flatten(0, 1))
    return source


# --- keys that are the values


@pytest.mark.parametrize("spec", [*SPECS, BASE, "gqa(bias=qkv)"])
def test_values_that_are_a_map_of_keys_are_kept_exactly(spec):
    source, x = values_from_keys(layer(spec), "own"), inputs()  # v's bias is anything, where there is one
    made = ToTied(source.layout.kv)(source, measured(source, x))
    assert made.spec.cost(DIM, HEADS).cache_floats == source.layout.kv * source.layout.qk_width
    close(out(made, x), out(source, x), 1e-6)
    close(decode(made, x), out(made, x), 1e-9)
    close(decode(made, x, 5), out(made, x), 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_better_than_the_copy_which_is_the_papers_layer(seed):
    source, x = layer(BASE, seed), inputs()
    stats = measured(source, x)
    fitted, copied = (ToTied(2, how)(source, stats) for how in ("fitted", "copy"))
    assert error(fitted, source, x) < min(1.0, error(copied, source, x))
    untied = layer(BASE, seed)
    for name in ("weight", "bias"):
        getattr(untied.project.v_proj, name).copy_(getattr(source.project.k_proj, name))
    close(out(copied, x), out(untied, x), 1e-9)


def test_the_regression_leaves_nothing_that_keys_explain():
    """What is left of values is uncorrelated with keys, in the weights of the fit."""
    source, x = layer(PLAIN), inputs()
    stats = measured(source, x)
    made = ToTied(2)(source, stats)
    k, v = (getattr(source.project, f"{n}_proj").weight.view(2, WIDTH, DIM) for n in "kv")
    o, mapped = (each.project.o_proj.weight.view(DIM, HEADS, WIDTH) for each in (source, made))
    moment = stats.rows[:-1, :-1]
    for h in range(HEADS):
        left = o[:, h] @ v[h // 2] - mapped[:, h] @ k[h // 2]
        size = (o[:, h] @ v[h // 2] @ moment @ k[h // 2].T).norm()
        assert (left @ moment @ k[h // 2].T).norm() < 1e-6 * size


def test_fewer_heads_are_merged_first():
    source, x = layer("gqa(kv_heads=4)"), inputs()
    stats = measured(source, x)
    made = ToTied(2)(source, stats)
    assert made.spec.parts[0].kv_heads == 2 and made.spec.cost(DIM, HEADS).cache_floats == 2 * WIDTH
    merged = ToGQA(2)(source, stats)
    close(made.project.k_proj.weight, merged.project.k_proj.weight)


def test_a_scale_by_hand_goes_into_the_queries():
    source, x = values_from_keys(layer("gqa(kv_heads=2, scale=0.7)"), "own"), inputs()
    close(out(ToTied(2)(source, measured(source, x)), x), out(source, x), 1e-6)


def test_what_cannot_be_tied_is_refused():
    for line, said in (
        ("mla(rank=9, rope_dim=4)", "in gqa"), ("gqa(v_dim=5)", "its width"), ("gqa + qk-norm", "qk-norm sits between"),
        ("gqa + alibi", "use mean"),
    ):  # fmt: skip
        assert said in ToTied(2).refusal(Spec.parse(line))
    with pytest.raises(OptionError, match=r"cannot be merged into 3; kv_heads may be \[1, 2, 4\]"):
        ToTied(3)(layer("gqa"), measured(layer("gqa"), inputs()))


# --- one wide head


@pytest.mark.parametrize("spec", SPECS)
def test_at_full_width_nothing_is_lost(spec):
    source, x = layer(spec), inputs()
    whole = source.layout.kv * source.layout.qk_width
    made = ToMFA(10**6)(source, measured(source, x))
    assert made.spec.parts[0].width == whole and made.spec.cost(DIM, HEADS).cache_floats == 2 * whole
    close(out(made, x), out(source, x), 1e-6)
    close(decode(made, x), out(made, x), 1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_values_read_off_all_keys_are_kept_exactly(spec):
    source, x = values_from_keys(layer(spec), "all"), inputs()
    whole = source.layout.kv * source.layout.qk_width
    made = ToMFA(whole, key_reuse=True)(source, measured(source, x))
    assert made.spec.cost(DIM, HEADS).cache_floats == whole
    assert made.project.value_gate.abs().max() == 0  # the value is the key itself
    close(out(made, x), out(source, x), 1e-5)
    close(decode(made, x, 3), out(made, x), 1e-9)


@pytest.mark.parametrize("key_reuse", [False, True])
def test_wider_is_closer_and_views_agree(key_reuse):
    source, x = layer(PLAIN), inputs()
    stats = measured(source, x)
    lost = [error(ToMFA(width, key_reuse)(source, stats), source, x) for width in (2, 6, 12)]
    assert lost[0] > lost[1] > lost[2] and (lost[2] < 1e-9) is not key_reuse
    made = ToMFA(6, key_reuse)(source, stats)
    close(decode(made, x), out(made, x), 1e-9)
    differ(out(made, x), out(source, x), 1e-3)


def test_reading_values_off_all_keys_beats_each_heads_own():
    source, x = layer(PLAIN), inputs()
    stats = measured(source, x)
    assert error(ToMFA(12, True)(source, stats), source, x) < error(ToTied(2)(source, stats), source, x)


def test_queries_lose_nothing_at_their_rank_and_something_below():
    source, x = layer("gqa(kv_heads=2, head_dim=4)"), inputs()  # 16 channels of queries
    stats = measured(source, x)
    for rank, exact in ((None, True), (16, True), (99, True), (9, False)):
        made = ToMFA(8, False, rank)(source, stats)
        assert made.project.q_a_proj.out_features == min(16, rank or 16)
        assert (error(made, source, x) < 1e-9) is exact


def test_a_frequency_is_kept_as_it_was():
    source, x = layer(PLAIN), inputs()
    made = ToMFA(4)(source, measured(source, x))
    rope = made.spec.by_stage["position"][0]
    assert len(rope.pairs) == 2 and rope.of == WIDTH and max(rope.pairs) < WIDTH // 2


def test_what_no_wide_head_is_made_of_is_refused():
    for line, said in (
        ("mla(rank=9, rope_dim=4)", "from gqa with rope"), ("gqa + alibi", "from gqa with rope"),
        (BASE, "no biases"), ("gqa + rope(fraction=0.7)", "leaves channels still"), ("gqa + qk-norm", "qk-norm sits"),
    ):  # fmt: skip
        assert said in ToMFA(8).refusal(Spec.parse(line).resolve(layer("gqa").site))
    with pytest.raises(OptionError, match="turns nothing"):
        ToMFA(1)(layer(PLAIN), measured(layer(PLAIN), inputs()))
