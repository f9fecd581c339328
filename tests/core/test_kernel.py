"""Every kernel against attention written out in float64; gradients, empty rows, plans and exact merging."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.core import kernel as kernel_module
from manyheads.core.kernel import Call, Out, attend, merge, plan, plan_call
from manyheads.core.kernels import KERNELS
from manyheads.core.kernels import tiled as tiled_kernel
from manyheads.core.kernels.flash_cpu import _Flash
from manyheads.core.mask import Axis, Given, Mask, causal, cols_of, rows_of

HEADS = [(9, 3), (12, 2), (14, 2), (15, 5), (6, 1)]
TRAINED = ["grouped", "sdpa", "banded", "flash_cpu", "tiled"]
SCALE = 0.37


def make_mask(kind, t, heads):
    """Two sequences. padding: the first third of the second one, so its first queries see nothing."""
    axis = Axis(t, 0)
    if kind == "none":
        return Mask(axis, axis, ())
    if kind == "causal":
        return Mask(axis, axis)
    if kind == "window":
        return Mask(axis, axis, (causal, lambda q, k: rows_of(q.time) - cols_of(k.time) < 3))
    if kind == "padding":
        axis = Axis(t, 0, valid=torch.arange(t)[None] >= torch.tensor([[0], [t // 3 + 1]]))
        return Mask(axis, axis)
    sizes = torch.arange(1, heads + 1)[None, :, None, None]
    return Mask(axis, axis, (causal, lambda q, k: rows_of(q.time) - cols_of(k.time) < sizes))


MASKS = ["none", "causal", "window", "padding", "per head"]


def make_call(heads, groups, t, kind, *, s=None, e=6, v=4, grad=False, dtype=torch.float64):
    shapes = [(2, heads, t, e), (2, groups, s or t, e), (2, groups, s or t, v)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes)
    return Call(q, k, v, make_mask(kind, t, heads), SCALE)


def brute(call):
    """o and lse from one explicit softmax a head, in float64; NaN never arises."""
    each = call.q.shape[1] // call.k.shape[1]
    k, v = (x.double().repeat_interleave(each, 1) for x in (call.k, call.v))
    scores = torch.einsum("bhte,bhse->bhts", call.q.double(), k) * call.scale
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.bias is not None:
        scores = scores + call.bias(slice(None), slice(None)).double()
    seen = call.mask.tile().expand_as(scores)
    weights = torch.where(seen, scores - scores.detach().amax(), -torch.inf).exp()
    weights = torch.where(seen, weights, 0.0)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    o = (weights / total.masked_fill(empty, 1.0)) @ v
    lse = total.masked_fill(empty, 1.0).log() + scores.detach().amax()
    return o, lse.masked_fill(empty, -torch.inf)[..., 0]


def test_thin_rows_against_wide_values():
    for each in (1, 2, 3, 4):
        call = make_call(2 * each, 2, 1, "none", s=9, v=72)
        torch.testing.assert_close(attend(call, kernel="grouped").o, brute(call)[0], atol=1e-9, rtol=1e-9)


def lse_of(name):
    return name not in ("sdpa",)


def gradients(loss, call):
    return torch.autograd.grad(loss, [call.q, call.k, call.v], retain_graph=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_every_kernel_agrees_with_the_definition(name, heads, groups):
    """Any group size that divides, any mask, values narrower than keys and wider; empty rows exactly zero."""
    lengths, widths = ((5,), (4,)) if name == "flex" else ((1, 5), (4, 9))  # flex is slow without compilation
    for t, kind in itertools.product(lengths, MASKS):
        for v in widths:
            call = make_call(heads, groups, t, kind, v=v)
            out = attend(call, kernel=name, need_lse=lse_of(name))
            o, lse = brute(call)
            torch.testing.assert_close(out.o, o, atol=1e-9, rtol=1e-9, msg=f"{t} {kind} {v}".__add__)
            assert (out.o[o == 0] == 0).all(), f"empty rows of {t} {kind}"
            if lse_of(name):
                assert out.lse is not None
                torch.testing.assert_close(out.lse.double(), lse, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_agrees_beyond_one_block(name):
    """130 tokens: more than a block of FlexAttention and of the flash kernel."""
    for (heads, groups), kind in zip(HEADS, MASKS, strict=True):
        call = make_call(heads, groups, 130, kind, dtype=torch.float32)
        out = attend(call, kernel=name, need_lse=lse_of(name))
        o, lse = brute(call)
        torch.testing.assert_close(out.o.double(), o, atol=1e-5, rtol=1e-5)
        if lse_of(name):
            torch.testing.assert_close(out.lse.double(), lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("heads", "groups"), HEADS)
def test_gradients(name, heads, groups):
    """Of q, k and v, through o and (where there is one) through the log-sum-exp."""
    for t, kind in itertools.product((1, 5), MASKS):
        call = make_call(heads, groups, t, kind, grad=True)
        wo, wl = torch.randn(2, heads, t, 4, dtype=torch.float64), torch.randn(2, heads, t, dtype=torch.float64)
        o, lse = brute(call)
        empty = lse.isinf()
        out = attend(call, kernel=name, need_lse=lse_of(name))
        want, got = (o * wo).sum(), (out.o * wo).sum()
        if lse_of(name):
            want = want + (lse.masked_fill(empty, 0) * wl).sum()
            got = got + (out.lse.masked_fill(empty, 0) * wl).sum()
        for mine, theirs in zip(gradients(got, call), gradients(want, call), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9, msg=f"{t} {kind}".__add__)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_beyond_one_block(name):
    call = make_call(9, 3, 130, "padding", grad=True, dtype=torch.float32)
    weight = torch.randn(2, 9, 130, 4)
    got = gradients((attend(call, kernel=name).o * weight).sum(), call)
    want = gradients((brute(call)[0] * weight).sum(), call)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_rows_that_see_nothing_are_harmless(name):
    """Output exactly 0, log-sum-exp -inf, and a gradient that is exactly 0 and finite."""
    call = make_call(6, 2, 6, "padding", grad=True)
    empty = ~call.mask.tile().any(-1).expand(2, 6, 6)
    out = attend(call, kernel=name, need_lse=lse_of(name))
    assert empty.any()
    assert (out.o[empty] == 0).all()
    loss = out.o.sum()
    if lse_of(name):
        assert (out.lse[empty] == -torch.inf).all()
        loss = loss + out.lse.exp().sum()
    q, k, v = gradients(loss, call)
    assert all(g.isfinite().all() for g in (q, k, v))
    assert (q[empty] == 0).all()
    alone = replace(call, q=call.q[:1], k=call.k[:1], v=call.v[:1], mask=make_mask("causal", 6, 6))
    first = attend(alone, kernel=name).o.sum()
    if lse_of(name):
        first = first + attend(alone, kernel=name, need_lse=True).lse.exp().sum()
    for mine, theirs in zip((q, k, v), gradients(first, call), strict=True):
        torch.testing.assert_close(mine[0], theirs[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_fewer_keys_than_queries_and_none_at_all(name):
    mask = Mask(Axis(5, 0), Axis(2, 3))
    call = replace(make_call(6, 2, 5, "none", s=2), mask=mask)
    o = attend(call, kernel=name).o
    assert (o[:, :, :3] == 0).all()
    torch.testing.assert_close(o, brute(call)[0], atol=1e-9, rtol=1e-9)
    hidden = replace(call, mask=Mask(Axis(5, 0), Axis(2, 0, valid=torch.zeros(1, 2, dtype=torch.bool))))
    assert (attend(hidden, kernel=name).o == 0).all()


@pytest.mark.parametrize("name", ["grouped", "sdpa", "banded", "flash_cpu", "tiled"])
@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 3, 4, 4), (2, 1, 4, 4)])
@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_a_learned_bias_broadcasts_and_has_a_gradient(name, shape, kind):
    """Output as by the definition, and the bias gradient as by finite differences."""
    call = make_call(3, 1, 4, kind, e=3, v=2)
    start = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(2, 3, 4, 2, dtype=torch.float64)

    def biased(bias):
        return replace(call, bias=lambda q, k: bias[..., q, k])

    def loss(bias):
        return (attend(biased(bias), kernel=name).o * weight).sum()

    torch.testing.assert_close(attend(biased(start), kernel=name).o, brute(biased(start))[0], atol=1e-9, rtol=1e-9)
    bias = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(bias), bias)
    step = 1e-5
    for index in itertools.islice(itertools.product(*(range(n) for n in shape)), 0, None, 5):
        up, down = start.clone(), start.clone()
        up[index] += step
        down[index] -= step
        difference = (loss(up) - loss(down)) / (2 * step)
        assert abs(gradient[index] - difference) < 1e-6


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made inside holds."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return out


class Mix:
    """A score program that looks one row back: scores gain half of the row above."""

    halo, maps, terms = 1, 1, ()

    def scores(self, q, k, scale):
        return None

    def before(self, scores, visible, rows):
        above = torch.nn.functional.pad(scores[:, :, :-1], (0, 0, 1, 0))
        return scores + 0.5 * above.masked_fill(~visible, 0.0)

    def normalise(self, scores, visible):
        return None

    def after(self, weights, visible, rows):
        return weights * 2.0

    def read(self, weights, call, rows):
        return None


def solve_tiled(call, monkeypatch, rows, **options):
    batch, heads, _, s = (*call.q.shape[:3], call.k.shape[2])
    monkeypatch.setattr(module_of_tiled, "TILE_BYTES", rows * batch * heads * s * call.q.element_size())
    monkeypatch.setattr(module_of_tiled, "KEPT_BYTES", 0)
    return tiled_kernel(call, **options)


module_of_tiled = sys.modules["manyheads.core.kernels.tiled"]  # the package's attribute is the function


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("kind", ["none", "padding", "per head"])
def test_tiles_change_nothing(monkeypatch, rows, kind):
    """Outputs, log-sum-exps and gradients in tiles are those of one tile; halo rows, caps and biases included."""
    call = make_call(6, 3, 7, kind, grad=True)
    bias = torch.randn(6, 7, 7, dtype=torch.float64, requires_grad=True)
    for program in ((), (Mix(),)):
        for now in (call, replace(call, bias=lambda q, k: bias[..., q, k], softcap=2.0)):
            whole = tiled_kernel(now, program, need_lse=True)
            part = solve_tiled(now, monkeypatch, rows, program=program, need_lse=True)
            monkeypatch.undo()
            assert torch.equal(part.lse.isinf(), whole.lse.isinf())
            torch.testing.assert_close(part.o, whole.o, atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(part.lse.exp(), whole.lse.exp(), atol=1e-12, rtol=1e-12)
            weight = torch.randn_like(whole.o)
            inputs = [call.q, call.k, call.v] + ([bias] if now.bias else [])
            each = [torch.autograd.grad((out.o * weight).sum() + out.lse.exp().sum(), inputs) for out in (whole, part)]
            for mine, theirs in zip(*each, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_tiles_bound_the_memory(monkeypatch):
    """No tensor of queries times keys exists in the forward or the backward pass."""
    t = 96
    call = make_call(4, 2, t, "causal", grad=True)
    with Largest() as seen:
        solve_tiled(call, monkeypatch, 4).o.sum().backward()
    assert seen.numbers <= 2 * 4 * 4 * t + 2 * 4 * t * 6
    monkeypatch.undo()
    with Largest() as seen:
        tiled_kernel(replace(call, mask=Mask(Axis(t, 0), Axis(t, 0), ()))).o.sum().backward()
    assert seen.numbers >= 2 * 4 * t * t


def test_tiles_of_a_causal_call_hold_the_keys_within_reach(monkeypatch):
    """Of a triangle, little more than half is computed; a later start and a window of keys are counted from it."""
    t, widths = 512, []

    class Widths(Mix):
        def before(self, scores, visible, rows):
            widths.append(scores.shape[-1])
            return scores

    call = make_call(2, 1, t, "causal", dtype=torch.float32)
    tiled_kernel(call, [Widths()])
    assert widths == list(range(64, 513, 64))
    assert call.mask.reach(slice(5, 9)) == slice(0, 9) and call.mask.sees_some
    later = Mask(Axis(3, 7), Axis(10, 0))
    assert [later.reach(slice(0, n)).stop for n in (1, 2, 3)] == [8, 9, 10] and later.sees_some
    before = Mask(Axis(3, 0), Axis(10, 1))
    assert before.reach(slice(0, 1)) == slice(0, 0) and not before.sees_some
    assert Mask(Axis(3, 0), Axis(10, 0), ()).reach(slice(0, 1)) == slice(0, 10)


def test_softcap():
    """Scores become cap · tanh(score / cap), before the bias; the planner takes the path that can."""
    call = replace(make_call(6, 2, 5, "causal", grad=True), softcap=0.8)
    biased = replace(call, bias=lambda q, k: torch.arange(5.0, dtype=torch.float64)[k].expand(1, 1, 5, -1)[..., q, :])
    for now in (call, biased):
        torch.testing.assert_close(attend(now).o, brute(now)[0], atol=1e-9, rtol=1e-9)
    assert not torch.allclose(attend(call).o, attend(replace(call, softcap=None)).o)
    assert plan(t=5, heads=6, groups=2, softcap=True).kernel == "tiled"


@pytest.mark.parametrize("name", ["auto", "grouped", "sdpa", "tiled"])
def test_dropout_drops_weights_and_keeps_the_mean(name):
    call = make_call(4, 2, 1, "none", s=64, dtype=torch.float32)
    call = replace(call, mask=Mask(Axis(1, 63), Axis(64, 0)))
    plain = attend(call).o
    torch.testing.assert_close(attend(call, kernel=name).o, plain)
    many = torch.stack([attend(call, dropout=0.5, kernel=name).o for _ in range(300)])
    assert not torch.equal(many[0], many[1])
    torch.testing.assert_close(many.mean(0), plain, atol=0.15, rtol=0)


# What a kernel cannot do


@pytest.mark.parametrize(
    ("name", "change", "options", "reason"),
    [
        ("sdpa", {}, {"need_lse": True}, "log-sum-exp"),
        ("sdpa", {"softcap": 2.0}, {}, "soft cap"),
        ("sdpa", {}, {"program": [Mix()]}, "works on the scores"),
        ("grouped", {"softcap": 2.0}, {}, "soft cap"),
        ("grouped", {}, {"program": [Mix()]}, "works on the scores"),
        ("banded", {"softcap": 2.0}, {}, "soft cap"),
        ("banded", {}, {"program": [Mix()]}, "works on the scores"),
        ("flash_cpu", {}, {"dropout": 0.1}, "dropout"),
        ("flash_cpu", {"softcap": 2.0}, {}, "soft cap"),
        ("flex", {"bias": lambda q, k: torch.zeros(1, 1, 5, 5)[..., q, k]}, {}, "bias"),
        ("flex", {}, {"dropout": 0.1}, "dropout"),
    ],
)
def test_a_kernel_by_name_serves_the_call_or_says_why_not(name, change, options, reason):
    with pytest.raises(ValueError, match=reason) as error:
        attend(replace(make_call(4, 2, 5, "causal"), **change), kernel=name, **options)
    assert name in str(error.value)


def test_flex_has_no_backward_on_the_cpu_and_says_so():
    """Whichever of the inputs wants a gradient."""
    call = make_call(4, 2, 5, "causal")
    for name in ("q", "k", "v"):
        with pytest.raises(ValueError, match="no backward on the CPU"):
            attend(replace(call, **{name: getattr(call, name).clone().requires_grad_()}), kernel="flex")


def test_an_unknown_kernel_names_those_that_exist():
    with pytest.raises(ValueError, match="no kernel 'fast'; there are grouped, sdpa"):
        attend(make_call(2, 1, 3, "causal"), kernel="fast")


@pytest.mark.parametrize(
    ("facts", "kernel", "words"),
    [
        ({"t": 1, "heads": 12, "groups": 2}, "grouped", ["6 query rows"]),
        ({"t": 1, "heads": 12, "groups": 2, "need_lse": True}, "grouped", []),
        ({"t": 64, "heads": 12, "groups": 2}, "sdpa", ["not grouped: 384 query rows", "more than 32"]),
        ({"t": 64, "heads": 12, "groups": 2, "need_lse": True}, "flash_cpu", ["not sdpa: it does not return"]),
        ({"t": 64, "heads": 12, "groups": 2, "need_lse": True, "once": True}, "flash_cpu", []),
        ({"t": 1, "heads": 12, "groups": 2, "once": True}, "sdpa", ["6 query rows a key head: fused"]),
        ({"t": 1, "heads": 12, "groups": 2, "need_lse": True, "once": True}, "flash_cpu", []),
        ({"t": 1, "heads": 12, "groups": 2, "once": True, "device": "cuda"}, "grouped", []),
        ({"t": 64, "heads": 2, "groups": 2, "need_lse": True, "device": "cuda"}, "tiled", ["on cuda"]),
        ({"t": 64, "heads": 2, "groups": 2, "softcap": True}, "tiled", ["not sdpa: the scores are soft-capped"]),
        ({"t": 64, "heads": 2, "groups": 2, "program": ["Mix"]}, "tiled", ["not sdpa: Mix works on the scores"]),
        ({"t": 64, "heads": 2, "groups": 2, "bias": True, "need_lse": True}, "banded", []),
        ({"t": 64, "heads": 2, "groups": 2, "bias": True, "need_lse": True, "device": "cuda"}, "tiled", ["a bias is"]),
        ({"t": 64, "heads": 2, "groups": 2, "bias": True}, "banded", ["not sdpa: its gradient of a bias expands"]),
        ({"t": 64, "heads": 2, "groups": 2, "bias": True, "device": "cuda"}, "sdpa", []),
        ({"t": 64, "heads": 2, "groups": 2, "bias": True, "share": 0.31, "device": "cuda"}, "banded", []),
        ({"t": 1, "heads": 2, "groups": 2, "bias": True, "need_lse": True}, "grouped", []),
        ({"t": 64, "heads": 2, "groups": 2, "share": 0.31}, "banded", ["31% of all pairs", "not sdpa: it would"]),
        ({"t": 64, "heads": 2, "groups": 2, "share": 0.31, "need_lse": True}, "banded", []),
        ({"t": 64, "heads": 2, "groups": 2, "share": 0.31, "need_lse": True, "device": "cuda"}, "tiled", []),
        ({"t": 64, "heads": 2, "groups": 2, "share": 0.31, "bias": True}, "banded", []),
        ({"t": 64, "heads": 2, "groups": 2, "share": 0.9}, "sdpa", []),
        ({"t": 4096, "heads": 2, "groups": 2, "share": 1.0, "pairs": 4096**2}, "banded", []),
        ({"t": 1, "heads": 2, "groups": 2, "share": 0.1, "pairs": 4096**2}, "grouped", []),
        ({"t": 1, "heads": 2, "groups": 2, "bias": True}, "sdpa", ["not grouped: a bias"]),
        ({"t": 64, "heads": 2, "groups": 2, "dropout": True}, "tiled", ["not sdpa: ", "dropout"]),
        ({"t": 64, "heads": 2, "groups": 2, "dropout": True, "device": "cuda"}, "sdpa", []),
        ({"t": 1, "heads": 2, "groups": 2, "dropout": True, "device": "cuda"}, "sdpa", ["not grouped: dropout"]),
    ],
)
def test_a_plan_says_what_runs_and_why_the_faster_ones_do_not(facts, kernel, words):
    chosen = plan(**facts)
    assert chosen.kernel == kernel
    assert all(word in str(chosen) for word in words), str(chosen)


@pytest.mark.parametrize("kernel", ["sdpa", "flash_cpu"])
@pytest.mark.parametrize("rules", [(), (causal,)], ids=["all", "padded"])
@pytest.mark.parametrize("t", [1, 3])
def test_queries_of_one_key_head_are_rows_of_one_fused_problem(kernel, rules, t, monkeypatch):
    torch.manual_seed(0)
    valid = torch.arange(7)[None] >= torch.tensor([[0], [2], [5]])
    q, k, v = torch.randn(3, 6, t, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, 8)
    mask = Mask(Axis(t, 7 - t), Axis(7, 0, valid=valid if rules else None), rules)
    call = Call(q, k, v, mask, 0.3)
    expected = attend(call, need_lse=kernel == "flash_cpu", kernel="grouped")
    heads = []
    fused = F.scaled_dot_product_attention if kernel == "sdpa" else _Flash.apply
    spy = lambda q, k, *a, **b: heads.append((q.shape[1], k.shape[1])) or fused(q, k, *a, **b)
    monkeypatch.setattr(*((F, "scaled_dot_product_attention") if kernel == "sdpa" else (_Flash, "apply")), spy)
    found = attend(call, need_lse=kernel == "flash_cpu", kernel=kernel)
    assert heads == [(2, 2)]
    torch.testing.assert_close(found.o, expected.o, atol=1e-6, rtol=1e-5)
    if expected.lse is not None:
        torch.testing.assert_close(found.lse, expected.lse, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rules", [(), (causal,)], ids=["all", "causal"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_no_kernel_asks_how_heads_lie_in_memory_or_for_a_positive_scale(kernel, rules, scale):
    torch.manual_seed(0)
    apart = lambda h: torch.randn(8, h, 2, 40).permute(2, 1, 3, 0)  # channels far from each other
    q, k, v = apart(4), apart(2), apart(2)
    mask = Mask(Axis(40, 0), Axis(40, 0), rules)
    scores = (q.unflatten(1, (2, 2)) @ k.mT[:, :, None] * scale).flatten(1, 2).masked_fill(~mask.tile(), -torch.inf)
    expected = (scores.softmax(-1).unflatten(1, (2, 2)) @ v[:, :, None]).flatten(1, 2)
    found = attend(Call(q, k, v, mask, scale), need_lse=kernel not in ("sdpa", "flex"), kernel=kernel)
    torch.testing.assert_close(found.o, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_a_single_row_of_16_bits_is_doubled_and_read_once(padded):
    torch.manual_seed(0)
    valid = torch.arange(7)[None] >= torch.tensor([[0], [2], [5]])
    mask = Mask(Axis(1, 6), Axis(7, 0, valid=valid if padded else None), (causal,))
    call = Call(*(torch.randn(3, 2, t, 8).bfloat16() for t in (1, 7, 7)), mask, 0.3)
    expected = attend(Call(call.q.float(), call.k.float(), call.v.float(), mask, 0.3), need_lse=True, kernel="grouped")
    assert plan_call(call).kernel == "sdpa"
    for found in (attend(call), attend(call, need_lse=True)):
        torch.testing.assert_close(found.o.float(), expected.o, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "keys", "values", "kernel"),
    [
        (torch.float32, 64, 64, "sdpa"),
        (torch.float32, 2**13, 64, "grouped"),  # waits for memory all the same
        (torch.bfloat16, 2**18, 64, "sdpa"),
        (torch.bfloat16, 64, 32, "grouped"),  # a fused kernel would copy the values
    ],
)
def test_few_queries_are_answered_by_what_reads_their_rows_faster(dtype, keys, values, kernel):
    on = {"dtype": dtype, "device": "meta"}
    q, k, v = (torch.empty(1, *shape, **on) for shape in ((4, 1, 64), (2, keys, 64), (2, keys, values)))
    call = Call(q, k, v, Mask(Axis(1, keys - 1), Axis(keys, 0)), 0.125)
    assert plan_call(call).kernel == kernel
    spread = replace(call, spread=(torch.empty(1, 1, keys, 64, **on),))
    assert plan_call(spread).kernel == "grouped"  # a fused kernel would form the keys


def test_values_that_are_channels_of_the_keys_are_read_with_them():
    torch.manual_seed(0)
    rows, q = torch.randn(2, 1, 9, 12), torch.randn(2, 6, 1, 12)
    mask = Mask(Axis(1, 9), Axis(9, 0))
    call = Call(q, rows, rows[..., :8], mask, 0.3)
    assert call.values_in_keys and plan_call(call).kernel == "sdpa"
    apart = Call(q, rows, rows[..., :8].clone(), mask, 0.3)
    assert not apart.values_in_keys and plan_call(apart).kernel == "grouped"
    assert not Call(q, rows, rows[..., 2:10], mask, 0.3).values_in_keys
    torch.testing.assert_close(attend(call).o, attend(apart).o, atol=1e-6, rtol=1e-5)
    assert attend(call).o.shape == (2, 6, 1, 8)
    learned = rows.requires_grad_()
    assert not Call(q, learned, learned[..., :8].detach(), mask, 0.3).values_in_keys  # their gradients differ


def test_what_a_plan_says_is_what_runs(monkeypatch):
    """attend runs the kernel that plan names, for every combination of facts."""
    ran = []
    for name, solve in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, lambda *a, _n=name, _s=solve, **k: ran.append(_n) or _s(*a, **k))
    for t, lse, bias, cap, drop in itertools.product((1, 20), *[(False, True)] * 4):
        call = make_call(4, 2, t, "causal")
        call = replace(
            call,
            bias=(lambda q, k, t=t: torch.zeros(1, 1, t, t, dtype=torch.float64)[..., q, k]) if bias else None,
            softcap=3.0 if cap else None,
        )
        out = attend(call, need_lse=lse, dropout=0.1 * drop)
        told = plan(t=t, heads=4, groups=2, need_lse=lse, bias=bias, softcap=cap, dropout=drop)
        assert ran.pop() == told.kernel
        assert (out.lse is not None) or not lse


def test_a_plan_never_names_a_kernel_that_expands_scores_in_secret():
    """Whatever is asked for, no tensor of queries times keys appears unless the caller's own bias is one."""
    t = 160
    for drop, lse in itertools.product((0.0, 0.1), (False, True)):
        call = make_call(4, 2, t, "causal", grad=True)
        monkey = pytest.MonkeyPatch()
        monkey.setattr(module_of_tiled, "TILE_BYTES", 8 * 2 * 4 * t * 8)
        with Largest() as seen:
            attend(call, dropout=drop, need_lse=lse).o.sum().backward()
        monkey.undo()
        assert seen.numbers < 4 * t * t, f"dropout {drop}, lse {lse}"


def test_forced_kernels_raise_where_they_cannot_serve():
    with kernel_module.using("flash_cpu"):
        assert attend(make_call(4, 2, 1, "causal"), need_lse=True).lse is not None
        with pytest.raises(ValueError, match="flash_cpu"):
            attend(make_call(4, 2, 1, "causal"), dropout=0.1)
    assert attend(make_call(4, 2, 1, "causal")).lse is None


# Merging


def pieces(call, cuts):
    """The call cut into calls over disjoint keys."""
    edges = [0, *cuts, call.k.shape[2]]
    return [
        replace(call, k=call.k[:, :, a:b], v=call.v[:, :, a:b], mask=replace(call.mask, k=call.mask.k[a:b]))
        for a, b in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("name", ["grouped", "flash_cpu", "tiled"])
@pytest.mark.parametrize("kind", MASKS)
def test_merging_equals_the_union_of_the_keys(name, kind):
    """Any cut (single keys, empty parts), any order and any nesting; gradients too."""
    call = make_call(6, 2, 6, kind, grad=True)
    o, lse = brute(call)
    weight = torch.randn_like(o)
    want = gradients((o * weight).sum() + lse.exp().sum(), call)
    for cuts in ([3], [1, 2, 3, 4, 5], [2, 2, 5]):
        outs = [attend(each, need_lse=True, kernel=name) for each in pieces(call, cuts) if each.k.shape[2]]
        nested = merge([outs[-1], merge(outs[:-1])])
        for got in (merge(outs), merge(outs[::-1]), nested):
            torch.testing.assert_close(got.o, o, atol=1e-9, rtol=1e-9)
            assert torch.equal(got.lse.isinf(), lse.isinf())
            torch.testing.assert_close(got.lse.exp(), lse.exp(), atol=1e-9, rtol=1e-9)
            mine = gradients((got.o * weight).sum() + got.lse.exp().sum(), call)
            for a, b in zip(mine, want, strict=True):
                torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_the_gradient_of_a_merge_is_finite_where_nothing_was_seen():
    lses = [torch.full((1, 1, 2), -torch.inf).requires_grad_() for _ in range(3)]
    outs = [Out(torch.zeros(1, 1, 2, 2), lse) for lse in lses]
    got = merge([merge(outs[:2]), outs[2]])
    for grad in torch.autograd.grad(got.o.sum() + got.lse.exp().sum(), lses):
        assert (grad == 0).all()


def test_one_partial_solution_is_returned_as_it_is():
    out = Out(torch.ones(1, 1, 1, 2))
    assert merge([out]) is out


def test_merge_needs_every_log_sum_exp():
    with pytest.raises(ValueError, match="need_lse=True"):
        merge([Out(torch.ones(1, 1, 1, 2)), Out(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))])


def test_merge_of_extreme_scores_neither_overflows_nor_forgets():
    """Log-sum-exps far apart, and empties among them."""
    lses = torch.tensor([800.0, -torch.inf, 799.0, -900.0])
    outs = [Out(torch.full((1, 1, 1, 2), float(i)), lse.view(1, 1, 1)) for i, lse in enumerate(lses)]
    got = merge(outs)
    share = 1 / (1 + math.exp(-1))
    assert got.o[0, 0, 0, 0].item() == pytest.approx(2 * (1 - share))
    assert got.lse.item() == pytest.approx(800 + math.log1p(math.exp(-1)))
    nothing = merge([outs[1], outs[1]])
    assert (nothing.o == 0).all() and nothing.lse.item() == -math.inf


def test_half_precision_returns_its_dtype():
    call = make_call(4, 2, 5, "padding", dtype=torch.bfloat16)
    o, _ = brute(call)
    for name in KERNELS:
        out = attend(call, kernel=name).o
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), o, atol=2e-2, rtol=2e-2)


def test_a_given_mask_reaches_every_kernel():
    call = make_call(3, 3, 5, "none")
    call = replace(call, mask=Mask(Axis(5, 0), Axis(5, 0), (Given(torch.rand(2, 3, 5, 5) < 0.4),)))
    for name in KERNELS:
        torch.testing.assert_close(attend(call, kernel=name).o, brute(call)[0], atol=1e-9, rtol=1e-9)
