"""Oracles of `talking_heads`."""

import pytest
import torch
from tests.oracles.reference import HEADS, batch, close, decoded, differ, heads_of, join, make, rope, triangle, twin
from tests.oracles.reference import weights as softmax

SPEC, WIDTH = "gqa + talking_heads", 6
EYE = torch.eye(HEADS).double()


def mixed(layer, logits=EYE, weights=EYE, spec=SPEC):
    return twin(layer, spec, attends__0__logits=logits, attends__0__weights=weights)


def parts(layer, x):
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    return rope(q), rope(k), v


def test_written_out():
    layer, x = make(SPEC), batch()
    q, k, v = parts(layer, x)
    logits = torch.einsum("ig,bits->bgts", layer.attends[0].logits, q @ k.transpose(-1, -2) * WIDTH**-0.5)
    w = logits.masked_fill(~triangle(), -torch.inf).softmax(-1)
    close(layer(x), join(torch.einsum("gv,bgts->bvts", layer.attends[0].weights, w) @ v, layer.project.o_proj))


def test_identities_are_mha():
    layer, x = make("gqa"), batch()
    close(mixed(layer)(x), layer(x))


def test_rows_sum_to_the_columns_of_the_second_mix():
    layer = make(SPEC)
    program, seen = layer.attends[0], triangle()
    w = torch.randn(2, HEADS, 9, 9).double().masked_fill(~seen, -torch.inf).softmax(-1)
    u = program.after(w, seen, slice(None), None)
    close(u.sum(-1), program.weights.sum(0)[None, :, None].expand(2, HEADS, 9))
    assert not u.masked_select(~seen).any()


def test_second_mix_is_a_mix_of_outputs():
    """U_v V_v = Σ_g P_w[g, v] (W_g V_v)."""
    layer, x = mixed(make(SPEC), weights=torch.randn(HEADS, HEADS).double()), batch()
    q, k, v = parts(layer, x)
    each = softmax(q, k, WIDTH**-0.5)[:, :, None] @ v[:, None]  # [B, g, v, T, d]
    close(layer(x), join(torch.einsum("gv,bgvtd->bvtd", layer.attends[0].weights, each), layer.project.o_proj))


def test_first_mix_alone_is_a_product_of_wide_queries():
    """Mixing on one side: L_g = Σ_i P_l[i, g] q_i · k_i is one product over all heads' channels."""
    layer, x = mixed(make(SPEC), logits=torch.randn(HEADS, HEADS).double()), batch()
    q, k, v = parts(layer, x)
    wide_q = torch.einsum("ig,bitd->bgtid", layer.attends[0].logits, q).flatten(3)
    wide_k = k.transpose(1, 2).flatten(2)[:, None].expand(-1, HEADS, -1, -1)
    close(layer(x), join(softmax(wide_q, wide_k, WIDTH**-0.5) @ v, layer.project.o_proj))


def test_a_permutation_and_its_inverse_are_mha():
    layer, x, pi = make("gqa"), batch(), EYE[torch.randperm(HEADS)]
    close(mixed(layer, pi, pi.T)(x), layer(x))
    differ(mixed(layer, EYE.flip(0), EYE)(x), layer(x))


def test_one_head_is_a_temperature_and_a_scale():
    layer, x = make("gqa + talking_heads", 6, 1), batch(dim=6)
    logits, weights = layer.attends[0].logits.item(), layer.attends[0].weights.item()
    plain = twin(layer, f"gqa(scale={logits * 6**-0.5!r})")
    close(layer(x), weights * plain(x))


@pytest.mark.parametrize("logits", [-EYE, 0 * EYE, torch.ones(HEADS, HEADS).double()])
def test_the_mask_comes_after_the_mix(logits):
    """With it before, zeros and negative weights would turn -inf into NaN or +inf."""
    layer, x = mixed(make(SPEC), logits=logits), batch().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y[:, 4].sum(), x)
    assert y.isfinite().all() and gradient.isfinite().all() and not gradient[:, 5:].any()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decode_and_grouped_keys(kv_heads):
    """Key heads are repeated over their query heads before the mix."""
    layer, x = make(f"gqa(kv_heads={kv_heads}) + talking_heads"), batch()
    close(decoded(layer, x), layer(x))
    copies = {
        f"project__{name}__weight": getattr(layer.project, name).weight.detach()
        .unflatten(0, (kv_heads, WIDTH)).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1)
        for name in ("k_proj", "v_proj")
    }  # fmt: skip
    close(twin(layer, SPEC, **copies)(x), layer(x))


def test_cost():
    base, cost = (make(spec).spec.cost(24, HEADS) for spec in ("gqa", SPEC))
    assert cost.parameters - base.parameters == 2 * HEADS**2
    assert cost.pair_flops - base.pair_flops == 4 * HEADS**2 and cost.cache_floats == base.cache_floats
