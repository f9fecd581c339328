"""Heads widened, added and split: the same function, new parameters that learn, and what does not fit is said."""

import copy

import pytest
import torch
from tests.convert.tiny import tokens
from tests.edit.models import KINDS, adopted, counted, logits, own, reloads, same
from tests.oracles.reference import close, differ

from manyheads.core.part import OptionError
from manyheads.edit import grow, split_heads, widen
from manyheads.edit.layers import Rows

GDA = "gqa(kv_heads=2, head_dim=8) + gda"


def learns(each):
    """After one step every parameter of attention has a gradient, in each of its heads and channels."""
    each = each.double()
    optimiser = torch.optim.SGD(each.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        each(tokens(), labels=tokens(), use_cache=False).loss.backward()
        optimiser.step()
    for layer in each.attentions:
        for name in "qkvo":
            gradient = getattr(layer.project, f"{name}_proj").weight.grad
            assert gradient.abs().amax(1 if name != "o" else 0).min() > 0, name


# --- widen


@pytest.mark.parametrize("scale", ["kept", "folded"])
@pytest.mark.parametrize("kind", ["llama", "biased", "qwen2", "mistral"])
def test_wider_heads_are_the_same_function(kind, scale):
    source = adopted(kind)
    wide = widen(copy.deepcopy(source), 14, scale=scale)
    same(wide, source)
    for layer in wide.attentions:
        assert (layer.layout.qk_width, layer.layout.v_width, layer.layout.rotary) == (14, 14, slice(0, 8))
        assert layer.layout.scale == pytest.approx((8 if scale == "kept" else 14) ** -0.5)
    counted(wide)
    learns(wide)


@pytest.mark.parametrize("width", [9, 15, 49, 50, 99])
def test_what_turned_goes_on_turning_at_any_width(width):
    """8 / 49 · 49 is below 8 in floats."""
    source = own("gqa + rope(pairing=interleaved, fraction=0.5)")
    wide = widen(copy.deepcopy(source), width, layers=[1])
    assert wide.attentions[1].layout.rotary == slice(0, 4) and wide.attentions[0].layout.qk_width == 8
    same(wide, source)


def test_without_rotation_and_values_alone():
    source = own("gqa(kv_heads=2, v_dim=5) + rope(none)")
    wide = widen(copy.deepcopy(source), 10)
    same(wide, source)
    assert (wide.attentions[0].layout.qk_width, wide.attentions[0].layout.v_width) == (10, 5)
    normed = adopted("qwen3")
    wide = widen(copy.deepcopy(normed), v_dim=12)
    same(wide, normed)
    assert (wide.attentions[0].layout.qk_width, wide.attentions[0].layout.v_width) == (8, 12)


def test_the_same_width_is_the_same_model_and_reloads(tmp_path):
    source = adopted(dtype=torch.float32)
    specs = source.specs
    assert widen(source, 8).specs == specs
    reloads(widen(source, 12), tmp_path)


# --- grow


@pytest.mark.parametrize("kind", KINDS)
def test_silent_heads_are_the_same_function(kind):
    source = adopted(kind)
    more = grow(copy.deepcopy(source), 6)
    same(more, source)
    assert [(layer.heads, layer.layout.kv, layer.layout.qk_width) for layer in more.attentions] == [(6, 2, 8)] * 2
    counted(more)
    learns(more)


def test_heads_with_keys_of_their_own():
    source = adopted(num_key_value_heads=4)
    more = grow(copy.deepcopy(source), [5, 4])
    same(more, source)
    assert [(layer.heads, layer.layout.kv) for layer in more.attentions] == [(5, 5), (4, 4)]
    groups = grow(copy.deepcopy(adopted()), 6, kv_heads=3)
    same(groups, adopted())
    assert [(layer.heads, layer.layout.kv) for layer in groups.attentions] == [(6, 3)] * 2
    learns(groups)
    normed = own("gqa + head_norm")
    same(grow(copy.deepcopy(normed), 7), normed)


def test_what_grew_reloads_and_a_stock_class_holds_it(tmp_path):
    reloads(grow(adopted(dtype=torch.float32), 8), tmp_path, "LlamaForCausalLM")
    reloads(grow(own(), 6), tmp_path / "own")


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_signal_heads_of_differential_attention_become_copies(noise):
    """From ratio 1 to 2 and 4: noise heads, λ and the norm stay."""
    source = own(GDA)
    for heads, ratio in ((6, 2), (10, 4)):
        more = grow(copy.deepcopy(source), heads, noise=noise)
        same(more, source)
        assert f"differential(ratio={ratio})" in str(more.specs[0])
        assert [(layer.heads, layer.layout.kv, layer.layout.out) for layer in more.attentions] == [
            (heads, 2, 2 * ratio)
        ] * 2
        counted(more)
        q = Rows.of(more.attentions[0]).q.unflatten(0, (2, ratio + 1))
        assert torch.equal(q[:, 0], q[:, ratio - 1]) and not torch.equal(q[:, 0], q[:, ratio])
        learns(more)


def test_copies_part_by_noise_alone():
    """Without it one gradient step leaves them equal."""
    for noise in (0.0, 0.5):
        more = grow(own(GDA), 6, noise=noise)
        more(tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradient = more.attentions[0].project.q_proj.weight.grad.unflatten(0, (2, 3, -1))
        if noise:
            differ(gradient[:, 0], gradient[:, 1], 1e-6)
        else:
            close(gradient[:, 0], gradient[:, 1])


# --- split


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads_as_multi_head_attention(kind):
    source = adopted(kind)
    split = split_heads(copy.deepcopy(source), kv_heads=4)
    same(split, source)
    assert [(layer.heads, layer.layout.kv) for layer in split.attentions] == [(4, 4)] * 2
    assert all("kv_heads" not in str(spec) for spec in split.specs)
    counted(split)
    learns(split)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_query_heads_split(noise, tmp_path):
    source = adopted()
    split = split_heads(copy.deepcopy(source), 3, kv_heads=6, noise=noise, layers=[0])
    same(split, source)
    assert [(layer.heads, layer.layout.kv) for layer in split.attentions] == [(12, 6), (4, 2)]
    o = Rows.of(split.attentions[0]).o.unflatten(0, (4, 3))
    close(o.sum(1), Rows.of(source.attentions[0]).o)
    assert (o.std(1).max() > 1e-3) == bool(noise)
    reloads(split, tmp_path)


# --- what does not fit


def test_numbers_that_do_not_fit():
    source = adopted()
    want = logits(source)
    for call, said in (
        (lambda: widen(source), "give head_dim, v_dim or both"),
        (lambda: widen(source, 6), "layer 0: head_dim=6 is below the present 8"),
        (lambda: widen(source, 12, v_dim=4), "v_dim=4 is below the present 8"),
        (lambda: widen(source, 0), "head_dim is at least 1"),
        (lambda: widen(source, 12, scale="new"), "kept or folded"),
        (lambda: widen(adopted("qwen3"), 12), "qk-norm acts on all channels"),
        (lambda: widen(own(GDA), 12), "differential may tell heads apart"),
        (lambda: grow(source, 3), "3 heads are below the present 4; merge_heads makes fewer"),
        (lambda: grow(source, 5), "5 heads on 2 key heads do not follow from 4 on 2; heads that are a multiple of 2"),
        (lambda: grow(source, 6, kv_heads=4), "heads = 2 times kv_heads have more"),
        (lambda: grow(source, [4]), "head counts"),
        (lambda: grow(source, "prism"), "each head has a softmax of its own"),
        (lambda: grow(own(GDA), 7), "[4, 6, 8, 10]"),
        (lambda: split_heads(source, kv_heads=3), "kv_heads may be [2, 4]"),
        (lambda: split_heads(source, kv_heads=1), "kv_heads may be [2, 4]"),
        (lambda: split_heads(source, 0), "copies is at least 1"),
        (lambda: split_heads(source, 2, noise=-1), "noise is a number of at least 0"),
        (lambda: split_heads(own("gqa + talking_heads"), 2), "talking_heads may tell heads apart"),
        (lambda: grow(source, 6, layers=[5]), "there is no layer 5"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert isinstance(error.value, OptionError) or said == "head counts"
        assert said in str(error.value)
    assert torch.equal(logits(source), want)
