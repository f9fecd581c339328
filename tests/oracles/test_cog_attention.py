"""Oracles of `cog-attention`."""

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
    rope,
    triangle,
    twin,
)

from manyheads import Attention, Site, SpecError
from manyheads.core.kernel import Out, merge, using
from manyheads.core.kernels.common import masked_lse, masked_softmax

COG, WIDTH = "cog-attention(soft_ends=false)", 6
SPEC = f"gqa + {COG}"


def scores(layer, x):
    p = layer.project
    q, k = rope(heads_of(p.q_proj(x), HEADS)), rope(heads_of(p.k_proj(x), HEADS))
    return q @ k.transpose(-1, -2) * WIDTH**-0.5, heads_of(p.v_proj(x), HEADS)


def signed(s, seen):
    """The definition, without care for large scores."""
    e = s.abs().exp() * seen
    return s.sign() * e / e.sum(-1, keepdim=True)


def test_written_out():
    layer, x = make(SPEC), batch()
    s, v = scores(layer, x)
    close(layer(x), join(signed(s, triangle()) @ v, layer.project.o_proj))


def test_weights():
    """Σ|w| = 1 over visible keys, hidden ones are zero, Σw is between -1 and 1."""
    layer, x = make(SPEC), batch()
    w = layer.attends[0].normalise(scores(layer, x)[0], triangle(), None)
    close(w.abs().sum(-1), torch.ones(2, HEADS, TOKENS).double())
    assert not w.masked_select(~triangle()).any() and (w < 0).any()
    assert w.sum(-1).abs().max() <= 1 + 1e-12 and w.sum(-1).min() < 0.5


def test_positive_scores_are_softmax():
    layer, x = make(f"{SPEC} + rope(none)"), batch().abs()
    positive = {f"project__{n}_proj__weight": getattr(layer.project, f"{n}_proj").weight.detach().abs() for n in "qk"}
    layer = twin(layer, str(layer.spec), **positive)
    close(layer(x), twin(layer, "gqa + rope(none)")(x))
    differ(make(SPEC)(x), twin(make(SPEC), "gqa")(x))


def test_negated_queries_negate_the_output():
    layer, x = make(SPEC), batch()
    negated = twin(layer, SPEC, project__q_proj__weight=-layer.project.q_proj.weight.detach())
    close(negated(x), -layer(x))
    plain = twin(layer, "gqa")
    differ(twin(negated, "gqa")(x), -plain(x))


def test_a_lone_key_gives_its_value_with_a_sign():
    layer, x = make(SPEC), batch()
    s, v = scores(layer, x)
    first = s[:, :, :1, :1].sign() * v[:, :, :1]
    assert (first.sign() != v[:, :, :1].sign()).any()
    close(layer(x)[:, :1], join(first, layer.project.o_proj))


def test_shifting_scores_matters():
    program, s, seen = make(SPEC).attends[0], torch.randn(1, 1, TOKENS, TOKENS).double(), triangle()
    differ(program.normalise(s + 1, seen, None), program.normalise(s, seen, None))
    close(masked_softmax(s + 1, seen), masked_softmax(s, seen))


def test_a_bias_is_added_before_the_absolute_value():
    layer, x = make(f"{SPEC} + alibi"), batch()
    p, at = layer.project, torch.arange(TOKENS)
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    slopes = 2.0 ** (-8 * (torch.arange(HEADS) + 1) / HEADS)
    s = q @ k.transpose(-1, -2) * WIDTH**-0.5 - slopes[:, None, None] * (at[:, None] - at).abs()
    close(layer(x), join(signed(s, triangle()) @ v, p.o_proj))


def two_passes(s, v, seen):
    """Softmax over keys of positive and of negative scores, merged by their log-sum-exp."""
    outs = []
    for sign in (1, -1):
        some = seen & (sign * s > 0)
        outs.append(Out(sign * masked_softmax(sign * s, some) @ v, masked_lse(sign * s, some)))
    return merge(outs).o


def test_two_passes_equal_the_dense_form():
    s, v = torch.randn(2, HEADS, TOKENS, TOKENS).double(), torch.randn(2, HEADS, TOKENS, WIDTH).double()
    s = s.sign() * s.abs().clamp_min(1e-3)  # no gradient at zero
    results = []
    for solve in (two_passes, lambda s, v, seen: signed(s, seen) @ v):
        inputs = [s.clone().requires_grad_(), v.clone().requires_grad_()]
        o = solve(*inputs, triangle())
        results.append((o.detach(), *torch.autograd.grad((o.sin()).sum(), inputs)))
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "gqa + window(3)"])
def test_fused_equals_explicit(base):
    """FlexAttention, once for each sign; a query whose scores have one sign only has an empty side."""
    layer, x = make(f"{base} + {COG}"), batch()
    mask = torch.arange(TOKENS)[None] >= torch.tensor([0, 4])[:, None]
    with torch.no_grad():
        want = layer(x, mask=mask)
        with using("flex"):
            close(layer(x, mask=mask), want)


def test_gradient_is_the_softmax_gradient_with_signs():
    program, seen = make(SPEC).attends[0], triangle()
    s, dw = torch.randn(1, 2, TOKENS, TOKENS).double().requires_grad_(), torch.randn(1, 2, TOKENS, TOKENS).double()
    (got,) = torch.autograd.grad((program.normalise(s, seen, None) * dw).sum(), s)
    a, sign = masked_softmax(s.detach().abs(), seen), s.detach().sign()
    inner = sign * dw
    close(got, sign * a * (inner - (a * inner).sum(-1, keepdim=True)))


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_the_first_and_the_last_layer_keep_softmax(layers):
    x = batch()
    for index in range(layers):
        layer = make("gqa + cog-attention", site=Site(layer=index, layers=layers))
        soft = index in (0, layers - 1)
        close(layer(x), twin(layer, "gqa" if soft else SPEC)(x))
        assert layer.explain(40).kernel == ("sdpa" if soft else "tiled")


def test_large_and_zero_scores():
    layer, x = make(SPEC), 300 * batch()
    assert scores(layer, x)[0].abs().max() > 1e4
    y = layer(x.requires_grad_())
    assert y.isfinite().all() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    x = batch()
    x[:, 3] = 0
    y = layer(x.requires_grad_())
    close(y[:, 3], torch.zeros(2, DIM).double())  # all its scores are zero: weights of sign zero
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("base", ["gqa(kv_heads=1)", "gqa(kv_heads=2)", "mla", "mfa(key_reuse=true)", "mtla"])
def test_decode(base):
    layer, x = make(f"{base} + {COG}"), batch()
    close(decoded(layer, x), layer(x))
    y = layer(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y[:, 4].sum(), x)
    assert not gradient[:, 5:].any()


def test_grouped_keys():
    layer, x = make(f"gqa(kv_heads=2) + {COG}"), batch()
    copies = {
        f"project__{name}__weight": getattr(layer.project, name).weight.detach()
        .unflatten(0, (2, WIDTH)).repeat_interleave(2, 0).flatten(0, 1)
        for name in ("k_proj", "v_proj")
    }  # fmt: skip
    close(twin(layer, SPEC, **copies)(x), layer(x))


def test_cost_and_refusal():
    base, cost = (make(spec).spec.cost(DIM, HEADS) for spec in ("gqa", SPEC))
    assert cost == base
    with pytest.raises(SpecError, match="both take the slot 'normalise'"):
        Attention("softmax(cap=3.0) + cog-attention", DIM, HEADS)
