"""Oracles of `mhe`."""

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
    join,
    make,
    rope,
    twin,
    weights,
)

from manyheads import Attention, Cache, OptionError, Spec, SpecError

WIDTH = 6


def written_out(layer, x, turn):
    """Every head's q, k and v formed from the shared ones, step by step."""
    p = layer.project

    def form(proj, e):
        shared = proj(x)[:, None]
        if e is None:
            return shared.expand(-1, HEADS, -1, -1)
        return shared * (1 + e[:, None]) if p.mul else shared + e[:, None]

    q, k, v = form(p.q_proj, p.q_heads), form(p.k_proj, p.k_heads), form(p.v_proj, p.v_heads)
    return join(weights(turn(q), turn(k), WIDTH**-0.5) @ v, p.o_proj)


@pytest.mark.parametrize("combine", ["mul", "add"])
@pytest.mark.parametrize("key_embedding", ["true", "false"])
def test_written_out(combine, key_embedding):
    """With RoPE after the embeddings; and without, where it is multi-query attention rewritten."""
    layer, x = make(f"mhe(combine={combine}, key_embedding={key_embedding})"), batch()
    close(layer(x), written_out(layer, x, rope))
    still = twin(layer, f"mhe(combine={combine}, key_embedding={key_embedding}) + rope(none)")
    assert still.project.views == ("expanded", "absorbed") and still.view(TOKENS) == "absorbed"
    close(still(x), written_out(still, x, lambda t: t), 1e-13)
    differ(still(x), layer(x))


@pytest.mark.parametrize("combine", ["mul", "add"])
def test_embeddings_of_zero_are_multi_query_attention_with_equal_queries(combine):
    layer, x = make(f"mhe(combine={combine})"), batch()
    zero = {f"project__{name}_heads": torch.zeros(HEADS, WIDTH).double() for name in "qkv"}
    layer = twin(layer, str(layer.spec), **zero)
    q = layer.project.q_proj.weight.detach().repeat(HEADS, 1)
    close(layer(x), twin(layer, "gqa(kv_heads=1)", project__q_proj__weight=q)(x))


@pytest.mark.parametrize("combine", ["mul", "add"])
def test_one_head_without_embeddings_is_single_head_attention(combine):
    layer, x = make(f"mhe(combine={combine}, head_dim=6)", heads=1), batch()
    for name in "qkv":
        getattr(layer.project, f"{name}_heads").data.zero_()
    close(layer(x), twin(layer, "gqa(head_dim=6)")(x))


def test_key_embedding_of_add_is_inert_without_rotation():
    layer, x = make("mhe(combine=add, key_embedding=true) + rope(none)"), batch()
    layer(x).pow(2).sum().backward()
    assert layer.project.k_heads.grad.abs().max() < 1e-12 < layer.project.q_heads.grad.abs().min()
    close(twin(layer, "mhe(combine=add) + rope(none)")(x), layer(x))
    assert make("mhe(combine=add) + rope(none)").project.k_heads is None
    turning = make("mhe(combine=add)")
    differ(twin(turning, str(turning.spec), project__k_heads=0 * turning.project.k_heads.detach())(x), turning(x))


def test_a_soft_cap_sees_the_key_embedding_of_add_in_both_views():
    """A cap is no softmax of shifted scores, so nothing may be left out."""
    layer, x = make("mhe(combine=add, key_embedding=true) + rope(none) + softmax(cap=1.0)"), batch()
    close(
        twin(layer, "mhe(combine=add, key_embedding=true, view=expanded) + rope(none) + softmax(cap=1.0)")(x), layer(x)
    )
    differ(twin(layer, "mhe(combine=add) + rope(none) + softmax(cap=1.0)")(x), layer(x))


@pytest.mark.parametrize("position", [" + rope(none)", ""])
def test_value_embedding_of_add_is_an_output_bias(position):
    layer, x = make(f"mhe(combine=add){position}"), batch()
    o = layer.project.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH))
    bias = torch.einsum("Dhd,hd->D", o, layer.project.v_heads.detach())
    plain = twin(layer, str(layer.spec), project__v_heads=torch.zeros(HEADS, WIDTH).double())
    close(layer(x) - plain(x), bias.expand(2, TOKENS, DIM))


@pytest.mark.parametrize(("position", "same"), [(" + rope(none)", True), ("", False)])
def test_scales_of_queries_and_keys_trade_per_channel(position, same):
    """(1 + e^q) c and (1 + e^k) / c; under rotation only where both channels of a pair have one c."""
    layer, x, c = make(f"mhe{position}"), batch(), 1 + torch.rand(HEADS, WIDTH).double()
    p = layer.project

    def traded(c):
        q, k = (1 + p.q_heads.detach()) * c - 1, (1 + p.k_heads.detach()) / c - 1
        return twin(layer, str(layer.spec), project__q_heads=q, project__k_heads=k)

    close(traded(c)(x), layer(x)) if same else differ(traded(c)(x), layer(x))
    close(traded(c[:, :3].repeat(1, 2))(x), layer(x))


def test_add_is_a_multi_query_layer_with_biases():
    layer, x = make("mhe(combine=add) + rope(none)"), batch()
    p = layer.project
    o = p.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH))
    mqa = twin(
        layer, "gqa(kv_heads=1, bias=qkvo) + rope(none)",
        project__q_proj__weight=p.q_proj.weight.detach().repeat(HEADS, 1),
        project__q_proj__bias=p.q_heads.detach().flatten(),
        project__k_proj__bias=torch.zeros(WIDTH).double(), project__v_proj__bias=torch.zeros(WIDTH).double(),
        project__o_proj__bias=torch.einsum("Dhd,hd->D", o, p.v_heads.detach()),
    )  # fmt: skip
    close(mqa(x), layer(x))


def test_mul_is_a_multi_query_layer_with_scaled_blocks():
    layer, x = make("mhe + rope(none)"), batch()
    p = layer.project
    scales = ((1 + p.q_heads) * (1 + p.k_heads)).detach()[..., None]
    o = p.o_proj.weight.detach() * (1 + p.v_heads.detach()).flatten()
    mqa = twin(
        layer, "gqa(kv_heads=1) + rope(none)",
        project__q_proj__weight=(scales * p.q_proj.weight.detach()).flatten(0, 1), project__o_proj__weight=o,
    )  # fmt: skip
    close(mqa(x), layer(x))


@pytest.mark.parametrize("spec", ["mhe", "mhe(combine=add)", "mhe(combine=add) + rope(none)", "mhe + alibi"])
def test_decode_and_cache_bytes(spec):
    layer, cache, x = make(spec), Cache(), batch()
    close(decoded(layer, x, 1, cache), layer(x))
    assert cache.bytes() == len(x) * TOKENS * 2 * WIDTH * 8


def test_only_distances_matter():
    layer, x, positions = make("mhe(combine=add)"), batch(), torch.arange(TOKENS)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


def test_embeddings_start_small():
    torch.manual_seed(0)
    p = Attention("mhe", 768, 12).project
    for embedding in (p.q_heads, p.k_heads, p.v_heads):
        assert abs(embedding.std() / 0.02 - 1) < 0.1


def test_cost():
    """3Dd + 3Hd + HdD weights; of multi-head attention's query, key and value weights that is 1/H + 1/D."""
    cost, mha = (Spec.parse(line).cost(768, 12) for line in ("mhe", "gqa"))
    assert cost.parameters == 3 * 768 * 64 + 3 * 12 * 64 + 768 * 768 and cost.cache_floats == 2 * 64
    assert (cost.parameters - 768 * 768) / (mha.parameters - 768 * 768) == pytest.approx(1 / 12 + 1 / 768)
    fewer = Spec.parse("mhe(key_embedding=false)").cost(768, 12)
    assert cost.parameters - fewer.parameters == 12 * 64


def test_refusals():
    with pytest.raises(OptionError, match="give head_dim"):
        Attention("mhe", 25, 4)
    with pytest.raises(OptionError, match="head_dim=0"):
        Attention("mhe(head_dim=0)", 24, 4)
    with pytest.raises(SpecError, match=r"nearest legal: mhe\(view=expanded\)"):
        Attention("mhe + qk-norm", 24, 4)
    assert Attention("mhe(view=expanded) + qk-norm", 24, 4)
