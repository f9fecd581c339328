"""Heads merged and regrouped: exact where heads are alike, never worse than means, and what does not fit is said."""

import copy
import math

import pytest
import torch
from tests.convert.tiny import tokens
from tests.edit.models import KINDS, adopted, counted, logits, own, reloads, same, with_copies
from tests.oracles.gauge import bounded, pair_turn
from tests.oracles.reference import close

from manyheads.attention import Attention
from manyheads.core.part import OptionError
from manyheads.edit import alike_heads, merge_heads, regroup
from manyheads.edit.layers import Rows, inputs_of, put, with_rows
from manyheads.edit.merge import _reduced, _squared
from manyheads.edit.regroup import chain, groups

PAIRS = {0: [[0, 2], [1, 3]], 1: [[1, 3], [2, 0]]}


# --- exact


@pytest.mark.parametrize("how", ["mean", "fitted"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_heads_become_one_exactly(kind, how):
    source = with_copies(adopted(kind, num_key_value_heads=4), {2: 0, 3: 1})
    found = merge_heads(copy.deepcopy(source), PAIRS, tokens(), how=how)
    same(found.model, source)
    assert found.clusters == {0: [[0, 2], [1, 3]], 1: [[0, 2], [1, 3]]}
    assert all(each.mean < 1e-13 and each.merged < 1e-13 for each in found.errors.values())
    assert [layer.heads for layer in found.model.attentions] == [2, 2]


@pytest.mark.parametrize("how", ["mean", "fitted"])
def test_query_heads_of_one_key_head(how):
    source = with_copies(adopted(), {1: 0, 3: 2}, "q")
    found = merge_heads(copy.deepcopy(source), {0: [[0, 1], [2, 3]]}, tokens(), how=how)
    same(found.model, source)
    assert [(layer.heads, layer.layout.kv) for layer in found.model.attentions] == [(2, 2), (4, 2)]


def test_our_own_decoder_and_means_without_text():
    source = with_copies(own("gqa + qk-norm + window(size=5)"), {3: 1})
    found = merge_heads(copy.deepcopy(source), {1: [[3, 1]]}, how="mean")
    same(found.model, source)
    assert [layer.heads for layer in found.model.attentions] == [4, 3] and math.isnan(found.errors[1].merged)
    assert str(found.model.specs[1]).startswith("gqa(head_dim=8)")


def test_heads_that_are_equal_but_for_their_basis():
    """Queries A q, keys A⁻ᵀ k, values B v: the same map in another basis. Fits see it, means do not."""
    source = adopted(num_key_value_heads=4)
    made = {}
    for number, layer in enumerate(source.attentions):
        rows = Rows.of(layer)
        a, b = pair_turn(8), bounded(8)
        rows.q[2], rows.k[2], rows.v[2] = a @ rows.q[0], torch.linalg.inv(a).T @ rows.k[0], b @ rows.v[0]
        made[number] = with_rows(layer, rows)
    put(source, made)
    found = merge_heads(copy.deepcopy(source), {0: [[0, 2]], 1: [[0, 2]]}, tokens(), damping=0.0)
    close(logits(found.model), logits(source), 1e-6)
    assert all(each.mean > 1e-3 and each.merged < 1e-12 for each in found.errors.values())
    damped = merge_heads(copy.deepcopy(source), {0: [[0, 2]], 1: [[0, 2]]}, tokens())
    assert all(each.merged < 1e-3 * each.mean for each in damped.errors.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_key_and_value_heads_fused_apart(kind):
    """Query heads stay; copies of key and value heads cost nothing, however the query heads of each look."""
    source = with_copies(adopted(kind, num_attention_heads=4, num_key_value_heads=4), {3: 0}, "kv")
    found = merge_heads(copy.deepcopy(source), {0: [[0, 3]], 1: [[0, 3], [1, 2]]}, tokens(), how="dha")
    first, second = found.model.attentions
    assert first.heads == 4 and "dha(k_heads=3, v_heads=3, k_map=[0, 1, 2, 0]" in str(first.spec)
    assert second.spec.cost(32, 4).cache_floats == 2 * 2 * first.layout.qk_width
    x = inputs_of(source, [0], tokens())[0]
    close(Attention.forward(first, x), Attention.forward(source.attentions[0], x), 1e-7)
    assert found.errors[0].merged < 1e-12 and 0 < found.errors[1].merged <= found.errors[1].mean
    counted(found.model)


# --- fitted


@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("kind", ["llama", "biased", "qwen3"])
def test_fitted_is_never_worse_than_means_and_errors_are_what_they_say(kind, kv):
    source = adopted(kind, num_key_value_heads=kv)
    named = {4: {0: [[0, 1, 2]], 1: [[0, 3], [1, 2]]}, 2: {0: [[0, 1], [2, 3]]}, 1: {0: [[0, 2]], 1: [[3, 1, 0]]}}[kv]
    mean, fitted = (merge_heads(copy.deepcopy(source), named, tokens(), how=how) for how in ("mean", "fitted"))
    x = inputs_of(source, named, tokens())
    for number in named:
        layer = source.attentions[number]
        want = Attention.forward(layer, x[number])
        for found, told in ((mean, mean.errors[number].mean), (fitted, fitted.errors[number].merged)):
            got = Attention.forward(found.model.attentions[number], x[number])
            close(torch.tensor(told), ((got - want).pow(2).sum() / want.pow(2).sum()).float(), 1e-5)
        assert fitted.errors[number].merged < 0.9 * mean.errors[number].mean
        assert fitted.errors[number].mean == pytest.approx(mean.errors[number].mean)
        assert mean.errors[number].merged == mean.errors[number].mean


def test_means_are_means():
    source = adopted(num_key_value_heads=4)
    before = Rows.of(source.attentions[0])
    after = Rows.of(merge_heads(source, {0: [[1, 3]]}, how="mean").model.attentions[0])
    for kind in ("q", "k", "v"):
        old, new = getattr(before, kind), getattr(after, kind)
        close(new, torch.stack([old[0], (old[1] + old[3]) / 2, old[2]]))
    close(after.o, torch.stack([before.o[0], before.o[1] + before.o[3], before.o[2]]))


def test_the_reduced_map_is_the_best_of_its_rank():
    """Against the singular vectors of u Bᵀ where B is least squares, and against maps nearby."""
    torch.manual_seed(0)
    u, t = torch.randn(200, 12).double(), torch.randn(200, 9).double()
    uu, ut = u.T @ u, u.T @ t
    read, write = _reduced(uu, ut, torch.zeros(12, 9).double(), 4, 0.0)
    full = u @ torch.linalg.lstsq(u, t).solution
    left, sizes, right = torch.linalg.svd(full, full_matrices=False)
    close(u @ read.T @ write, left[:, :4] * sizes[:4] @ right[:4], 1e-8)
    least = _squared(uu, ut, t.pow(2).sum().item(), read.T @ write)
    assert least == pytest.approx((u @ read.T @ write - t).pow(2).sum().item())
    for _ in range(5):
        near = (read + 0.01 * torch.randn(4, 12).double()).T @ (write + 0.01 * torch.randn(4, 9).double())
        assert _squared(uu, ut, t.pow(2).sum().item(), near) > least


# --- which heads, what it saves


@pytest.mark.parametrize("by", ["maps", "outputs"])
def test_alike_heads_are_found(by):
    source = with_copies(adopted(num_key_value_heads=4), {3: 0})
    if by == "outputs":  # what a head adds, up to its size
        for layer in source.attentions:
            o = layer.project.o_proj.weight.data.unflatten(1, (4, -1))
            o[:, 3] = 2 * o[:, 0]
    assert alike_heads(source, tokens(), 3, by=by) == {n: [[0, 3], [1], [2]] for n in (0, 1)}
    assert alike_heads(source, tokens(), 0.8, by=by, layers=[1]) == {1: [[0, 3], [1], [2]]}
    assert alike_heads(source, tokens(), 1, by=by, layers=[0]) == {0: [[0, 1, 2, 3]]}
    assert alike_heads(source, tokens(), 1.0, by=by, layers=[0]) == {0: [[0], [1], [2], [3]]}


def test_alike_heads_stay_with_their_key_head():
    source = adopted(num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    found = alike_heads(source, tokens(), 0.6)
    assert all(len(each) == 4 and {len({h // 4 for h in c}) for c in each} == {1} for each in found.values())
    assert [len(each) for each in alike_heads(source, tokens(), 1, keys=True).values()] == [1, 1]
    merged = merge_heads(source, found, tokens()).model
    assert [(layer.heads, layer.layout.kv) for layer in merged.attentions] == [(4, 2), (4, 2)]


@pytest.mark.parametrize(("kind", "plainly"), [("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_costs_reload_and_stock_class(kind, plainly, tmp_path):
    source = adopted(kind, num_key_value_heads=4, dtype=torch.float32)
    merged = merge_heads(source, alike_heads(source, tokens(), 2), tokens()).model
    for cost in counted(merged):
        assert cost.parameters >= 4 * 32 * 2 * 8 and cost.cache_floats == 2 * 2 * 8
    reloads(merged, tmp_path, plainly)


def test_layers_of_unlike_heads_reload_as_ours(tmp_path):
    source = adopted(num_key_value_heads=4, dtype=torch.float32)
    merged = merge_heads(source, {0: [[0, 1, 2, 3]], 1: [[1, 3]]}, tokens()).model
    assert merged.config.heads == [1, 3]
    reloads(merged, tmp_path, "ManyheadsForCausalLM")
    reloads(merge_heads(own(), {0: [[0, 1], [2, 3]]}, tokens()).model, tmp_path / "ours")


# --- regroup


@pytest.mark.parametrize("each", [adopted, own])
def test_moving_heads_changes_nothing(each):
    source = each(num_key_value_heads=4) if each is adopted else each("gqa")
    found = regroup(copy.deepcopy(source), tokens())
    same(found.model, source)
    assert sorted(found.orders[0]) == [0, 1, 2, 3] and set(found.error.values()) == {0.0}


@pytest.mark.parametrize("how", ["fitted", "mean", "first"])
def test_alike_key_heads_are_brought_together(how):
    source = with_copies(adopted(num_attention_heads=8, num_key_value_heads=4, head_dim=8), {2: 0, 3: 1}, "kv")
    found = regroup(copy.deepcopy(source), tokens(), kv=2, how=how)
    same(found.model, source, 1e-6)
    assert found.orders == {n: [0, 2, 1, 3] for n in (0, 1)}
    assert all(found.error[n] < 1e-12 < 1e-4 < found.as_it_lay[n] for n in (0, 1))
    assert [(layer.heads, layer.layout.kv) for layer in found.model.attentions] == [(8, 2), (8, 2)]
    counted(found.model)


@pytest.mark.parametrize(("kind", "how"), [("llama", "fitted"), ("qwen3", "mean"), ("biased", "lowrank")])
def test_regrouping_is_never_worse_than_neighbours(kind, how, tmp_path):
    source = adopted(kind, num_key_value_heads=4)
    found = regroup(copy.deepcopy(source), tokens(), kv=2, how=how)
    x = inputs_of(source, [0, 1], tokens())
    for number, layer in enumerate(source.attentions):
        want, got = (Attention.forward(each, x[number]) for each in (layer, found.model.attentions[number]))
        told = ((got - want).pow(2).sum() / want.pow(2).sum()).item()
        assert found.error[number] == pytest.approx(told) and found.error[number] <= found.as_it_lay[number]
    plainly = type(found.model.model).__name__
    reloads(found.model, tmp_path, plainly)


def test_groups_and_chains_by_hand():
    apart = torch.ones(6, 6).fill_diagonal_(0)
    for a, b in ((0, 5), (1, 3), (2, 4)):
        apart[a, b] = apart[b, a] = 0.1
    assert groups(apart, 3) == [[0, 5], [1, 3], [2, 4]] and chain(apart)[:2] == [0, 5]
    assert groups(apart, 1) == [[0, 1, 2, 3, 4, 5]] and groups(apart, 6) == [[n] for n in range(6)]


# --- what does not fit

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
WRONG = [
    ({}, {0: [[0, 4]]}, "layer 0 has no head 4; it has 0 to 3"),
    ({}, {0: [[0, -1]]}, "no head -1"),
    ({}, {0: [[0, 1], [1, 2]]}, "head 1 is in two clusters"),
    ({}, {0: [[1, 1]]}, "or in one twice"),
    ({}, {0: [0, 1]}, "a cluster is a list of heads, not 0"),
    ({}, {0: [[]]}, "a cluster is a list of heads"),
    ({}, {2: [[0, 1]]}, "there is no layer 2; this model has 0 to 1"),
    ({}, {}, "clusters are given by layer"),
    (HEADS, {0: [[*range(8)]]}, "read several key heads; a cluster lies within the heads of one (0 to 3, 4 to 7)"),
    (HEADS, {0: [[0, 1], [4, 5, 6]]}, "are left with [3, 2] query heads"),
]


@pytest.mark.parametrize(("options", "clusters", "said"), WRONG)
def test_clusters_that_do_not_fit(options, clusters, said):
    source = adopted(**{"num_key_value_heads": 4, **options})
    want = logits(source)
    with pytest.raises(OptionError) as error:
        merge_heads(source, clusters, tokens())
    assert said in str(error.value)
    assert torch.equal(logits(source), want)


def test_other_things_that_do_not_fit():
    source = adopted(num_key_value_heads=2, num_attention_heads=8, head_dim=8)
    for call, said in (
        (lambda: merge_heads(source, {0: [[0, 1]]}, tokens(), how="median"), "mean, fitted or dha"),
        (lambda: merge_heads(source, {0: [[0, 1], [4, 5]]}), "give tokens, or how='mean'"),
        (lambda: merge_heads(source, {0: [[0, 2]]}, tokens(), how="dha"), "no key head 2; it has 0 to 1"),
        (lambda: alike_heads(source, tokens(), 5), "to=5 does not fit, [2, 4, 6, 8] do"),
        (lambda: alike_heads(source, tokens(), 0.2), "it may be 0.25 to 1"),
        (lambda: alike_heads(source, tokens(), 2, by="size"), "by their maps or their outputs"),
        (lambda: regroup(source, tokens(), kv=3), "kv_heads may be [1, 2]"),
        (lambda: regroup(adopted("qwen3"), tokens(), kv=1), "qk-norm does not pass on; use mean"),
        (
            lambda: merge_heads(own("gqa + talking_heads"), {0: [[0, 1]]}, tokens()),
            "talking_heads may tell heads apart",
        ),
        (lambda: merge_heads(own("mla(rank=12, rope_dim=4)"), {0: [[0, 1]]}, tokens()), "heads of gqa are edited"),
        (lambda: merge_heads(own("gqa", kv_source=[None, 0]), {0: [[0, 1]]}, tokens()), "are read by another layer"),
        (lambda: merge_heads(own("gqa", loops=2), {0: [[0, 1]]}, tokens()), "runs its blocks 2 times"),
    ):
        with pytest.raises(OptionError) as error:
            call()
        assert said in str(error.value)
    with pytest.raises(ValueError, match="windows of token ids"):
        regroup(source, torch.rand(2, 3))
