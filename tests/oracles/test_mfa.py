"""Oracles of `mfa`: MFA and MFA-Key-Reuse."""

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
    twin,
    weights,
)

from manyheads import Attention, Cache, OptionError, Spec

C = 8
MQA = f"gqa(kv_heads=1, head_dim={C})"


def drawn_reuse(extra=""):
    return make(f"mfa(width={C}, key_reuse=true){extra}")


def value_map(layer):
    """M = I + diag(α) N of column vectors."""
    p = layer.project
    return torch.eye(C).double() + p.value_gate.detach()[:, None] * p.value_map.weight.detach()


def test_written_out():
    layer, x = make(f"mfa(width={C}, q_rank=5)"), batch()
    p = layer.project
    u = p.q_a_proj(x)
    u = u / (u.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * p.q_a_norm.weight
    q, k, v = heads_of(p.q_b_proj(u), HEADS), p.k_proj(x)[:, None], p.v_proj(x)[:, None]
    close(layer(x), join(weights(rope(q), rope(k), C**-0.5) @ v, p.o_proj))


def test_identity_query_map_is_mqa():
    layer, x = make(f"mfa(width={C}, q_rank={DIM}, norm=false)"), batch()
    layer = twin(layer, str(layer.spec), project__q_a_proj__weight=torch.eye(DIM).double())
    close(layer(x), twin(layer, MQA, project__q_proj__weight=layer.project.q_b_proj.weight.detach())(x))


def test_factored_equals_merged():
    layer, x = make(f"mfa(width={C}, q_rank=5, norm=false)"), batch()
    p = layer.project
    merged = (p.q_b_proj.weight @ p.q_a_proj.weight).detach()
    assert torch.linalg.matrix_rank(merged) == 5
    close(layer(x), twin(layer, MQA, project__q_proj__weight=merged)(x))


def test_absorbed_mla_without_position_is_mfa():
    """Q_c = W_uq (W_UK)ᵀ, O_c = (W_UV)ᵀ W_O and one latent for keys and values; the scale goes into Q by hand."""
    mla, x = make(f"mla(rank={C}, rope_dim=0, nope_dim=6, v_dim=5, q_rank=7, norm=false, view=absorbed)"), batch()
    p, (up_k, up_v) = mla.project, (w.detach() for w in mla.project._up())
    q = up_k.transpose(1, 2) @ p.q_b_proj.weight.detach().unflatten(0, (HEADS, 6)) * (6**-0.5 * C**0.5)
    o = torch.cat([o @ v for o, v in zip(p.o_proj.weight.detach().split(5, 1), up_v, strict=True)], 1)
    mfa = twin(
        mla, f"mfa(width={C}, q_rank=7, norm=false) + rope(none)",
        project__q_b_proj__weight=q.flatten(0, 1), project__o_proj__weight=o,
        project__k_proj__weight=p.kv_a_proj.weight.detach(), project__v_proj__weight=p.kv_a_proj.weight.detach(),
    )  # fmt: skip
    close(mfa(x), mla(x))


@pytest.mark.parametrize("position", ["", " + rope(none)"])
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_reuse_is_mfa_with_mapped_values(alpha, position):
    """S_v = S_k Mᵀ in row vectors, values taken before rotation; at α = 0 the value is the key."""
    layer, x = drawn_reuse(position), batch()
    layer.project.value_gate.data *= alpha
    k = layer.project.k_proj.weight.detach()
    mapped = value_map(layer) @ k
    assert torch.equal(mapped, k) == (alpha == 0)
    close(layer(x), twin(layer, f"mfa(width={C}){position}", project__v_proj__weight=mapped)(x))


def test_reuse_starts_with_values_equal_to_keys():
    assert not Attention(f"mfa(width={C}, key_reuse=true)", DIM, HEADS).project.value_gate.any()


def test_map_folded_into_the_output():
    layer, x = drawn_reuse(), batch()
    folded = layer.project.o_proj.weight.detach().unflatten(1, (HEADS, C)) @ value_map(layer)
    other = twin(
        layer, str(layer.spec),
        project__o_proj__weight=folded.flatten(1), project__value_gate=torch.zeros(C).double(),
    )  # fmt: skip
    close(decoded(other, x), decoded(layer, x))


def test_rank_of_a_heads_form():
    layer = make(f"mfa(width={C}, q_rank=12, norm=false)")
    p = layer.project
    for q in p.q_b_proj.weight.unflatten(0, (HEADS, C)):
        assert torch.linalg.matrix_rank(p.q_a_proj.weight.T @ q.T @ p.k_proj.weight) == C


@pytest.mark.parametrize(("reuse", "stored"), [("false", 2 * C), ("true", C)])
@pytest.mark.parametrize("heads", [2, 8])
def test_decode_and_cache_bytes(reuse, stored, heads):
    layer, cache, x = make(f"mfa(width={C}, key_reuse={reuse})", heads=heads), Cache(), batch()
    close(decoded(layer, x, 1, cache), layer(x))
    assert cache.bytes() == len(x) * TOKENS * stored * 8


def test_the_authors_sizes():
    """Step-3's width 256 and query rank 2048; each more head costs C_q·C + C·D and no cache."""
    spec = Spec.parse("mfa(width=256, q_rank=2048, norm=false)")
    cost, more = (spec.cost(7168, heads) for heads in (64, 65))
    assert cost.parameters == 7168 * 2048 + 2048 * 64 * 256 + 2 * 7168 * 256 + 64 * 256 * 7168
    assert more.parameters - cost.parameters == 2048 * 256 + 256 * 7168
    assert more.cache_floats == cost.cache_floats == 512
    reuse = Spec.parse("mfa(width=256, q_rank=2048, norm=false, key_reuse=true)").cost(7168, 64)
    assert reuse.parameters == cost.parameters - 7168 * 256 + 256**2 + 256 and reuse.cache_floats == 256


def test_the_papers_cache():
    """24 layers of D 2048 and C 256 at 16 bits: 196.6 KB a token for MHA, 12.5 % of it for MFA, 6.25 % with reuse."""
    lines = ("gqa", "mfa(width=256)", "mfa(width=256, key_reuse=true)")
    kilobytes = [24 * Spec.parse(line).cost(2048, 16).cache_floats * 2 / 1000 for line in lines]
    assert [round(float(each), 1) for each in kilobytes] == [196.6, 24.6, 12.3]
    assert kilobytes[1] / kilobytes[0] == 0.125 and kilobytes[2] / kilobytes[0] == 0.0625


@pytest.mark.parametrize(
    ("line", "heads", "said"),
    [
        ("mfa(width=0)", 4, "width=0 and q_rank=None must be positive"),
        ("mfa(q_rank=0)", 4, "width=12 and q_rank=0 must be positive"),
        ("mfa", 5, "dim=24 is no multiple of heads=5; give width"),
    ],
)
def test_numbers_that_do_not_fit(line, heads, said):
    with pytest.raises(OptionError, match=f"mfa: {said}"):
        Attention(line, DIM, heads)


def test_positions_matter():
    layer, x = drawn_reuse(), batch()
    mixed = torch.cat([x[:, torch.randperm(TOKENS - 1)], x[:, -1:]], 1)
    differ(layer(mixed)[:, -1], layer(x)[:, -1])
