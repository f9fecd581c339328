"""Blocks of query rows with the keys within their reach, against the explicit path."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from tests.core.test_kernel import Largest, brute

import manyheads as mh
from manyheads.attention.select.multi_window import Together
from manyheads.attention.windows import Far, Near
from manyheads.core.kernel import Call, attend, plan_call, using
from manyheads.core.kernels import banded as banded_kernel
from manyheads.core.mask import Axis, Given, Mask, Span, causal

module = sys.modules["manyheads.core.kernels.banded"]  # the package's attribute is the function


@pytest.fixture
def small(monkeypatch):
    """Blocks of 4 to 16 rows."""
    for name, value in {"ROWS": 16, "FEWEST_ROWS": 4, "NARROW": 8}.items():
        monkeypatch.setattr(module, name, value)


def padded(t):
    return Axis(t, 0, valid=torch.arange(t)[None] >= torch.tensor([[0], [t // 3]]))


def packed(t):
    return Axis(t, 0, segment=torch.arange(t)[None] // 7)


AXES = {"plain": lambda t: Axis(t, 0), "padded": padded, "packed": packed}


def call_of(mask, heads=4, groups=4, bias=None):
    t, s = mask.q.length, mask.k.length
    shapes = (2, heads, t, 6), (2, groups, s, 6), (2, groups, s, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return Call(q, k, v, mask, 0.4, bias)


def same(call, need_lse=False, more=()):
    """banded is the definition: output, log-sum-exp and the gradients of all inputs; what sees nothing is exactly 0."""
    out, (o, lse) = banded_kernel(call, need_lse=need_lse), brute(call)
    torch.testing.assert_close(out.o, o, atol=1e-9, rtol=1e-9)
    assert (out.o[lse.isinf()] == 0).all()
    weight = torch.randn_like(o)
    got, want = (out.o * weight).sum(), (o * weight).sum()
    if need_lse:
        torch.testing.assert_close(out.lse, lse, atol=1e-9, rtol=1e-9)
        got, want = got + out.lse.exp().sum(), want + lse.exp().sum()
    inputs = [call.q, call.k, call.v, *more]
    grads = [torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True) for loss in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    assert (grads[0][0][lse.isinf()] == 0).all()


@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize("rules", [(causal,), ()], ids=["causal", "both sides"])
def test_windows_around_the_borders_of_blocks(small, kind, rules):
    for t, size in itertools.product((3, 16, 17, 40), (1, 3, 4, 5, 8, 9, 16, 17, 60)):
        axis = AXES[kind](t)
        same(call_of(Mask(axis, axis, (*rules, Near((size,))))), need_lse=size % 2 == 1)


@pytest.mark.parametrize("kind", AXES)
def test_a_triangle_in_blocks(small, kind):
    for t in (1, 15, 16, 33):
        same(call_of(Mask(AXES[kind](t), AXES[kind](t))), need_lse=t % 2 == 0)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    "rule", [Near((2, 9, 30, 5)), Near((5, 5, 20, 20)), Together((3, 0, 0, 9), False), Together((4, 6, 20, 0), True)]
)
def test_windows_of_heads(small, rule, groups):
    axis = padded(37)
    for rules in ((causal, rule), (rule,)):
        same(call_of(Mask(axis, axis, rules), groups=groups), need_lse=groups == 2)


def test_keys_that_are_far(small):
    for size, rules in itertools.product((1, 5, 16, 40), ((causal,), ())):
        axis = padded(35)
        same(call_of(Mask(axis, axis, (*rules, Far(size, bool(rules))))), need_lse=True)


@pytest.mark.parametrize(("t", "start", "s", "first"), [(20, 13, 33, 0), (9, 40, 30, 19), (20, 0, 7, 5), (5, 0, 3, 9)])
def test_queries_and_keys_that_begin_apart(small, t, start, s, first):
    """A pass behind cached keys, some of them forgotten; queries before all keys."""
    for rule in (Near((6,)), Near((2, 3, 19, 20)), Far(3, True)):
        same(call_of(Mask(Axis(t, start), Axis(s, first), (causal, rule))))


def test_rules_and_axes_that_say_nothing_lose_nothing(small):
    table = torch.rand(2, 4, 24, 24) < 0.4
    axis = Axis(24, None, None, torch.arange(24)[None].expand(2, -1))
    same(call_of(Mask(Axis(24, 0), Axis(24, 0), (causal, Given(table), Near((2, 2, 30, 30))))))
    same(call_of(Mask(axis, axis, (causal, Near((4,))))), need_lse=True)


@pytest.mark.parametrize("shape", [(4, 24, 24), (1, 4, 24, 24), (2, 1, 24, 24)])
@pytest.mark.parametrize("rules", [(causal,), (causal, Near((7,))), (causal, Near((2, 2, 30, 30))), ()])
def test_a_learned_bias(small, shape, rules):
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    axis = padded(24)
    call = call_of(Mask(axis, axis, rules), groups=2, bias=lambda q, k: table[..., q, k])
    for need_lse in (False, True):
        same(call, need_lse, [table])


def test_what_is_kept_for_the_backward_pass_may_be_made_anew(small, monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    table = torch.randn(4, 24, 24, dtype=torch.float64, requires_grad=True)
    axis = padded(24)
    same(call_of(Mask(axis, axis), bias=lambda q, k: table[..., q, k]), True, [table])
    same(call_of(Mask(axis, axis, (causal, Near((5,))))))


def test_small_tiles_of_a_bias(small, monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", 2 * 24 * 8 * 4 * 3)  # three rows
    table = torch.randn(4, 24, 24, dtype=torch.float64, requires_grad=True)
    same(call_of(Mask(Axis(24, 0), Axis(24, 0)), bias=lambda q, k: table[..., q, k]), False, [table])


def test_the_log_sum_exp_alone_has_a_gradient():
    """Also where the output has none, on some rows or on all."""
    axis = Axis(9, 0)
    call = call_of(Mask(axis, axis))
    rows = torch.arange(9)[:, None] % 2 == 0
    for weight in (torch.zeros(9, 1), rows.double(), 1e-14 * rows.double(), 1e-17 * rows.double() - 2.0**-50):
        for kernel in ("flash_cpu", "banded"):
            out, (o, lse) = attend(call, kernel=kernel, need_lse=True), brute(call)
            losses = [(a * weight).sum() + b.sin().sum() for a, b in ((out.o, out.lse), (o, lse))]
            for mine, theirs in zip(*(torch.autograd.grad(x, [call.q, call.k, call.v]) for x in losses), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)


def test_reach_holds_all_that_is_seen():
    """And of some heads alone, what these see."""
    rules = [Near((3,)), Near((1, 4, 9, 2)), Far(2, True), Far(3, False), Together((2, 0, 5, 3), True), causal]
    for (t, start), (s, first), some in itertools.product(
        [(7, 0), (5, 6)],
        [(7, 0), (9, 2)],
        itertools.chain.from_iterable(itertools.combinations(rules, n) for n in (1, 2, 3)),
    ):
        mask = Mask(Axis(t, start), Axis(s, first), some)
        whole = mask.tile().expand(1, 4, t, s)
        for heads in (slice(0, 4), slice(0, 1), slice(1, 3)):
            of = mask.of(heads)
            assert torch.equal(of.tile().expand(1, heads.stop - heads.start, t, s), whole[:, heads])
            for rows in (slice(0, t), slice(1, 3), slice(t - 1, t)):
                seen = of.tile(rows)[0].any(0).any(0)
                reach = of.reach(rows)
                assert not seen[: reach.start].any() and not seen[reach.stop :].any()
                assert 0 <= reach.start <= reach.stop <= s


def test_reach_of_a_window_is_narrow():
    mask = Mask(Axis(100, 50), Axis(150, 0), (causal, Near((8,))))
    assert mask.spans == (Span(-7, 0),)
    assert mask.reach(slice(10, 20)) == slice(53, 70)
    assert (mask & Near((2, 20))).spans == (Span(-1, 0), Span(-7, 0))
    assert Mask(Axis(9, 0), Axis(9, 0), (Near((3,)),)).reach(slice(4, 5)) == slice(2, 7)
    assert Mask(Axis(9, 0).take(torch.tensor([[1, 5]])), Axis(9, 0), (Near((3,)),)).reach(slice(0, 1)) == slice(0, 9)


def test_one_band_for_heads_that_see_about_equally_far():
    def of(sizes, groups):
        return module.bands(Mask(Axis(9, 0), Axis(9, 0), (causal, Near(sizes))), 8, groups)

    assert of((256,), 8) == [(8, 64)]
    assert of((2, 5, 10, 25, 50, 125, 129, 9999), 8) == [(7, 64), (1, 256)]
    assert of((2, 5, 10, 500, 500, 500, 3000, 3000), 4) == [(1, 64), (2, 128), (1, 256)]
    assert of((2, 5, 10, 25, 50, 125, 129, 9999), 1) == [(1, 256)]


# Layers

SPECS = [
    "gqa + window(30)",
    "gqa(kv_heads=2) + window([5, 40, 90, 90])",
    "gqa + multi_window([3, 20, 0, 0])",
    "gqa + multi-scale-heads(radius=[1, 20, 50, 120])",
    "gqa + alibi",
    "gqa(kv_heads=2) + alibi + window(30)",
    "gqa + window_bias([20, 3, 0, 9]) + multi_window([20, 3, 0, 9])",
    "gqa + pair-bias",
    "gqa + pair-bias(of=distance, channels=6)",
    "gqa + relative(context=50)",
    "gqa + aha(window=30)",
    "chai(clusters=2)",
    "mla(rank=10, rope_dim=4) + window(30)",
    "gqa + mgk + window(30)",
]


def layer_of(spec, causal=True):
    torch.manual_seed(0)
    layer = mh.Attention(spec, 24, 4, site=mh.Site(causal=causal)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize("spec", SPECS)
def test_layers_in_blocks_are_layers_on_explicit_scores(spec, monkeypatch):
    """Output and gradients, with padding, in one pass; and cached blocks of tokens are the whole."""
    monkeypatch.setattr(module, "ROWS", 64)
    layer, x, ran = layer_of(spec), torch.randn(2, 200, 24, dtype=torch.float64), []
    monkeypatch.setattr(module, "_in_blocks", lambda *a, _f=module._in_blocks: ran.append(1) or _f(*a))
    valid = torch.arange(200)[None] >= torch.tensor([[0], [70]])
    for mask in (None, valid):
        outs = [layer(x, mask=mask)]
        with using("tiled"):
            outs.append(layer(x, mask=mask))
        kept = slice(None) if mask is None else valid
        torch.testing.assert_close(outs[0][kept], outs[1][kept], atol=1e-9, rtol=1e-9)
        parameters = list(layer.parameters())
        grads = [torch.autograd.grad(y[kept].sin().sum(), parameters, allow_unused=True) for y in outs]
        for mine, theirs in zip(*grads, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, atol=1e-8, rtol=1e-8)
        cache = mh.Cache()
        with torch.no_grad():
            cuts = x.split([90, 1, 64, 3, 42], 1)
            valids = [None] * 5 if mask is None else valid.split([90, 1, 64, 3, 42], 1)
            got = [layer(cut, mask=of, cache=cache) for cut, of in zip(cuts, valids, strict=True)]
        torch.testing.assert_close(torch.cat(got, 1)[kept], outs[0][kept], atol=1e-9, rtol=1e-9)
    assert ran


@pytest.mark.parametrize("spec", ["gqa + window(30)", "gqa + window_bias([20, 3, 0, 9])", "gqa + aha(window=30)"])
def test_layers_that_see_both_sides(spec, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 64)
    layer, x = layer_of(spec, causal=False), torch.randn(1, 200, 24, dtype=torch.float64)
    y = layer(x)
    with using("tiled"):
        torch.testing.assert_close(y, layer(x), atol=1e-9, rtol=1e-9)


def test_explain_names_the_kernel_and_why():
    told = str(mh.explain("gqa + window(256)", 2048))
    assert "banded" in told and "15% of all pairs" in told and "not sdpa: it would take a mask" in told
    for spec in ("gqa + alibi", "gqa + multi_window", "gqa + aha"):
        assert mh.Attention(spec, 64, 8).explain(1024).kernel == "banded", spec
        assert mh.Attention(spec, 64, 8).explain(1).kernel != "banded", spec
    assert mh.Attention("gqa", 64, 8).explain(8192).kernel == "sdpa"
    assert mh.Attention("gqa + window(1000)", 64, 8).explain(256).kernel == "sdpa"
    assert mh.Attention("gqa + window_bias", 64, 8, site=mh.Site(causal=False)).explain(256).kernel == "banded"
    assert mh.Attention("gqa + window(64) + talking_heads", 64, 8).explain(1024).kernel == "tiled"
    tokens = mh.Attention("gqa + dhvt + window(64)", 64, 8, site=mh.Site(causal=False))
    assert tokens.explain(1024).kernel == "sdpa", "a rule made wider says nothing of its reach"


def test_the_plan_of_a_padded_batch_is_in_blocks_and_depends_on_no_data():
    axis = Axis(1024, 0, valid=torch.ones(2, 1024, dtype=torch.bool))
    q = torch.zeros(2, 4, 1024, 8)
    assert plan_call(Call(q, q, q, Mask(axis, axis), 1.0)).kernel == "banded"
    assert plan_call(Call(q, q, q, Mask(axis, axis, ()), 1.0)).kernel == "sdpa"


class Kept:
    """The bytes that are kept for the backward pass, each storage once."""

    def __enter__(self):
        self.storages = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x)
        self.hooks.__enter__()
        return self

    def pack(self, x):
        self.storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    @property
    def bytes(self):
        return sum(self.storages.values())


@pytest.mark.parametrize("spec", ["gqa + window(256)", "gqa + aha", "gqa + alibi"])
def test_memory_is_bounded(spec, monkeypatch):
    """Of 8192 tokens no mask or bias of all queries and keys is made, nor kept in pieces."""
    monkeypatch.setattr(module, "KEPT_BYTES", 2**24)
    t = 8192
    layer, x = mh.Attention(spec, 16, 2), torch.randn(1, t, 16)
    with Largest() as seen, Kept() as kept:
        y = layer(x)
    with seen:
        y.sum().backward()
    assert seen.numbers <= 2 * 256 * t < t * t / 10
    assert kept.bytes <= 2**24 + 64 * 16 * t * 4 < t * t


def test_a_window_of_a_capped_softmax_is_explicit_on_the_keys_within_reach():
    """Tiles of a call without score programs are cut on both sides."""
    call = call_of(Mask(Axis(700, 0), Axis(700, 0), (causal, Near((9,)))), heads=1, groups=1)
    call = replace(call, softcap=5.0)
    with Largest() as seen:
        out = attend(call)
    assert seen.numbers <= 2 * 88 * (88 + 8)
    torch.testing.assert_close(out.o, brute(call)[0], atol=1e-9, rtol=1e-9)


def test_queries_without_a_gradient_leave_none_behind():
    """A log-sum-exp has a gradient too, and takes none of it from queries that were not asked for theirs."""
    layer, x = mh.Attention("gqa(kv_heads=1) + mgk", 24, 4).double(), torch.randn(1, 12, 24, dtype=torch.float64)
    assert layer.explain(12).kernel == "flash_cpu"
    (gradient,) = torch.autograd.grad(layer(x.requires_grad_())[:, 5].sum(), x)
    assert (gradient[:, 6:] == 0).all() and (gradient[:, :6] != 0).any()
