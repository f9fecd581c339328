"""Oracles of `mtla`."""

import math

import pytest
import torch
from tests.oracles.reference import HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Attention, Cache, OptionError, Spec, SpecError

R, ROPE, NOPE, V = 12, 4, 6, 5
SIZES = f"rank={R}, rope_dim={ROPE}, nope_dim={NOPE}, v_dim={V}"
TOKENS = 10  # no multiple of 3 or 4


def spec(stride, extra=""):
    return f"mtla(stride={stride}, {SIZES}{extra})"


def gates(layer, x, stride):
    """w `[B, T, 1]` by the paper's formula."""
    p, c = layer.project, normed(layer, x)
    chunk = torch.arange(x.shape[1]) // stride
    rate = 10000.0 ** (-torch.arange(0, R, 2).double() / R)
    place = torch.stack([(chunk[:, None] * rate).sin(), (chunk[:, None] * rate).cos()], -1).flatten(-2)
    return torch.sigmoid((p.gate_chunk(place) * p.gate_latent(c)).sum(-1, keepdim=True))


def normed(layer, x):
    p = layer.project
    return p.kv_a_norm(p.kv_a_proj(x)[..., :R])


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 16])
def test_written_out(stride):
    """The paper's training path: Γ, the stride-aware mask, and MLA with merged latents."""
    layer, x = make(spec(stride)), batch(TOKENS)
    p, at = layer.project, torch.arange(TOKENS)
    same = (at[:, None] // stride == at // stride) & (at[:, None] >= at)
    merged = (gates(layer, x, stride).transpose(1, 2) * same) @ normed(layer, x)
    up = heads_of(p.kv_b_proj(merged), HEADS)
    k_rope = rope(p.kv_a_proj(x)[..., R:][:, None]).expand(-1, HEADS, -1, -1)
    q = heads_of(p.q_proj(x), HEADS)
    q, k = torch.cat([q[..., :NOPE], rope(q[..., NOPE:])], -1), torch.cat([up[..., :NOPE], k_rope], -1)
    mask = (at[:, None] == at) | ((at[:, None] >= at) & ((at + 1) % stride == 0))
    close(layer(x), join(weights(q, k, 10**-0.5, mask) @ up[..., NOPE:], p.o_proj))


@pytest.mark.parametrize("q_rank", [0, 7])
@pytest.mark.parametrize("stride", [1, 2, 3, 4, 16])
def test_training_path_equals_decoding(stride, q_rank):
    layer, x = make(spec(stride, f", q_rank={q_rank}")), batch(TOKENS)
    for block in (1, 4, 7):
        close(decoded(layer, x, block), layer(x))


def as_mla(layer):
    """The MLA of the same weights, with the layer norm that MTLA has."""
    mla = twin(layer, f"mla({SIZES})", project__kv_a_norm__weight=layer.project.kv_a_norm.weight.detach())
    mla.project.kv_a_norm = layer.project.kv_a_norm
    return mla


def test_stride_one_with_open_gates_is_mla():
    layer, x = make(spec(1)), batch(TOKENS)
    for gate in (layer.project.gate_chunk, layer.project.gate_latent):
        gate.weight.data.zero_()
        gate.bias.data.fill_(10.0)  # 3 · 100: a sigmoid of one
    close(layer(x), as_mla(layer)(x))


def test_stride_one_with_gates_scales_the_latents():
    layer, x = make(spec(1)), batch(TOKENS)
    mla = as_mla(layer)
    latent = mla.project.latent
    mla.project.latent = lambda flow: (latent(flow)[0] * gates(layer, flow.x, 1), latent(flow)[1])
    close(mla(x), layer(x))


def test_no_later_token_reaches_a_query():
    layer = make(spec(3))
    for t in range(TOKENS):
        x = batch(TOKENS).requires_grad_()
        (gradient,) = torch.autograd.grad(layer(x)[:, t].sum(), x)
        assert (gradient[:, t + 1 :] == 0).all() and (gradient[:, t] != 0).any()


@pytest.mark.parametrize("stride", [2, 3, 4])
def test_cache_length(stride):
    layer, cache = make(spec(stride)), Cache()
    for n, token in enumerate(batch(TOKENS, size=1).split(1, 1), 1):
        layer(token, cache=cache)
        assert cache.bytes() == math.ceil(n / stride) * (R + ROPE) * 8


def test_one_slot_leaves_queries_no_choice():
    layer, x = make(spec(TOKENS)), batch(TOKENS)
    merged = (gates(layer, x, TOKENS) * normed(layer, x)).cumsum(1)
    v = heads_of(layer.project.kv_b_proj(merged), HEADS)[..., NOPE:]
    close(layer(x), join(v, layer.project.o_proj))
    other = twin(layer, spec(TOKENS), project__q_proj__weight=torch.randn_like(layer.project.q_proj.weight))
    close(other(x), layer(x))


def test_gates_lie_between_zero_and_one_and_closed_maps_give_half_sums():
    layer, x = make(spec(4)), batch(8)
    assert ((gates(layer, x, 4) > 0) & (gates(layer, x, 4) < 1)).all()
    for gate in (layer.project.gate_chunk, layer.project.gate_latent):
        gate.weight.data.zero_(), gate.bias.data.zero_()
    cache, constant = Cache(), x[:, :1].expand(-1, 8, -1)
    decoded(layer, constant, 1, cache)
    slots = cache.site(0).slots["latent"]["rows"][:, 0, :, :R]
    close(slots, (4 / 2) * normed(layer, x[:, :1]).expand(-1, 2, -1))


@pytest.mark.parametrize("stride", [1, 3])
def test_expanded_equals_absorbed(stride):
    expanded, x = make(spec(stride, ", view=expanded")), batch(TOKENS)
    absorbed = twin(expanded, spec(stride, ", view=absorbed"))
    close(absorbed(x), expanded(x))
    close(decoded(absorbed, x, 4), decoded(expanded, x, 3))


def test_keys_of_slots_can_be_normed_where_they_are_formed():
    """Expanded, merged keys exist: what is not linear acts on them as they are read."""
    layer, x = make(spec(3, ", view=expanded") + " + qk-norm"), batch(TOKENS)
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))
    with pytest.raises(SpecError, match=r"'qk-norm' needs 'head keys'.*mtla\(view=expanded\)"):
        Attention("mtla + qk-norm", 24, HEADS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mtla(stride=0)", "stride=0 tokens a slot; at least 1"),
        ("mtla(rank=3)", "rank=3 leaves the gate's maps no width; at least 4"),
        ("mtla(rope_dim=3)", "rope_dim=3 does not pair up"),
    ],
)
def test_numbers_that_do_not_fit(line, said):
    with pytest.raises(OptionError, match=f"mtla: {said}"):
        Attention(line, 24, HEADS)


@pytest.mark.parametrize("stride", [1, 3])
def test_slots_outlive_a_window_and_rows_do_not(stride):
    """A slot is kept for all; with one token a slot the cache drops what no later query sees."""
    layer, x, cache = make(spec(stride) + " + window(3)"), batch(12, size=1), Cache()
    close(decoded(layer, x, 1, cache), layer(x))
    assert cache.bytes() == layer.spec.cost(24, HEADS).cache_bytes(12, 8)
    assert cache.bytes() == (R + ROPE) * 8 * (2 if stride == 1 else 12 // stride)


def test_slots_cost_attention_by_the_stride():
    """Amortised: (r + d_r)/s numbers a token and 1/s of MLA's scores; the gate's two maps r → r/4 have biases."""
    mla = Spec.parse(f"mla({SIZES})").cost(24, HEADS)
    for stride in (1, 2, 4):
        cost = Spec.parse(spec(stride)).cost(24, HEADS)
        assert cost.cache_floats * stride == R + ROPE and cost.pair_flops * stride == mla.pair_flops
        assert cost.parameters == mla.parameters + R + 2 * (R * (R // 4) + R // 4)


def test_padding_shifts_no_chunk():
    """Chunks follow each sequence's own positions, one step counter for the batch would not do."""
    layer, x = make(spec(3)), batch(TOKENS)
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [2]])
    close(layer(x, mask=valid)[1, 2:], layer(x[1:, 2:])[0])


def test_a_cache_of_slots_does_not_go_back():
    layer, cache = make(spec(3)), Cache()
    decoded(layer, batch(4), 1, cache)
    with pytest.raises(ValueError, match="merges tokens into slots in place"):
        cache.rollback(1)


def test_the_authors_sizes():
    layer = Attention("mtla", 512, 8)
    cost = layer.spec.cost(512, 8)
    assert cost.cache_floats == 144  # (256 + 32) / 2
    mla = layer.spec.parse("mla").cost(512, 8).parameters
    assert cost.parameters == mla + 256 + 2 * (256 * 64 + 64)  # the layer norm's bias and the gate
    differ(make("mtla(stride=2)", 32)(batch(dim=32)), make("mtla(stride=3)", 32)(batch(dim=32)))


@pytest.mark.parametrize("offset", [1, 3, 300])
def test_positions_may_start_anywhere(offset):
    """Slots follow positions, wherever a sequence's positions begin."""
    torch.manual_seed(0)
    layer = Attention("mtla(stride=3, rank=8, rope_dim=4)", 24, 4).double()
    x, positions = torch.randn(2, 11, 24, dtype=torch.float64), torch.arange(offset, offset + 11)[None]
    full, cache = layer(x, positions=positions), Cache()
    parts = [
        layer(x[:, a : a + n], positions=positions[:, a : a + n], cache=cache) for a, n in ((0, 4), (4, 1), (5, 6))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), full)
