"""What users of attention libraries met in the field, as laws of this layer, in the field's own numbers."""

import copy
import itertools
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import manyheads as mh
from manyheads.core.kernel import Call, SlowPath, attend, using, warn_once
from manyheads.core.kernels import KERNELS
from manyheads.core.mask import Axis, Mask
from manyheads.core.part import OptionError


class Watch(TorchDispatchMode):
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


def close(got, want, tolerance):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


# Shapes, masks and NaN


@pytest.mark.parametrize("kernel", ["auto", "grouped", "sdpa", "flash_cpu", "tiled"])
def test_a_row_with_nothing_to_see_is_harmless_in_both_directions(kernel):
    """Window of 2 and padding on one of two samples: finite gradients, zero rows, the other sample unharmed."""
    layer = mh.Attention("gqa + window(2)", 16, 2)
    x, valid = torch.randn(2, 4, 16), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    with using(kernel):
        y = layer(x, mask=valid)
        assert (y[1, 2:] == 0).all()
        y[valid].pow(2).sum().backward()
        both = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        layer(x[:1]).pow(2).sum().backward()
        first = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        layer(x[1:, :2]).pow(2).sum().backward()
    for whole, one, other in zip(both, first, layer.parameters(), strict=True):
        assert whole.isfinite().all()
        torch.testing.assert_close(whole, one + other.grad, atol=1e-6, rtol=1e-5)


def test_one_answer_whatever_kernel_runs():
    """16 tokens, window 4, the last 12 keys padded: every kernel agrees and empty rows are exactly 0."""
    layer, x = mh.Attention("gqa(kv_heads=2) + window(4)", 32, 4).eval(), torch.randn(2, 16, 32)
    valid = torch.arange(16) < 4
    seen = (valid[None] & torch.ones(16, 16).tril().bool())[None, None]
    with torch.no_grad():
        outs = {}
        for name in KERNELS:
            with using(name):
                outs[name] = layer(x, mask=seen)
        for name, out in outs.items():
            close(out, outs["tiled"], 1e-5)
            assert (out[:, 7:] == 0).all(), name
            assert (out[:, :7] != 0).any(-1).all(), name
        close(outs["sdpa"][:, :4], layer(x[:, :4]), 1e-5)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "mla", "gqa + alibi", "mtla", "gqa + qk-norm + moh(2)"])
def test_output_is_as_long_as_the_input_and_eval_equals_train(spec):
    """5 of 6 positions padded in every sample."""
    layer, x = mh.Attention(spec, 32, 4), torch.randn(8, 6, 32)
    valid = torch.tensor([True] + [False] * 5).expand(8, 6)
    trained, evaluated = layer.train()(x, mask=valid), layer.eval()(x, mask=valid)
    assert trained.shape == evaluated.shape == (8, 6, 32)
    close(trained[:, :1], evaluated[:, :1], 1e-6)
    close(evaluated[:, :1], layer(x[:, :1]), 1e-6)


def test_causal_means_the_newest_query_lines_up_with_the_newest_key():
    """2 queries on 5 keys see 4 and 5 of them, on every kernel; 5 queries on 2 keys: the first 3 give 0."""
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    full = attend(Call(q, k, v, Mask(Axis(5, 0), Axis(5, 0)), 0.3)).o
    for name in KERNELS:
        late = Call(q[:, :, 3:], k, v, Mask(Axis(2, 3), Axis(5, 0)), 0.3)
        assert late.mask.visible().flatten().tolist() == [4, 5]
        close(attend(late, kernel=name).o, full[:, :, 3:], 1e-5)
        few = Call(q, k[:, :, :2], v[:, :, :2], Mask(Axis(5, 0), Axis(2, 3)), 0.3)
        assert (attend(few, kernel=name).o[:, :, :3] == 0).all()


@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (12, 2), (14, 2), (15, 5), (6, 1)])
@pytest.mark.parametrize("t", [1, 5, 130])
def test_any_group_size_that_divides(heads, groups, t):
    """Forward and backward of every kernel match keys expanded by hand; one without backward says so at once."""
    layer, x = mh.Attention(f"gqa(kv_heads={groups}, head_dim=4)", 20, heads), torch.randn(1, t, 20, requires_grad=True)
    full = mh.Attention("gqa(head_dim=4)", 20, heads)
    state = layer.state_dict()
    for name in ("k_proj", "v_proj"):
        weight = state[f"project.{name}.weight"].unflatten(0, (groups, 4))
        state[f"project.{name}.weight"] = weight.repeat_interleave(heads // groups, 0).flatten(0, 1)
    full.load_state_dict(state)
    want = full(x)
    (gradient,) = torch.autograd.grad(want.pow(2).sum(), x)
    for name in KERNELS:
        with using(name):
            if name == "flex":
                with pytest.raises(ValueError, match="kernel 'flex' has no backward"):
                    layer(x)
                with torch.no_grad():
                    close(layer(x), want, 1e-4)
                continue
            y = layer(x)
            close(y, want, 1e-4)
            close(torch.autograd.grad(y.pow(2).sum(), x)[0], gradient, 1e-4)


class OwnBias:
    """A learned score bias, as a score program or a position would pass it."""

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, q, k):
        return self.bias[..., q, k]


@pytest.mark.parametrize("shape", [(3, 5, 5), (1, 3, 5, 5), (2, 1, 5, 5)])
def test_a_learned_bias_broadcasts_and_is_learned(shape):
    """Over batch or heads; output as an explicit softmax, gradient as finite differences."""
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mask = Mask(Axis(5, 0), Axis(5, 0))

    def solve(bias):
        return attend(Call(q, k, v, mask, 0.5, OwnBias(bias))).o

    scores = (0.5 * q @ k.transpose(-1, -2) + bias).masked_fill(~mask.tile(), -torch.inf)
    close(solve(bias), scores.softmax(-1) @ v, 1e-9)
    assert torch.autograd.gradcheck(solve, bias, atol=1e-6)


PROJECTS = {"mha": "gqa", "gqa": "gqa(kv_heads=2)", "mqa": "gqa(kv_heads=1)", "mla": "mla(rank=8, rope_dim=4)"}
OPTIONS = {"qk-norm": "qk-norm", "rope": "rope", "alibi": "alibi", "window": "window(3)", "cross": "", "cache": ""}


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize(("first", "second"), itertools.combinations_with_replacement(OPTIONS, 2))
def test_options_compose_or_are_refused_at_construction(project, first, second):
    """Every pair decodes as it computes at once (or its queries are independent of each other), or says why not."""
    names = {first, second}
    spec = " + ".join([PROJECTS[project], *sorted(OPTIONS[name] for name in names if OPTIONS[name])])
    cross = "cross" in names
    site = mh.Site(cross=cross, context_dim=20 if cross else None)
    try:
        layer = mh.Attention(spec, 24, 4, site=site).double().eval()
    except OptionError as error:
        refused = ("qk-norm" in names and project == "mla") or names == {"rope", "alibi"}
        assert refused, f"{spec} should build: {error}"
        assert "nearest legal" in str(error) or "keep one of them" in str(error)
        return
    x, context = torch.randn(2, 7, 24, dtype=torch.float64), torch.randn(2, 5, 20, dtype=torch.float64)
    given = {"context": context} if cross else {}
    full, cache, outs = layer(x, **given), mh.Cache(), []
    for first_row, n in ((0, 3), (3, 1), (4, 2), (6, 1)):
        axis = Axis(n, first_row)
        outs.append(layer(x[:, first_row : first_row + n], positions=axis, cache=cache, **given))
    close(torch.cat(outs, 1), full, 1e-9)
    y = layer(x, **given)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [4, 8])
def test_a_merging_step_sees_the_padding(side, length):
    """3 tokens alone and padded to 4 and 8, slots of 4: the same outputs; what stands on padding changes nothing."""
    layer, x = mh.Attention("mtla(stride=4)", 32, 4).eval(), torch.randn(1, 3, 32)
    alone, pad = layer(x), torch.randn(1, length - 3, 32)
    valid = torch.tensor([[True] * 3 + [False] * (length - 3)])
    valid = valid if side == "right" else valid.flip(1)

    def padded(pad):
        return torch.cat([x, pad] if side == "right" else [pad, x], 1)

    got = layer(padded(pad), mask=valid)
    close(got[valid], alone[0], 1e-6)
    assert torch.equal(layer(padded(pad * 1e3), mask=valid)[valid], got[valid])
    cache = mh.Cache()
    with torch.no_grad():
        blocks = [layer(padded(pad)[:, t : t + 2], mask=valid[:, t : t + 2], cache=cache) for t in range(0, length, 2)]
    close(torch.cat(blocks, 1)[valid], alone[0], 1e-6)


def test_head_width_is_free_of_the_model_width():
    """1024 wide, 16 query heads and 8 key heads of 128."""
    spec = "gqa(kv_heads=8, head_dim=128)"
    with torch.device("meta"):
        layer = mh.Attention(spec, 1024, 16)
        assert layer(torch.empty(2, 3, 1024)).shape == (2, 3, 1024)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes == {
        "project.q_proj.weight": (2048, 1024),
        "project.k_proj.weight": (1024, 1024),
        "project.v_proj.weight": (1024, 1024),
        "project.o_proj.weight": (1024, 2048),
    }
    assert mh.Spec.parse(spec).cost(1024, 16).parameters == 2 * 2048 * 1024 + 2 * 1024 * 1024


# Cache and decode


def test_context_is_cached_once_while_self_attention_grows():
    """Four layers of self- and cross-attention with rotation, 10 steps; going back leaves the context alone."""
    depth = 4
    own = [mh.Attention("gqa", 128, 4, site=mh.Site(layer=2 * i, layers=8)) for i in range(depth)]
    over = [mh.Attention("gqa", 128, 4, site=mh.Site(2 * i + 1, 8, cross=True)) for i in range(depth)]
    context, x = torch.randn(3, 10, 128), torch.randn(3, 10, 128)
    calls = []
    over[0].project.k_proj.register_forward_hook(lambda *args: calls.append(1))

    def run(x, cache=None):
        for a, b in zip(own, over, strict=True):
            x = x + a(x, cache=cache)
            x = x + b(x, context=context, cache=cache)
        return x

    with torch.no_grad():
        full = run(x)
        calls.clear()
        cache = mh.Cache()
        for t in range(10):
            assert (run(x[:, t : t + 1], cache) - full[:, t : t + 1]).abs().max() < 1e-5
            if t == 5:
                run(torch.randn(3, 2, 128), cache)
                cache.rollback(2)
        assert calls == [1]
        assert cache.length(0) == 10 and cache.length(1) == 10
        with pytest.raises(ValueError, match="the cache holds a context of 10, not 9"):
            over[0](x[:, :1], context=context[:, :9], cache=cache)


def test_a_context_mask_hides_padding_of_the_context():
    """A Mask says which context tokens there are; with a cache too."""
    layer = mh.Attention("gqa", 16, 2, site=mh.Site(cross=True, context_dim=12)).eval()
    x, context = torch.randn(2, 3, 16), torch.randn(2, 5, 12)
    valid = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    mask = Mask(Axis(3, 0), Axis(5, 0, valid=valid), ())
    y = layer(x, context=context, mask=mask, cache=mh.Cache())
    close(y[1], layer(x[1:], context=context[1:, :2])[0], 1e-6)
    close(y[0], layer(x[:1], context=context[:1])[0], 1e-6)


def test_the_cache_stores_key_heads_never_the_expanded_ones():
    """32 query and 8 key heads of 128, 1024 tokens in bfloat16: 4 MiB a layer, measured from storage."""
    layer = mh.Attention("gqa(kv_heads=8, head_dim=128)", 64, 32).bfloat16()
    cache = mh.Cache()
    with torch.no_grad():
        layer(torch.randn(1, 1024, 64, dtype=torch.bfloat16), cache=cache)
    assert cache.bytes() == 2 * 8 * 128 * 1024 * 2 == 4 * 2**20
    assert cache.reserved_bytes() <= cache.bytes() * 9 / 8


def test_latents_are_cached_and_read_without_expanding_them():
    """Rank 512 and rope 64: 576 numbers a token; a decode step over 4096 tokens forms no keys of heads."""
    heads, n = 16, 4096
    layer = mh.Attention("mla(rank=512, rope_dim=64, nope_dim=32, v_dim=32)", 64, heads).eval()
    other = mh.Attention("mla(rank=512, rope_dim=64, nope_dim=32, v_dim=32, view=expanded)", 64, heads).eval()
    other.load_state_dict(layer.state_dict())
    cache, x = mh.Cache(), torch.randn(1, 1, 64)
    entries = {"latent": torch.randn(1, 1, n, 576)}
    cache.write(0, entries, layer.entries, Axis(n, 0))
    assert cache.bytes() == 576 * n * 4
    fork = cache.fork(torch.tensor([0]))
    with torch.no_grad():
        layer(x, cache=cache)  # grows once
        with Watch() as seen:
            layer(x, cache=cache)
        assert seen.numbers <= 577 * (n + 2) < heads * n * 32 * 2
        first = layer(x, cache=cache.fork(torch.tensor([0])))
        other(x, cache=fork), other(x, cache=fork)
        close(other(x, cache=fork), first, 1e-5)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2)", "mla(rank=8, rope_dim=4)"])
def test_a_prefix_is_prefilled_once_and_forked(spec):
    """20 tokens, three suffixes fed in blocks, with padding inside: each as in the full run; the prefix untouched."""
    layer, prefix = mh.Attention(spec, 32, 4).eval(), torch.randn(1, 20, 32)
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[0, [0, 7, 8, 19]] = False
    with torch.no_grad():
        cache = mh.Cache()
        layer(prefix, mask=valid, cache=cache)
        before = copy.deepcopy([*cache.site(0).tensors()])
        for n in (1, 4, 9):
            suffix, fork = torch.randn(1, n, 32), cache.fork(torch.tensor([0]))
            got = torch.cat([layer(part, cache=fork) for part in suffix.split(3, 1)], 1)
            want = layer(torch.cat([prefix[:, valid[0]], suffix], 1))[:, -n:]
            close(got, want, 1e-5)
        assert all(torch.equal(a, b) for a, b in zip(before, cache.site(0).tensors(), strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_sharing_rows_across_layers_is_of_the_model_not_of_the_cache(padded):
    """A layer that reads another's rows gives the same with and without a cache, and owns no key or value weights."""
    first = mh.Attention("gqa(kv_heads=2)", 32, 4, site=mh.Site(0, 2)).eval()
    second = mh.Attention("gqa(kv_heads=2)", 32, 4, site=mh.Site(1, 2, kv_source=0)).eval()
    assert not any("k_proj" in name or "v_proj" in name for name, _ in second.named_parameters())
    x = torch.randn(2, 8, 32)
    valid = torch.tensor([[1] * 8, [0] * 3 + [1] * 5]).bool() if padded else None

    def run(x, mask, cache=None):
        links = mh.Links()
        y = x + first(x, mask=mask, cache=cache, links=links)
        return y + second(y, mask=mask, cache=cache, links=links)

    with torch.no_grad():
        full, cache = run(x, valid), mh.Cache()
        cuts = [slice(0, 5), slice(5, 6), slice(6, 8)]
        got = torch.cat([run(x[:, cut], valid if valid is None else valid[:, cut], cache) for cut in cuts], 1)
    seen = torch.ones(2, 8, dtype=torch.bool) if valid is None else valid
    close(got[seen], full[seen], 1e-6)


# Options, weights and dtypes


def test_key_heads_mean_nothing_to_a_latent():
    with pytest.raises(ValueError, match="'mla' has no option 'kv_heads'"):
        mh.Attention("mla(kv_heads=2)", 64, 4)
    with pytest.raises(ValueError, match=r"8 query heads cannot share kv_heads=3; kv_heads may be \[1, 2, 4, 8\]"):
        mh.Attention("gqa(kv_heads=3)", 64, 8)


class Adapter(nn.Module):
    """A low-rank adapter around a Linear that it finds by name."""

    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))

    def merge(self, sign):
        with torch.no_grad():
            self.inner.weight += sign * self.up.weight @ self.down.weight


@pytest.mark.parametrize("cross", [False, True])
def test_projections_are_plain_linears_found_by_name(cross):
    """Adapters on q, k, v and o of self- and cross-attention; merging and taking them out restores the output."""
    site = mh.Site(cross=cross, context_dim=48 if cross else None)
    layer = mh.Attention("gqa(kv_heads=2)", 64, 4, site=site).eval()
    x, given = torch.randn(2, 5, 64), {"context": torch.randn(2, 7, 48)} if cross else {}
    plain = layer(x, **given)
    layer.requires_grad_(False)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        inner = layer.project.get_submodule(name)
        assert type(inner) is nn.Linear
        setattr(layer.project, name, Adapter(inner))
    adapters = [module for module in layer.modules() if isinstance(module, Adapter)]
    source = 48 if cross else 64
    assert sum(p.numel() for p in layer.parameters() if p.requires_grad) == 2 * (
        (64 + 64) + 2 * (source + 32) + (64 + 64)
    )
    adapted = layer(x, **given)
    for adapter in adapters:
        adapter.merge(1)
        setattr(layer.project, next(n for n, m in layer.project.named_children() if m is adapter), adapter.inner)
    close(layer(x, **given), adapted, 1e-6)
    for adapter in adapters:
        adapter.merge(-1)
    close(layer(x, **given), plain, 1e-6)


@pytest.mark.parametrize("spec", ["gqa(kv_heads=2) + qk-norm", "mla(view=expanded) + qk-norm", "mla", "gqa + kha"])
def test_autocast_keeps_queries_keys_and_values_in_one_dtype(spec):
    layer, x, cache = mh.Attention(spec, 64, 4).eval(), torch.randn(2, 6, 64), mh.Cache()
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = layer(x)
        steps = torch.cat([layer(part, cache=cache) for part in x.split([4, 1, 1], 1)], 1)
    assert y.dtype == torch.bfloat16
    close(y.float(), want, 2e-2)
    close(steps.float(), want, 2e-2)


# No silent change of memory class


@pytest.mark.parametrize(
    ("spec", "prefill", "step"),
    [
        ("gqa(kv_heads=2)", "sdpa", "sdpa"),
        ("mla", "sdpa", "sdpa"),
        ("gqa + alibi", "banded", "sdpa"),
        ("softmax(cap=5)", "tiled", "tiled"),
        ("talking_heads", "tiled", "tiled"),
        ("gqa + differential", "sdpa", "grouped"),
        ("gqa + window(4)", "sdpa", "sdpa"),
    ],
)
def test_a_layer_says_which_kernel_runs_and_that_one_does(monkeypatch, spec, prefill, step):
    layer, ran = mh.Attention(spec, 32, 4).eval(), []
    for name, solve in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, lambda *a, _n=name, _s=solve, **k: ran.append(_n) or _s(*a, **k))
    for n, want in ((40, prefill), (1, step)):
        ran.clear()
        with torch.set_grad_enabled(n > 1):
            told = layer.explain(n)
            layer(torch.randn(1, n, 32))
        assert set(ran) == {told.kernel} == {want}
        assert told.why
    dropped = mh.Attention(spec, 32, 4, dropout=0.1).train()
    assert dropped.explain(40).kernel == "tiled"
    assert "dropout has no fused kernel" in str(dropped.explain(40))


def test_memory_does_not_grow_with_queries_times_keys():
    """4096 tokens, forward and backward, key heads shared and heads wider than 256: no tensor of scores exists."""
    n = 4096
    layer = mh.Attention("gqa(kv_heads=1, head_dim=264)", 8, 2)
    with Watch() as seen:
        layer(torch.randn(1, n, 8)).sum().backward()
    assert seen.numbers <= 2 * n * 272 < n * n / 4


def test_a_bias_that_needs_the_whole_map_warns_once(monkeypatch):
    monkeypatch.setattr(sys.modules["manyheads.core.kernels.sdpa"], "TILE_BYTES", 1000)
    warn_once.cache_clear()
    layer, x = mh.Attention("alibi", 16, 2), torch.randn(1, 40, 16)
    with using("sdpa"):
        with pytest.warns(SlowPath, match="holds the score bias of all queries and keys at once"):
            layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            y = layer(x)
    with using("tiled"):
        close(layer(x), y, 1e-5)


# Per-head contributions


@pytest.mark.parametrize("spec", ["gqa(bias=qkvo)", "gqa(kv_heads=2)", "mla"])
def test_heads_add_up_to_the_layer(spec):
    """What each head adds, `[B, H, T, D]`, found at the named output projection, sums with its bias to the output."""
    layer, x, seen = mh.Attention(spec, 32, 4), torch.randn(2, 5, 32), []
    out = layer.project.o_proj
    out.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    y = layer(x)
    o = seen[0].unflatten(-1, (4, -1)).transpose(1, 2)
    weight = out.weight.unflatten(1, (4, -1)).transpose(0, 1)
    each = torch.einsum("bhtw,hdw->bhtd", o, weight)
    close(each.sum(1) + (0 if out.bias is None else out.bias), y, 1e-5)
    close(F.linear(seen[0], out.weight, out.bias), y, 1e-5)


# What does not fit is said at once


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mask": torch.ones(1, 4)}, "a mask is bool"),
        ({"mask": torch.ones(1, 4, 4, dtype=torch.bool)}, r"\[B, T\] or \[B, H, T, S\]"),
        ({"mask": torch.ones(1, 3, dtype=torch.bool)}, r"a padding mask must be about the tokens of x, \[1, 4\]"),
        ({"positions": torch.tensor([[3]])}, r"positions must be about the tokens of x, \[1, 4\], not \[1, 1\]"),
        ({"positions": torch.arange(4)}, "positions must be about"),
        ({"positions": Axis(3, 0)}, "an axis of 3 queries describes 4"),
        ({"mask": Mask(Axis(4, 0), Axis(5, 0))}, "an axis of 5 keys describes 4"),
        ({"context": torch.ones(1, 2, 16)}, "takes no context"),
    ],
)
def test_arguments_that_disagree_are_named(given, words):
    with pytest.raises(ValueError, match=words):
        mh.Attention("gqa", 16, 2)(torch.randn(1, 4, 16), **given)


def test_a_mask_of_ones_own_is_used_as_it_is():
    """Its key axis too."""
    layer, x = mh.Attention("gqa", 16, 2).eval(), torch.randn(1, 4, 16)
    hidden = Axis(4, 0, valid=torch.tensor([[False, True, True, True]]))
    y = layer(x, mask=Mask(Axis(4, 0), hidden))
    assert (y[:, 0] == 0).all()
    close(y[:, 1:], layer(x[:, 1:]), 1e-5)
