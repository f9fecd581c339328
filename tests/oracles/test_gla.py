"""Oracles of `gta-gla`: grouped latent attention."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin

from manyheads import Attention, Cache, OptionError, Spec, SpecError

R, ROPE, NOPE, V, Q = 12, 4, 6, 5, 7
SIZES = f"rank={R}, rope_dim={ROPE}, nope_dim={NOPE}, v_dim={V}"


def spec(latents=2, extra="", q_rank=Q):
    return f"gla(latents={latents}, {SIZES}, q_rank={q_rank}{extra})"


@pytest.mark.parametrize("q_rank", [0, Q])
@pytest.mark.parametrize("extra", ["", ", latent_scale=sqrt", ", norm=false"])
def test_one_latent_is_mla(q_rank, extra):
    layer, x = make(spec(1, extra, q_rank)), batch()
    close(layer(x), twin(layer, f"mla({SIZES}, q_rank={q_rank}{extra})")(x))


@pytest.mark.parametrize("latents", [2, 4])
def test_equals_mla_with_a_block_sparse_up_projection(latents):
    """The block of heads i reads latent block i; without norms, which see the whole latent in MLA."""
    layer, x = make(spec(latents, ", norm=false")), batch()
    up = layer.project.kv_b_proj.weight.detach().unflatten(0, (latents, -1))
    sparse = torch.block_diag(*up)
    assert sparse.shape == (HEADS * (NOPE + V), R)
    close(layer(x), twin(layer, f"mla({SIZES}, q_rank={Q}, norm=false)", project__kv_b_proj__weight=sparse)(x))


@pytest.mark.parametrize("latents", [2, 4])
def test_the_outputs_of_devices_that_hold_one_latent_each(latents):
    """A device: MLA of its own heads and latent with norm and scale of its own; concatenated, the whole layer."""
    layer, x = make(spec(latents, ", latent_scale=sqrt")), batch()
    p, width, each, total = layer.project, R // latents, HEADS // latents, 0
    line = f"mla({SIZES}, q_rank={Q}, latent_scale=sqrt)".replace(f"rank={R}", f"rank={width}", 1)
    for rank in range(latents):
        mine = slice(rank * width, (rank + 1) * width)
        rows = p.kv_a_proj.weight.detach()
        device = make(line, heads=each)
        device.load_state_dict({
            "project.q_a_proj.weight": p.q_a_proj.weight, "project.q_a_norm.weight": p.q_a_norm.weight,
            "project.q_b_proj.weight": p.q_b_proj.weight.chunk(latents)[rank],
            "project.kv_a_proj.weight": torch.cat([rows[mine], rows[R:]]),
            "project.kv_a_norm.weight": p.kv_a_norm.weight[mine],
            "project.kv_b_proj.weight": p.kv_b_proj.weight.chunk(latents)[rank],
            "project.o_proj.weight": p.o_proj.weight.chunk(latents, 1)[rank],
        })  # fmt: skip
        assert device.spec.cost(DIM, each).cache_floats == width + ROPE
        total = total + device(x)
    close(layer(x), total)


def test_latents_are_normed_each_by_itself():
    """A latent made larger changes nothing, but for eps; MLA's one norm would let it drown the other."""
    layer, x = make(spec()), batch()
    weight = layer.project.kv_a_proj.weight.detach().clone()
    weight[: R // 2] *= 3
    close(twin(layer, spec(), project__kv_a_proj__weight=weight)(x), layer(x), 1e-4)
    one = twin(layer, spec(1), project__kv_b_proj__weight=torch.randn(HEADS * (NOPE + V), R).double())
    differ(twin(one, spec(1), project__kv_a_proj__weight=weight)(x), one(x))


@pytest.mark.parametrize("q_rank", [0, Q])
@pytest.mark.parametrize("latents", [2, 4])
def test_expanded_equals_absorbed_and_decode_equals_both(latents, q_rank):
    expanded, x = make(spec(latents, ", view=expanded", q_rank)), batch()
    absorbed = twin(expanded, spec(latents, ", view=absorbed", q_rank))
    mask = torch.rand(2, 1, x.shape[1], x.shape[1]) < 0.6
    close(absorbed(x), expanded(x))
    close(absorbed(x, mask=mask), expanded(x, mask=mask))
    auto = twin(expanded, spec(latents, "", q_rank))
    for block in (1, 4):
        close(decoded(auto, x, block), expanded(x))


def test_absorbed_is_grouped_attention_over_the_latents():
    layer = Attention(spec(2, ", view=absorbed"), DIM, HEADS)
    seen = {}
    keys = layer.project.keys
    layer.project.keys = lambda q, flow: seen.setdefault("keys", keys(q, flow))
    layer(batch().float())
    q, k, v, _ = seen["keys"]
    assert [t.shape[1] for t in (q, k, v)] == [HEADS, 2, 2] and v.shape[-1] == R // 2
    assert "2 query rows a key head" in str(layer.explain(1))


def test_only_distances_matter():
    layer, x, positions = make(spec()), batch(), torch.arange(9)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


def test_cost_and_cache_bytes():
    layer, x, cache = make(spec()), batch(), Cache()
    cost = layer.spec.cost(DIM, HEADS)
    assert cost.parameters == (
        DIM * Q + Q + Q * HEADS * (NOPE + ROPE) + DIM * (R + ROPE) + R + R * HEADS * (NOPE + V) // 2 + HEADS * V * DIM
    )
    assert cost.pair_flops == 2 * HEADS * (2 * R // 2 + ROPE)
    decoded(layer, x, 4, cache)
    assert cache.bytes() == x.shape[0] * x.shape[1] * (R + ROPE) * 8


def test_the_authors_sizes():
    """d = 128: latents of 2d each, 4d + 64 cached numbers a token, queries through 8d."""
    cost = Spec.parse("gla").cost(2048, 16)
    assert cost.cache_floats == 4 * 128 + 64
    given = "gla(latents=2, rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1024)"
    assert cost == Spec.parse(given).cost(2048, 16)
    mla = Spec.parse("mla(q_rank=1024)").cost(2048, 16)
    assert mla.parameters - cost.parameters == 512 * 16 * 256 // 2 and mla.cache_floats == cost.cache_floats


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("gla(latents=3)", r"3 blocks, 1 for each of 4 heads; blocks / branches must divide the heads"),
        ("gla(rank=7)", r"rank=7 does not cut into 2 blocks; it does into \[1, 7\]"),
        ("gla(latents=0)", "does not cut into 0 blocks"),
    ],
)
def test_numbers_that_do_not_fit(line, said):
    with pytest.raises(OptionError, match=f"gla: .*{said}"):
        Attention(line, DIM, HEADS)


def test_head_keys_are_in_the_expanded_view():
    with pytest.raises(SpecError, match=r"'qk-norm' needs 'head keys'.*gla\(view=expanded\)"):
        Attention("gla + qk-norm", DIM, HEADS)
    Attention("gla(view=expanded) + qk-norm + talking_heads", DIM, HEADS)
