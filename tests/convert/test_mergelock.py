"""Weights may change and the function stay (arXiv 2509.01548): the maps, their undoing, what conversions feel."""

import copy

import pytest
import torch
from tests.convert.tiny import model, tokens
from tests.oracles.reference import close, differ

from manyheads.convert.adopt import adopt
from manyheads.convert.mergelock import canonical, lock, mapping, unlock
from manyheads.convert.plan import make_goal, shape_of
from manyheads.convert.shrink import shrink
from manyheads.convert.stream import InMemory
from manyheads.convert.verify import decode_equals_forward
from manyheads.core.part import OptionError
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM

KINDS = ["llama", "biased", "qwen2", "qwen3", "mistral"]


def fresh(kind="llama", **options):
    return adopt(model(kind, dtype=torch.float64, **options))


def logits(each):
    with torch.no_grad():
        return each(tokens(), use_cache=False).logits


def own(spec):
    torch.manual_seed(0)
    return ManyheadsForCausalLM(
        ManyheadsConfig(specs=spec, vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ).double().eval()  # fmt: skip


def apart(a, b):
    """Largest change of a weight."""
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_locked_model_is_the_same_function_of_other_weights(kind):
    plain, locked = fresh(kind), lock(fresh(kind), 1)
    close(logits(locked), logits(plain), 1e-9)
    assert apart(plain, locked) > 0.1 and decode_equals_forward(locked, tokens(1)) < 1e-9
    assert apart(lock(fresh(kind), 1), locked) == 0 and apart(lock(fresh(kind), 2), locked) > 0.1


@pytest.mark.parametrize(
    "spec",
    ["mla(rank=12, rope_dim=4)", "mla(rank=12, rope_dim=4, norm=false, bias=true)", "mla(rank=12, q_rank=9)",
     "gqa(kv_heads=2) + alibi", "gqa + rope(pairing=interleaved)", "gqa + rope(fraction=0.5)"],
)  # fmt: skip
def test_so_is_one_of_our_own(spec):
    plain, locked = own(spec), lock(own(spec), 3)
    close(logits(locked), logits(plain), 1e-9)
    assert apart(plain, locked) > 0.01


def test_condition_bounds_the_maps():
    plain, rotated = fresh(), lock(fresh(), condition=1.0)
    for a, b in zip(plain.attentions, rotated.attentions, strict=True):
        for name in "qkv":
            old, new = (getattr(each.project, f"{name}_proj").weight.unflatten(0, (-1, 8)) for each in (a, b))
            close(new.norm(dim=(1, 2)), old.norm(dim=(1, 2)), 1e-9)
    with pytest.raises(OptionError, match="below 1"):
        lock(fresh(), condition=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_canonical_form_is_the_same_function_and_forgets_the_lock(kind):
    plain, locked = canonical(fresh(kind)), canonical(lock(fresh(kind), 1))
    close(logits(plain), logits(fresh(kind)), 1e-9)
    assert apart(plain, locked) < 1e-7
    assert apart(canonical(copy.deepcopy(plain)), plain) < 1e-7


def test_without_positions_keys_have_one_too():
    plain, locked = canonical(own("gqa(kv_heads=2) + alibi")), canonical(lock(own("gqa(kv_heads=2) + alibi")))
    close(logits(plain), logits(own("gqa(kv_heads=2) + alibi")), 1e-9)
    assert apart(plain, locked) < 1e-7


def averaged(a, b):
    mean = copy.deepcopy(a)
    with torch.no_grad():
        for p, q in zip(mean.parameters(), b.parameters(), strict=True):
            p.copy_((p + q) / 2)
    return mean


def test_averages_with_a_locked_sibling_break_and_canonical_ones_do_not():
    plain, locked = fresh(), lock(fresh(), 1)
    want = logits(plain)
    broken = (logits(averaged(plain, locked)) - want).norm() / want.norm()
    assert broken > 0.2
    close(logits(averaged(canonical(plain), canonical(locked))), want, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parent_undoes_it(kind):
    plain, parent = fresh(kind), fresh(kind)
    back = unlock(lock(fresh(kind), 1), parent)
    assert apart(back, plain) < 1e-8
    errors = []
    for noise in (1e-3, 1e-4):
        torch.manual_seed(5)
        tuned = fresh(kind)
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
        errors.append(apart(unlock(lock(copy.deepcopy(tuned), 1), fresh(kind)), tuned))
    assert errors[0] < 0.5 and errors[1] == pytest.approx(errors[0] / 10, rel=0.2)


def test_least_squares_find_a_map():
    rows, a = torch.randn(2, 4, 9, dtype=torch.float64), torch.randn(2, 4, 4, dtype=torch.float64)
    close(mapping(rows, a @ rows), a, 1e-9)


@pytest.mark.parametrize("line", ["mla", "gqa", "mfa(key_reuse=true)", "qkv-sharing"])
def test_a_conversion_that_loses_nothing_does_not_feel_it(line, tmp_path):
    """At the largest budget; where something is lost, the loss of fitted moves is the same up to their damping."""
    lost = []
    for name, each in (("plain", fresh(num_key_value_heads=4)), ("locked", lock(fresh(num_key_value_heads=4), 1))):
        layers = InMemory(each)
        goal = make_goal("100%" if line == "mla" else "50%", line, shape_of(layers))
        lost.append([d.fitted for d in shrink(layers, tokens(), [goal], tmp_path / name, bfloat16=False)[0]])
    for plain, locked in zip(*lost, strict=True):
        assert locked == pytest.approx(plain, rel=0.1, abs=1e-6)


def test_pooled_weights_feel_it(tmp_path):
    lost = []
    for name, each in (("plain", fresh(num_key_value_heads=4)), ("locked", lock(fresh(num_key_value_heads=4), 1))):
        layers = InMemory(each)
        goal = make_goal("50%", "gqa(mean)", shape_of(layers))
        lost.append(shrink(layers, tokens(), [goal], tmp_path / name, bfloat16=False)[0][0].fitted)
    assert abs(lost[1] / lost[0] - 1) > 0.01


def test_what_may_see_the_maps_is_refused_and_nothing_changes():
    for spec, said in (("gqa + kha", "layer 0: kha may see"), ("gqa + head_norm", "head_norm may see")):
        each = own(spec)
        before = copy.deepcopy(each)
        with pytest.raises(OptionError, match=said):
            lock(each)
        assert apart(each, before) == 0
    with pytest.raises(OptionError, match="a canonical form is known of gqa"):
        canonical(own("mla(rank=12, rope_dim=4)"))
    with pytest.raises(OptionError, match="the parent is another model"):
        unlock(fresh(), fresh("biased"))
    differ(logits(own("gqa")), logits(own("gqa + alibi")))
