"""Oracles of `gta-gla`: grouped-tied attention."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Attention, Cache, OptionError, Spec

WIDTH, ROPE, G = 8, 4, 2
SPEC = f"gta(kv_heads={G}, head_dim={WIDTH})"


def test_written_out():
    layer, x = make(SPEC), batch()
    p = layer.project
    q, s, k_rope = heads_of(p.q_proj(x), HEADS), heads_of(p.kv_proj(x), G), p.rotary_proj(x)[:, None]
    q = torch.cat([q[..., :ROPE], rope(q[..., ROPE:])], -1)
    k = torch.cat([s[..., :ROPE], rope(k_rope).expand(-1, G, -1, -1)], -1)
    k, v = k.repeat_interleave(HEADS // G, 1), s.repeat_interleave(HEADS // G, 1)
    close(layer(x), join(weights(q, k, WIDTH**-0.5) @ v, p.o_proj))


def as_gqa(layer, kv, width, rope_dim, extra=""):
    """W_K^g = [W_KV^g[: d_n] ; W_KR] and W_V^g = W_KV^g; rotary channels first, since partial RoPE turns those."""
    p, tied = layer.project, width - rope_dim
    state = p.kv_proj.weight.detach().unflatten(0, (kv, width))
    turned = [] if p.rotary_proj is None else [p.rotary_proj.weight.detach().expand(kv, -1, -1)]
    k = torch.cat([*turned, state[:, :tied]], 1)
    q = p.q_proj.weight.detach().unflatten(0, (-1, width)).roll(rope_dim, 1)
    return twin(
        layer, f"gqa(kv_heads={kv}, head_dim={width}) + {extra or f'rope(fraction={rope_dim / width})'}",
        project__q_proj__weight=q.flatten(0, 1), project__k_proj__weight=k.flatten(0, 1),
        project__v_proj__weight=state.flatten(0, 1),
    )  # fmt: skip


@pytest.mark.parametrize(("kv", "rope_dim"), [(1, 4), (2, 4), (4, 2), (2, 8)])
def test_equals_gqa_with_partial_rope(kv, rope_dim):
    layer, x = make(f"gta(kv_heads={kv}, head_dim={WIDTH}, rope_dim={rope_dim})"), batch()
    close(layer(x), as_gqa(layer, kv, WIDTH, rope_dim)(x))


def test_without_rotary_width_the_key_is_the_value():
    layer, x = make(f"gta(kv_heads={G}, head_dim={WIDTH}, rope_dim=0)"), batch()
    close(layer(x), as_gqa(layer, G, WIDTH, 0, "rope(none)")(x))
    mixed = torch.cat([x[:, torch.randperm(8)], x[:, -1:]], 1)
    close(layer(mixed)[:, -1], layer(x)[:, -1])
    differ(make(SPEC)(mixed)[:, -1], make(SPEC)(x)[:, -1])


def test_one_rotary_key_serves_all_groups():
    layer = make(SPEC)
    assert layer.project.rotary_proj.weight.shape == (ROPE, DIM)
    assert layer.project.entries["rotary"].heads == 1


def test_only_distances_matter():
    layer, x, positions = make(SPEC), batch(), torch.arange(9)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


@pytest.mark.parametrize("bias", ["none", "qkv", "qkvo", "o"])
@pytest.mark.parametrize("rope_dim", [0, ROPE])
def test_decode_cost_and_cache_bytes(bias, rope_dim):
    layer, x, cache = make(f"gta(kv_heads={G}, head_dim={WIDTH}, rope_dim={rope_dim}, bias={bias})"), batch(), Cache()
    for block in (1, 4):
        close(decoded(layer, x, block, cache if block == 1 else None), layer(x))
    assert cache.bytes() == x.shape[0] * x.shape[1] * (G * WIDTH + rope_dim) * 8
    cost = layer.spec.cost(DIM, HEADS)
    biases = {"none": 0, "qkv": 1, "qkvo": 1, "o": 0}[bias] * (HEADS * WIDTH + G * WIDTH + rope_dim)
    biases += DIM if bias in ("o", "qkvo") else 0
    assert cost.parameters == 2 * DIM * HEADS * WIDTH + DIM * G * WIDTH + DIM * rope_dim + biases


def test_what_is_tied_stays_tied_in_the_cache():
    """Maps of keys and of values act on the state as it is read; the cached state is the one without them."""
    layer, x, cache, plain = make(SPEC + " + kha"), batch(), Cache(), Cache()
    close(decoded(layer, x, 2, cache), layer(x))
    decoded(twin(layer, SPEC), x, 2, plain)
    for name in ("state", "rotary"):
        close(*(each.site(0).growing[name].rows() for each in (cache, plain)))
    p, maps = layer.project, layer.transforms[0]
    q, s, k_rope = heads_of(p.q_proj(x), HEADS), heads_of(p.kv_proj(x), G), p.rotary_proj(x)[:, None]
    q = torch.cat([q[..., :ROPE] @ maps.q, rope(q[..., ROPE:])], -1)
    k = torch.cat([s[..., :ROPE] @ maps.k, rope(k_rope).expand(-1, G, -1, -1)], -1)
    k, v = k.repeat_interleave(HEADS // G, 1), (s @ maps.v).repeat_interleave(HEADS // G, 1)
    close(layer(x), join(weights(q, k, WIDTH**-0.5) @ v, p.o_proj))


def test_the_authors_sizes():
    """D 3072, 24 heads of 128 in groups of four: 6·128 + 64 cached numbers a token, GQA's are 2·6·128."""
    cost = Spec.parse("gta").cost(3072, 24)
    assert cost.cache_floats == 6 * 128 + 64
    assert cost.parameters == 2 * 3072 * 3072 + 3072 * 6 * 128 + 3072 * 64
    gqa = Spec.parse("gqa(kv_heads=6)").cost(3072, 24)
    assert gqa.cache_floats == 2 * 6 * 128 and gqa.pair_flops == cost.pair_flops


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gta(rope_dim=3)", "rope_dim=3 of head_dim=6; even numbers from 0 to 6 fit"),
        ("gta(rope_dim=8)", "rope_dim=8 of head_dim=6"),
        ("gta(kv_heads=0)", "kv_heads=0"),
        ("gta(kv_heads=3)", r"cannot share kv_heads=3; kv_heads may be \[1, 2, 4\]"),
        ("gta(head_dim=0)", "head_dim=0"),
    ],
)
def test_numbers_that_do_not_fit(line, said):
    with pytest.raises(OptionError, match=f"gta: .*{said}"):
        Attention(line, DIM, HEADS)
