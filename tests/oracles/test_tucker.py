"""Oracles of `tucker`."""

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
    make,
    rope,
    triangle,
    twin,
    weights,
)

from manyheads import Attention, Cache, OptionError, Spec
from manyheads.attention.project.tucker import Tucker
from manyheads.attention.tucker import Factors, from_heads, from_latent, hosvd, state_of

WIDTH = 6
RANKS = "ranks=[3, 7, 8], value_ranks=[2, 5, 10]"


def factors(layer):
    """What a layer's parameters say, as two tensors in Tucker form."""
    p = layer.project
    v = p.k_proj if p.shared else p.v_proj
    score = Factors(p.q_core, p.q_heads, p.q_proj.weight.T, p.k_proj.weight.T)
    return score, Factors(p.o_core, p.o_heads, p.o_proj.weight, v.weight.T)


def loaded(score, output, shared=False, scale=WIDTH**-0.5):
    part = Tucker(score.ranks, output.ranks, shared, scale)
    layer = Attention(f"{Spec((part,))} + rope(none)", DIM, HEADS).double()
    layer.project.load_state_dict(state_of(score, output, shared))
    return layer


def untruncated(w, w_out, x, scale):
    """Y = Σ_h softmax(x W_h xᵀ scale) x W̃_hᵀ, causal."""
    scores = torch.einsum("btd,hde,bse->bhts", x, w, x) * scale
    a = scores.masked_fill(~triangle(), -torch.inf).softmax(-1)
    return torch.einsum("bhts,bse,hde->btd", a, x, w_out)


@pytest.mark.parametrize("shared", ["false", "true"])
def test_equals_the_untruncated_form(shared):
    ranks = "ranks=[3, 7, 8], value_ranks=[2, 5, 8]"
    layer, x = make(f"tucker({ranks}, shared={shared}) + rope(none)"), batch()
    score, output = factors(layer)
    assert (score.ranks, output.ranks) == ((3, 7, 8), (2, 5, 8))
    close(layer(x), untruncated(score.full(), output.full(), x, WIDTH**-0.5))


def test_equals_multi_query_attention_over_latents():
    """T_h = C ×₁ U up the queries, S_h = C̃ ×₁ Ũ down the outputs, with RoPE on the latent key."""
    layer, x = make(f"tucker({RANKS})"), batch()
    p = layer.project
    t, s = torch.einsum("ha,ajk->hjk", p.q_heads, p.q_core), torch.einsum("ha,ajk->hjk", p.o_heads, p.o_core)
    q, k, v = p.q_proj(x)[:, None] @ t, p.k_proj(x)[:, None], p.v_proj(x)[:, None]
    z = weights(rope(q), rope(k), WIDTH**-0.5) @ v
    close(layer(x), p.o_proj((z @ s.transpose(1, 2)).sum(1)))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_are_special_ranks(kv_heads):
    gqa, x = make(f"gqa(kv_heads={kv_heads}) + rope(none)"), batch()
    p = gqa.project
    score, output = from_heads(*(w.weight for w in (p.q_proj, p.k_proj, p.v_proj, p.o_proj)), HEADS)
    assert score.ranks == output.ranks == (HEADS, DIM, kv_heads * WIDTH)
    close(loaded(score, output)(x), gqa(x))


@pytest.mark.parametrize("q_rank", [0, 7])
@pytest.mark.parametrize("shared", [True, False])
def test_latent_attention_is_special_ranks(q_rank, shared):
    mla, x = make(f"mla(rank=10, rope_dim=0, nope_dim=6, v_dim=5, norm=false, q_rank={q_rank})"), batch()
    p = mla.project
    k_up, v_up = (up.flatten(0, 1) for up in p._up())
    q, q_up = (p.q_a_proj.weight, p.q_b_proj.weight) if q_rank else (p.q_proj.weight, None)
    score, output = from_latent(q, p.kv_a_proj.weight, k_up, v_up, p.o_proj.weight, HEADS, q_up)
    assert (score.ranks, output.ranks) == ((HEADS, q_rank or 24, 10), (HEADS, DIM, 10))
    close(loaded(score, output, shared)(x), mla(x))


def test_matricisation_ranks():
    """Of a grouped layer's W (≤ H, ≤ min(D, H·d), G·d), of latent attention (H, r_q, r)."""

    def ranks(full):
        return [int(torch.linalg.matrix_rank(full.movedim(mode, 0).flatten(1))) for mode in range(3)]

    p = make("gqa(kv_heads=2)").project
    grouped, _ = from_heads(*(w.weight.detach() for w in (p.q_proj, p.k_proj, p.v_proj, p.o_proj)), HEADS)
    assert ranks(grouped.full()) == [HEADS, DIM, 2 * WIDTH]
    p = make("mla(rank=10, rope_dim=0, v_dim=5, norm=false, q_rank=7)").project
    ups = (up.detach().flatten(0, 1) for up in p._up())
    q, down, o = p.q_a_proj.weight.detach(), p.kv_a_proj.weight.detach(), p.o_proj.weight.detach()
    latent, _ = from_latent(q, down, *ups, o, HEADS, p.q_b_proj.weight.detach())
    assert ranks(latent.full()) == [HEADS, 7, 10]


@pytest.mark.parametrize("mode", ["heads", "left", "right"])
def test_gauge(mode):
    """U → U G with the core ×_n G⁻¹ changes nothing, except on the key mode where rotation sees it."""
    layer, x = make(f"tucker({RANKS})"), batch()
    turned = []
    for form in factors(layer):
        axis = ["heads", "left", "right"].index(mode)
        g = torch.eye(form.ranks[axis]).double() * 2 + 0.3 * torch.randn(form.ranks[axis], form.ranks[axis]).double()
        core = torch.tensordot(torch.linalg.inv(g), form.core, ([1], [axis])).movedim(0, axis)
        turned.append(form._replace(core=core, **{mode: getattr(form, mode) @ g}))
    other = twin(layer, str(layer.spec))
    other.project.load_state_dict(state_of(*turned))
    close(other(x), layer(x), 1e-9) if mode != "right" else differ(other(x), layer(x))
    still = twin(layer, f"tucker({RANKS}) + rope(none)")
    close(twin(other, str(still.spec))(x), still(x), 1e-9)


def test_hosvd_is_lossless_at_full_rank_and_bounded_below_it():
    p, x = make("gqa + rope(none)").project, batch()
    exact = [each.full() for each in from_heads(*(w.weight for w in (p.q_proj, p.k_proj, p.v_proj, p.o_proj)), HEADS)]
    full = [hosvd(each.detach(), (HEADS, DIM, DIM)) for each in exact]
    close(loaded(*full)(x), untruncated(*exact, x, WIDTH**-0.5), 1e-9)
    spectra = [torch.linalg.svdvals(exact[0].movedim(mode, 0).flatten(1)) for mode in range(3)]
    last = torch.inf
    for ranks in ((2, 6, 6), (2, 12, 6), (3, 12, 12), (4, 18, 12), (4, 24, 24)):
        error = (hosvd(exact[0], ranks).full() - exact[0]).norm()
        lost = sum(s[rank:].square().sum() for s, rank in zip(spectra, ranks, strict=True))
        assert error <= lost.sqrt() + 1e-9 and error < last
        last = error


@pytest.mark.parametrize("shared", ["false", "true"])
def test_only_distances_matter_to_the_latent_rotation(shared):
    layer, x, positions = make(f"tucker(ranks=[3, 7, 8], shared={shared})"), batch(), torch.arange(TOKENS)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


def test_a_latent_of_two_channels_turns_by_one_radian_a_token():
    layer, x = make("tucker(ranks=[4, 5, 2])"), batch(2)
    p = layer.project
    q = torch.einsum("ha,ajk,btj->bhtk", p.q_heads, p.q_core, p.q_proj(x))[:, :, 1]
    (a, b), (c, d) = q.unbind(-1), p.k_proj(x)[:, :1].unbind(-1)
    cos, sin = torch.tensor(1.0).double().cos(), torch.tensor(1.0).double().sin()
    score = (a * cos - b * sin) * c + (b * cos + a * sin) * d
    own = (q * p.k_proj(x)[:, 1:]).sum(-1)
    share = torch.stack([score, own], -1).mul(WIDTH**-0.5).softmax(-1)
    close(layer(x)[:, 1:], p.output(share[:, :, None] @ p.v_proj(x)[:, None], None), 1e-7)


@pytest.mark.parametrize(("shared", "stored"), [("false", 16), ("true", 8)])
def test_decode_and_cache_bytes(shared, stored):
    layer, cache, x = make(f"tucker(ranks=[3, 7, 8], shared={shared})"), Cache(), batch()
    close(decoded(layer, x, 1, cache), layer(x))
    assert cache.bytes() == len(x) * TOKENS * stored * 8


def test_first_scores_have_the_variance_of_multi_head_attention():
    torch.manual_seed(0)
    for ranks in ("[12, 96, 48]", "[8, 96, 96]"):
        layer = Attention(f"tucker(ranks={ranks})", 192, 12)
        for weight in (getattr(layer.project, f"{name}_proj").weight for name in "qkvo"):
            torch.nn.init.normal_(weight, std=0.02)
        for form in factors(layer):
            assert abs(form.full().std() / (16**0.5 * 0.02**2) - 1) < 0.1


@pytest.mark.parametrize(
    ("ranks", "megabytes"), [("[8, 128, 128]", 15.74), ("[8, 128, 64]", 10.24), ("[8, 64, 64]", 6.31)]
)
def test_the_authors_sizes(ranks, megabytes):
    """GPT-2 shape: attention weights in bfloat16, 12 layers, and the cache of 1024 tokens."""
    spec = Spec.parse(f"tucker(ranks={ranks})")
    cost = spec.cost(768, 12)
    r1, r2, r3 = spec.parts[0].ranks
    assert cost.parameters == 2 * (r1 * r2 * r3 + 12 * r1 + 768 * (r2 + r3)) and cost.cache_floats == 2 * r3
    assert abs(cost.parameters * 12 * 2 / 1e6 - megabytes) < 0.05
    assert abs(cost.cache_bytes(1024, 2) * 12 / 1e6 - {128: 6.28, 64: 3.14}[r3]) < 0.03
    shared = Spec.parse(f"tucker(ranks={ranks}, shared=true)").cost(768, 12)
    assert shared.cache_floats == r3 and cost.parameters - shared.parameters == 768 * r3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ranks=[5, 6, 6]", "at most the 4 heads"),
        ("ranks=[4, 6]", "three positive numbers"),
        ("value_ranks=[4, 0, 6]", "value_ranks"),
        ("ranks=[4, 6, 6], value_ranks=[4, 6, 8], shared=true", "one width, not 6 as key and 8 as value"),
        ("ranks=[4, 6, 7]", "7 channels of a head cannot turn in pairs"),
    ],
)
def test_refusals(options, why):
    with pytest.raises(OptionError, match=why):
        Attention(f"tucker({options})", DIM, HEADS)
    with pytest.raises(OptionError, match="give ranks"):
        Attention("tucker", 25, 4)


def test_factors_of_two_latents_are_not_shared():
    p = make("gqa + rope(none)").project
    score, output = from_heads(*(w.weight for w in (p.q_proj, p.k_proj, p.v_proj, p.o_proj)), HEADS)
    with pytest.raises(ValueError, match="different latents"):
        state_of(score, output, shared=True)
