"""What a compared model costs, and the width at which it meets a budget."""

from dataclasses import replace

import pytest
import torch

from manyheads.bench.design import VOCAB, Design, _keys_seen
from manyheads.bench.width import NEAR, figure, fit_width
from manyheads.core.part import OptionError

CONTEXT = 64
BASE = Design("gqa", dim=64, heads=4, layers=2)


@pytest.mark.parametrize(
    "spec",
    ["gqa", "gqa(kv_heads=2) + kha", "mla(rank=16, rope_dim=8)", "mtla(stride=2)", "gqa + moh(top=2)", "gqa + dcmha"],
)
@pytest.mark.parametrize("ffn", ["swiglu", "gelu", "none"])
def test_parameters_are_those_of_the_model_that_is_built(spec, ffn):
    design = replace(BASE, spec=spec, ffn=ffn)
    assert design.costs(CONTEXT).parameters == sum(p.numel() for p in design.build().parameters())


def test_every_field_but_the_spec_is_an_argument_of_the_decoder():
    assert BASE.arguments == {
        "specs": "gqa", "dim": 64, "heads": 4, "layers": 2, "ffn": "swiglu", "residual": "sum", "hidden": None
    }  # fmt: skip
    with torch.device("meta"):
        assert replace(BASE, ffn="none", layers=3).build().stack.blocks[2].ffn is None


def test_flops_of_a_layer_by_hand():
    d, hidden, pairs = 64, 176, (CONTEXT + 1) / 2  # a query sees on average half of the tokens, itself included
    layer = 2 * 4 * d * d + 4 * d * pairs + 2 * 3 * d * hidden
    assert BASE.costs(CONTEXT).flops == 3 * (2 * layer + 2 * VOCAB * d)


@pytest.mark.parametrize(("spec", "size"), [("gqa", CONTEXT), ("window(size=5)", 5), ("window(size=99)", 99)])
def test_keys_seen_are_those_of_the_mask(spec, size):
    layer = replace(BASE, spec=spec)._meta().stack.attentions[0]
    assert _keys_seen(layer, CONTEXT) == sum(min(t + 1, size) for t in range(CONTEXT)) / CONTEXT


def test_cache_is_a_token_s_share_over_all_layers():
    assert BASE.costs(CONTEXT).cache == 2 * 2 * 64 * 4
    assert BASE.costs(CONTEXT, itemsize=2).cache == 2 * 2 * 64 * 2
    assert replace(BASE, spec="gqa + window(size=16)").costs(CONTEXT).cache == 2 * 2 * 64 * 4 * 15 / CONTEXT


@pytest.mark.parametrize("equal", ["params", "flops"])
@pytest.mark.parametrize(
    "spec", ["gqa(kv_heads=1)", "gqa(kv_heads=2) + kha", "mla(rank=16, rope_dim=8)", "gqa(head_dim=8)"]
)
def test_the_chosen_width_is_the_nearest_of_all(spec, equal):
    wide = replace(BASE, dim=256)
    design = replace(wide, spec=spec)
    budget = wide.costs(CONTEXT)
    fitted = fit_width(design, budget, equal, CONTEXT)
    assert fitted.met and fitted.design.dim % 8 == 0 and fitted.costs == fitted.design.costs(CONTEXT)
    assert fitted.off == figure(fitted.costs, equal) / figure(budget, equal) - 1
    offs = [
        abs(figure(replace(design, dim=width).costs(CONTEXT), equal) / figure(budget, equal) - 1)
        for width in range(fitted.design.dim - 24, fitted.design.dim + 25, 8)
    ]
    assert abs(fitted.off) <= min(offs) and abs(fitted.off) < 0.005
    alone = fit_width(replace(design, ffn="none"), replace(wide, ffn="none").costs(CONTEXT), equal, CONTEXT)
    assert alone.design.hidden is None


def test_half_the_key_heads_cache_as_much_at_twice_the_width():
    fitted = fit_width(replace(BASE, spec="gqa(kv_heads=2)"), BASE.costs(CONTEXT), "cache", CONTEXT)
    assert (fitted.design.dim, fitted.off, fitted.met) == (128, 0, True)


def test_a_figure_that_no_width_changes_keeps_the_width_and_misses():
    fitted = fit_width(replace(BASE, spec="mla(rank=16, rope_dim=8)"), BASE.costs(CONTEXT), "cache", CONTEXT)
    assert fitted.design.dim == 64 and not fitted.met
    assert fitted.off == 24 / 128 - 1 < -NEAR


def test_widths_that_a_part_does_not_accept_are_left_out():
    design = replace(BASE, spec="cca")  # wants a multiple of twice the heads for each half
    fitted = fit_width(design, BASE.costs(CONTEXT), "params", CONTEXT)
    fitted.design.check(CONTEXT)
    with pytest.raises(OptionError, match="kv_heads=3"):
        fit_width(replace(BASE, spec="gqa(kv_heads=3)"), BASE.costs(CONTEXT), "params", CONTEXT)


def test_a_fixed_length_below_the_context_is_refused():
    replace(BASE, spec="super-attention(length=64)").check(CONTEXT)
    with pytest.raises(OptionError, match="length=63 is below the 64 tokens"):
        replace(BASE, spec="super-attention(length=63)").check(CONTEXT)


@pytest.mark.parametrize("change", [{"dim": 0}, {"heads": 0}, {"layers": 0}, {"dim": 66}, {"ffn": "relu"}])
def test_a_model_that_there_is_not_is_refused(change):
    with pytest.raises(OptionError):
        replace(BASE, **change).check(CONTEXT)
