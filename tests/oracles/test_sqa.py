"""Oracles of `sqa`; wall-clock ratios belong to the benchmarks."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Attention, Cache, OptionError, Spec

WIDTH = DIM // HEADS


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_all_query_heads_is_gqa(kv):
    layer, x = make(f"sqa(q_heads={HEADS}, kv_heads={kv})"), batch()
    assert torch.equal(twin(layer, f"gqa(kv_heads={kv})")(x), layer(x))


def test_symmetric_is_mha_of_fewer_heads():
    """H_q heads of the usual width d, and a rectangular W_O."""
    layer, x = make("sqa(ssqa)"), batch()
    assert layer.project.o_proj.weight.shape == (DIM, 2 * WIDTH)
    mha = make(f"gqa(head_dim={WIDTH})", heads=2)
    mha.load_state_dict(layer.state_dict())
    close(layer(x), mha(x))


def test_equals_gqa_whose_other_heads_do_not_speak():
    """Zero rows of W_O: the queries of those heads are irrelevant."""
    layer, x = make("sqa(q_heads=2, kv_heads=1)"), batch()
    o = torch.cat([layer.project.o_proj.weight.detach(), torch.zeros(DIM, 2 * WIDTH).double()], 1)
    for _ in range(2):
        q = torch.cat([layer.project.q_proj.weight.detach(), torch.randn(2 * WIDTH, DIM).double()])
        gqa = twin(layer, "gqa(kv_heads=1)", project__q_proj__weight=q, project__o_proj__weight=o)
        close(gqa(x), layer(x))


@pytest.mark.parametrize("queries", [1, 2])
def test_reverse_is_mha_with_tiled_queries(queries):
    """Score head i asks query head i mod H_q; the interleaved repetition of key heads would be another function."""
    layer, x = make(f"sqa(rsqa, q_heads={queries}, kv_heads=4)"), batch()
    q = layer.project.q_proj.weight.detach()
    close(layer(x), twin(layer, "gqa", project__q_proj__weight=q.repeat(HEADS // queries, 1))(x))
    if queries > 1:
        interleaved = q.unflatten(0, (queries, -1)).repeat_interleave(2, 0).flatten(0, 1)
        differ(layer(x), twin(layer, "gqa", project__q_proj__weight=interleaved)(x))


def test_reverse_written_out():
    layer, x = make("sqa(rsqa, q_heads=2, kv_heads=4)"), batch()
    p = layer.project
    q, k, v = heads_of(p.q_proj(x), 2).repeat(1, 2, 1, 1), heads_of(p.k_proj(x), 4), heads_of(p.v_proj(x), 4)
    close(layer(x), join(weights(rope(q), rope(k), WIDTH**-0.5) @ v, p.o_proj))


def test_permuting_groups_with_the_rows_of_the_output():
    layer, x = make("sqa(q_heads=6, kv_heads=3)", heads=8, dim=32), batch(dim=32)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    groups = torch.tensor([2, 0, 1])
    for name, heads in (("q", 6), ("k", 3), ("v", 3)):
        rows = state[f"project.{name}_proj.weight"].unflatten(0, (3, heads // 3, -1))
        state[f"project.{name}_proj.weight"] = rows[groups].flatten(0, 2)
    state["project.o_proj.weight"] = state["project.o_proj.weight"].unflatten(1, (3, -1))[:, groups].flatten(1)
    other = make("sqa(q_heads=6, kv_heads=3)", heads=8, dim=32)
    other.load_state_dict(state)
    close(other(x), layer(x))
    state["project.o_proj.weight"] = layer.project.o_proj.weight.detach()
    other.load_state_dict(state)
    differ(other(x), layer(x))


def test_outputs_lie_in_a_space_of_the_query_heads():
    y = make("sqa(xsqa)")(batch(40, size=3)).flatten(0, 1)
    assert torch.linalg.matrix_rank(y) == WIDTH  # one query head of four
    assert torch.linalg.matrix_rank(make("gqa(kv_heads=1)")(batch(40, size=3)).flatten(0, 1)) == DIM


KINDS = {"sqa": (8, 4), "ssqa": (8, 8), "xsqa": (4, 4), "xsmqa": (4, 1), "lsqa": (12, 4), "rsqa": (4, 8)}


@pytest.mark.parametrize(("kind", "counts"), KINDS.items())
def test_cost_of_the_family(kind, counts):
    """Of H = 16 heads at D = 256, as the author trained: 2·D·d·(H_q + H_kv) weights, score FLOPs H_q/H of MHA's."""
    q, kv = counts
    spec = Spec.parse(f"sqa({kind})")
    layer, cost, mha = Attention(spec, 256, 16), spec.cost(256, 16), Spec.parse("gqa").cost(256, 16)
    out = max(q, kv)
    assert (layer.layout.q, layer.layout.kv) == (out, kv)
    assert cost.parameters == 256 * 16 * (q + 2 * kv + out) == sum(p.numel() for p in layer.parameters())
    if q >= kv:
        assert cost.parameters == 2 * 256 * 16 * (q + kv)
    assert cost.cache_floats == 2 * kv * 16
    assert cost.pair_flops * 16 == mha.pair_flops * out


@pytest.mark.parametrize("kind", KINDS)
def test_decode_and_cache_bytes(kind):
    layer, x, cache = make(f"sqa({kind})", dim=32, heads=8), batch(dim=32), Cache()
    close(decoded(layer, x, 2, cache), layer(x))
    assert cache.bytes() == x.shape[0] * x.shape[1] * 2 * layer.layout.kv * 4 * 8


def test_alibi_has_a_slope_for_each_head_there_is():
    layer, x = make("sqa(ssqa) + alibi"), batch()
    mha = make(f"gqa(head_dim={WIDTH}) + alibi", heads=2)
    mha.load_state_dict(layer.state_dict())
    close(layer(x), mha(x))


@pytest.mark.parametrize(
    ("spec", "heads", "said"),
    [
        ("sqa", 6, "6 heads make 3 query and 3/2 key heads; give q_heads and kv_heads, or a number of heads such as 4"),
        ("sqa(q_heads=3, kv_heads=2)", 4, r"q_heads may be \[1, 2, 4\] or kv_heads may be \[1, 3\]"),
        ("sqa(q_heads=5, kv_heads=1)", 4, "q_heads=5 of 4 heads; it may be 1 to 4"),
        ("sqa(q_heads=0, kv_heads=1)", 4, "q_heads=0"),
        ("sqa(q_heads=2, kv_heads=1)", 5, "dim=24 is no multiple of heads=5; give head_dim"),
        ("sqa(head_dim=0)", 4, "head_dim=0; at least 1"),
    ],
)
def test_numbers_that_do_not_fit(spec, heads, said):
    with pytest.raises(OptionError, match=f"sqa.*{said}"):
        Attention(spec, DIM, heads)
