"""Oracles of `complexformer`."""

import math

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    TOKENS,
    batch,
    close,
    decoded,
    differ,
    heads_of,
    join,
    make,
    triangle,
    twin,
)

from manyheads import Attention, OptionError, Spec
from manyheads.core.mask import Axis

SPEC, WIDTH, PAIRS = "gqa + complexformer", 6, 3


def still(rate=1.0, shift=0.0, kv=HEADS):
    """Changes that set δ and b."""
    return {
        "positions__0__rate": torch.full((kv, 1, PAIRS), rate).double(),
        "positions__0__shift": torch.full((HEADS, 1, PAIRS), shift).double(),
    }


def polar(x):
    re, im = x.chunk(2, -1)
    return (re**2 + im**2 + 1e-9).sqrt(), torch.atan2(im, re)


def qkv(layer, x):
    p, kv = layer.project, layer.project.kv_heads
    return tuple(heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, kv), (p.v_proj, kv)))


def naive_scores(layer, q, k, positions, wrap=0.0):
    """Σ_c a^q a^k cos(δ (φ^q - φ^k) + b + (m - n) g) `[B, H, T, S]`, the tensor of phases written out."""
    each = HEADS // k.shape[1]
    (aq, pq), (ak, pk) = polar(q), polar(k.repeat_interleave(each, 1))
    piece = layer.positions[0]
    g = 10000.0 ** (-torch.arange(PAIRS).double() / PAIRS)
    distance = (positions[:, None] - positions[None]).double()[..., None] * g
    rate, shift = piece.rate.repeat_interleave(each, 0), piece.shift
    phase = rate[:, None] * (pq[:, :, :, None] + wrap - pk[:, :, None]) + shift[:, None] + distance
    return (aq[:, :, :, None] * ak[:, :, None] * phase.cos()).sum(-1)


def naive(layer, x, positions):
    q, k, v = qkv(layer, x)
    w = naive_scores(layer, q, k, positions).masked_fill(~triangle(), -torch.inf).softmax(-1)
    return join(w @ v.repeat_interleave(HEADS // v.shape[1], 1), layer.project.o_proj)


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "gqa(kv_heads=1)"])
def test_the_factored_form_is_the_definition(base):
    """Values and gradients, of δ and b too."""
    layer, x, positions = make(f"{base} + complexformer"), batch(), torch.arange(TOKENS)
    got, want = layer(x), naive(layer, x, positions)
    close(got, want, 1e-6)  # frequencies are float32
    parameters = list(layer.parameters())
    for mine, theirs in zip(*(torch.autograd.grad(y.sin().sum(), parameters) for y in (got, want)), strict=True):
        close(mine, theirs, 1e-5)


def test_it_runs_fused():
    assert Attention(SPEC, DIM, HEADS).explain(100).kernel == "sdpa"


def test_as_it_is_without_phases_it_is_rope():
    layer, x = make(SPEC), batch()
    layer = twin(layer, SPEC, **still())
    close(layer(x), twin(layer, "gqa(scale=1.0)")(x), 1e-6)  # up to the 1e-9 in the magnitude
    own = twin(layer, "gqa + complexformer(scale=none)")
    close(own(x), twin(layer, "gqa")(x), 1e-6)
    other = twin(layer, "gqa + complexformer(base=50.0)")
    close(other(x), twin(layer, "gqa(scale=1.0) + rope(base=50.0)")(x), 1e-6)


def test_without_positions():
    """At one place: δ = 1 is the plain product; δ = 0 forgets phases, and scores are positive."""
    layer, x, here = make(SPEC), batch(), torch.zeros(1, TOKENS, dtype=torch.long)
    plain = twin(layer, SPEC, **still())
    close(plain(x, positions=here), twin(plain, "gqa(scale=1.0) + rope(none)")(x), 1e-6)
    sizes = twin(layer, SPEC, **still(rate=0.0))
    q, k, v = qkv(sizes, x)
    s = polar(q)[0] @ polar(k)[0].transpose(-1, -2)
    assert (s >= 0).all()
    w = s.masked_fill(~triangle(), -torch.inf).softmax(-1)
    close(sizes(x, positions=here), join(w @ v, layer.project.o_proj))


def turned(layer, q, k):
    axis, piece = Axis(q.shape[2], 0), layer.positions[0]
    return piece.turn_q(q, axis) @ piece.turn(k, axis).transpose(-1, -2)


def test_scores_are_bounded_by_sizes():
    layer, x = make(SPEC), batch()
    q, k, _ = qkv(layer, x)
    assert (turned(layer, q, k).abs() <= polar(q)[0] @ polar(k)[0].transpose(-1, -2) + 1e-12).all()


def test_only_distances_matter():
    layer, x, positions = make(SPEC), batch(), torch.arange(TOKENS)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


def test_full_turns():
    """b by 2π changes nothing; a phase by 2π only where δ is no integer."""
    layer, x = make(SPEC), batch()
    shifted = twin(layer, SPEC, positions__0__shift=layer.positions[0].shift.detach() + 2 * math.pi)
    close(shifted(x), layer(x))
    q, k, _ = qkv(layer, x)
    for rate, same in ((2.0, True), (1.5, False)):
        fixed = twin(layer, SPEC, **still(rate, 0.4))
        around = naive_scores(fixed, q, k, torch.arange(TOKENS), wrap=2 * math.pi)
        close(turned(fixed, q, k), around, 1e-6) if same else differ(turned(fixed, q, k), around)


def test_each_head_has_its_own_rate():
    layer, x = make("gqa(kv_heads=2) + complexformer"), batch()
    rate = layer.positions[0].rate.detach()
    assert rate.shape == (2, 1, PAIRS) and layer.positions[0].shift.shape == (HEADS, 1, PAIRS)
    differ(twin(layer, str(layer.spec), positions__0__rate=rate.flip(0))(x), layer(x))


def test_start():
    layer = Attention(SPEC, 512, 8)
    rate = layer.positions[0].rate
    assert not layer.positions[0].shift.any() and abs(rate.std().item() - 32**-0.5) < 0.02
    assert layer.layout.scale == 1.0


def test_composed_heads_are_turned_as_heads():
    """Turning is not the same for all heads, so it waits until the heads are composed."""
    layer, x = make("gqa(kv_heads=2) + head_composition(kv_heads=4) + complexformer"), batch()
    assert layer.rotate_at == "read"
    q, k, v = qkv(layer, x)
    k, v = layer.transforms[0].on_k(k, None), layer.transforms[0].on_v(v, None)
    w = turned(layer, q, k).masked_fill(~triangle(), -torch.inf).softmax(-1)
    close(layer(x), join(w @ v, layer.project.o_proj))


def test_small_and_zero_vectors():
    layer, x = make(SPEC), batch()
    x[:, 2], x[:, 3] = 0, 1e-8
    y = layer(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all() and gradient.abs().max() < 1e6


def test_far_positions_in_half_precision():
    layer = make(SPEC).bfloat16()
    exact, k = make(SPEC), torch.randn(1, HEADS, 3, WIDTH).bfloat16()
    exact.load_state_dict(layer.state_dict())
    got, want = (p.positions[0].turn(t, Axis(3, 30000)) for p, t in ((layer, k), (exact, k.double())))
    assert got.dtype == torch.bfloat16
    close(got.double(), want, 0.03)


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "mfa(width=8)", "mfa(width=8, key_reuse=true)"])
def test_decode(base):
    layer, x = make(f"{base} + complexformer"), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))
    y = layer(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y[:, 4].sum(), x)
    assert not gradient[:, 5:].any()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cost(kv_heads):
    base = f"gqa(kv_heads={kv_heads})"
    cost, plain = (Spec.parse(line).cost(DIM, HEADS) for line in (f"{base} + complexformer", base))
    assert cost.parameters - plain.parameters == (HEADS + kv_heads) * PAIRS  # D of them when every head has its key
    assert cost.cache_floats == plain.cache_floats == 2 * kv_heads * WIDTH


def test_refusals():
    with pytest.raises(OptionError, match="2 of the 8 key channels rotate"):
        Attention("mla + complexformer", DIM, HEADS)
    with pytest.raises(OptionError, match="a head of width 5 is not made of pairs; use 4 or 6"):
        Attention("gqa(head_dim=5) + complexformer", DIM, HEADS)
    with pytest.raises(OptionError, match="'complexformer' and 'rope' both take the slot 'position'"):
        Attention("complexformer + rope", DIM, HEADS)
    with pytest.raises(OptionError, match="needs 'alike heads'"):
        Attention("complexformer + differential", DIM, HEADS)
