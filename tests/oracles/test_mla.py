"""Oracles of `mla`; the spectra of the study (Marchenko-Pastur) belong to `inspect`."""

import math

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, decoded, differ, heads_of, join, make, rope, twin
from tests.oracles.reference import weights as softmax

from manyheads import Attention, Cache, Spec
from manyheads.core.position import yarn_magnitude

SIZES = "rank=10, rope_dim=4, nope_dim=6, v_dim=5"
WIDTH = 6


def given_mask():
    return torch.rand(2, 1, TOKENS, TOKENS) < 0.6


@pytest.mark.parametrize("q_rank", [0, 7])
@pytest.mark.parametrize("options", ["", ", latent_scale=sqrt", ", norm=false, bias=true, out_bias=true"])
def test_expanded_equals_absorbed(q_rank, options):
    spec = f"mla({SIZES}, q_rank={q_rank}{options}, view="
    expanded, x = make(spec + "expanded)"), batch()
    absorbed = twin(expanded, spec + "absorbed)")
    for mask in (None, given_mask(), torch.tensor([[False, True], [True, True]]).repeat_interleave(5, 1)[:, 1:]):
        close(absorbed(x, mask=mask), expanded(x, mask=mask))


@pytest.mark.parametrize("q_rank", [0, 7])
def test_written_out(q_rank):
    """The expanded path of the paper, step by step, with a gain on the latent and the default scale."""
    layer, x = make(f"mla({SIZES}, q_rank={q_rank})"), batch()
    p = layer.project

    def rms(c, gain):
        return c / (c.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    q = p.q_b_proj(rms(p.q_a_proj(x), p.q_a_norm.weight)) if q_rank else p.q_proj(x)
    q = heads_of(q, HEADS)
    c, k_rope = p.kv_a_proj(x).split([10, 4], -1)
    up = heads_of(p.kv_b_proj(rms(c, p.kv_a_norm.weight)), HEADS)
    k = torch.cat([up[..., :6], rope(k_rope[:, None]).expand(-1, HEADS, -1, -1)], -1)
    q = torch.cat([q[..., :6], rope(q[..., 6:])], -1)
    close(layer(x), join(softmax(q, k, 10**-0.5) @ up[..., 6:], p.o_proj))


@pytest.mark.parametrize("q_rank", [0, 7])
def test_decode_and_chunked_prefill(q_rank):
    layer, x = make(f"mla({SIZES}, q_rank={q_rank})"), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


def test_only_distances_matter():
    layer, x, positions = make(f"mla({SIZES})"), batch(), torch.arange(TOKENS)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


def test_without_rotary_width_keys_have_no_order():
    layer, x = make("mla(rank=10, rope_dim=0, v_dim=5)"), batch()
    mixed = torch.cat([x[:, torch.randperm(TOKENS - 1)], x[:, -1:]], 1)
    close(layer(mixed)[:, -1], layer(x)[:, -1])
    rotary = make(f"mla({SIZES})")
    differ(rotary(mixed)[:, -1], rotary(x)[:, -1])


def test_without_content_width_all_heads_share_their_keys():
    layer, x = make("mla(rank=10, rope_dim=4, nope_dim=0, v_dim=5)"), batch()
    p = layer.project
    q, k = heads_of(p.q_proj(x), HEADS), p.kv_a_proj(x)[..., None, :, 10:]
    v = heads_of(p.kv_b_proj(p.kv_a_norm(p.kv_a_proj(x)[..., :10])), HEADS)
    close(layer(x), join(softmax(rope(q), rope(k), 4**-0.5) @ v, p.o_proj))


def test_full_rank_identity_is_mha():
    layer, x = make(f"mla(rank={DIM}, rope_dim=0, nope_dim={WIDTH}, v_dim={WIDTH}, norm=false)"), batch()
    layer = twin(layer, str(layer.spec), project__kv_a_proj__weight=torch.eye(DIM).double())
    up = layer.project.kv_b_proj.weight.detach().unflatten(0, (HEADS, 2 * WIDTH))
    mha = twin(
        layer, "gqa + rope(none)",
        project__k_proj__weight=up[:, :WIDTH].flatten(0, 1), project__v_proj__weight=up[:, WIDTH:].flatten(0, 1),
    )  # fmt: skip
    close(layer(x), mha(x))


def test_the_norm_forgets_the_size_of_the_latent_only():
    layer, x = make(f"mla({SIZES})"), batch()
    # eps is 1e-6 of a mean square of about one: equal up to that
    for cut, same in ((slice(0, 10), True), (slice(10, None), False)):
        weight = layer.project.kv_a_proj.weight.detach().clone()
        weight[cut] *= 3
        other = twin(layer, str(layer.spec), project__kv_a_proj__weight=weight)
        close(other(x), layer(x), 1e-4) if same else differ(other(x), layer(x))


@pytest.mark.parametrize("heads", [2, 8])
def test_cache_size_does_not_depend_on_heads(heads):
    layer, cache = make(f"mla({SIZES})", heads=heads), Cache()
    decoded(layer, batch(size=1), 4, cache)
    assert cache.bytes() == TOKENS * (10 + 4) * 8


def test_sqrt_scale_multiplies_the_normed_latents():
    layer, x = make(f"mla({SIZES}, q_rank=7, latent_scale=sqrt)"), batch()
    p = layer.project
    plain = twin(
        layer, f"mla({SIZES}, q_rank=7)",
        project__q_a_norm__weight=p.q_a_norm.weight.detach() * (DIM / 7) ** 0.5,
        project__kv_a_norm__weight=p.kv_a_norm.weight.detach() * (DIM / 10) ** 0.5,
    )  # fmt: skip
    close(layer(x), plain(x))


def test_yarn_scale():
    """DeepSeek's s·m², m = 0.1·mscale·ln f + 1, is `scale`; its rotary part is `rope(scaling=yarn, magnitude=1)`."""
    scale = 192**-0.5 * yarn_magnitude(40.0, 0.707) ** 2
    assert math.isclose(yarn_magnitude(40.0, 0.707), 0.1 * 0.707 * math.log(40) + 1)
    line = f"mla(rank=512, rope_dim=64, nope_dim=128, v_dim=128, scale={scale!r}) + "
    line += "rope(pairing=interleaved, scaling=yarn, factor=40.0, original=4096, magnitude=1.0)"
    spec = Spec.parse(line)
    assert str(spec) == line
    with torch.device("meta"):
        layer = Attention(spec, 2048, 16)
    assert layer.layout.scale == scale and layer.positions[0].options.growth() == 1.0


def test_the_authors_sizes():
    """DeepSeek-V3: 187.1 M parameters a layer and 576 cached numbers a token; absorbing pays below 171 queries."""
    spec = Spec.parse("mla(rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536)")
    cost = spec.cost(7168, 128)
    assert cost.parameters == 187_107_328 and cost.cache_floats == 576
    with torch.device("meta"):
        layer = Attention(spec, 7168, 128)
    assert layer.project.absorb_below == 170 and sum(p.numel() for p in layer.parameters()) == cost.parameters
