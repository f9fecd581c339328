"""Oracles of `mlra`."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Attention, Cache, OptionError, Spec, SpecError

R, ROPE, NOPE, V, Q = 12, 4, 6, 5, 7
SIZES = f"rank={R}, rope_dim={ROPE}, nope_dim={NOPE}, v_dim={V}"


def spec(branches=4, extra="", q_rank=Q):
    return f"mlra(branches={branches}, {SIZES}, q_rank={q_rank}{extra})"


def rms(c, gain, scale=1.0):
    return c / (c.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain * scale


def served(branches, blocks=4):
    """Which block branch a of head h reads, `[branches][H]`: branch A is blocks 0, 1, … joined over the heads."""
    groups = blocks // branches
    return [[a * groups + h // (HEADS // groups) for h in range(HEADS)] for a in range(branches)]


def branch_outputs(layer, x, branches, blocks=4):
    """Outputs of every branch `[branches, B, H, T, v]` by the paper's formula, head by head."""
    p, width = layer.project, R // blocks
    u = rms(p.q_a_proj(x), p.q_a_norm.weight, (DIM / Q) ** 0.5)
    q = heads_of(p.q_b_proj(u), HEADS)
    q = torch.cat([q[..., :NOPE], rope(q[..., NOPE:])], -1)
    c, k_rope = p.kv_a_proj(x).split([R, ROPE], -1)
    gains = p.kv_a_norm.weight.split(width)
    c = [rms(each, gain, (DIM / width) ** 0.5) for each, gain in zip(c.split(width, -1), gains, strict=True)]
    k_rope = rope(k_rope[:, None])[:, 0]
    up = iter(p.kv_b_proj.weight.split(NOPE + V))
    outs = []
    for blocks_of_heads in served(branches, blocks):
        heads = []
        for h, block in enumerate(blocks_of_heads):
            w = next(up)
            k, v = torch.cat([c[block] @ w[:NOPE].T, k_rope], -1), c[block] @ w[NOPE:].T
            heads.append(weights(q[:, h : h + 1], k[:, None], (NOPE + ROPE) ** -0.5) @ v[:, None])
        outs.append(torch.cat(heads, 1))
    return torch.stack(outs)


def test_which_blocks_serve_which_heads():
    assert served(4) == [[0] * 4, [1] * 4, [2] * 4, [3] * 4]
    assert served(2) == [[0, 0, 1, 1], [2, 2, 3, 3]]


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_written_out(branches):
    layer, x = make(spec(branches)), batch()
    o = branch_outputs(layer, x, branches).sum(0) * branches**-0.5
    close(layer(x), join(o, layer.project.o_proj))


@pytest.mark.parametrize("q_rank", [0, Q])
def test_one_block_without_scales_is_mla(q_rank):
    layer, x = make(spec(1, ", blocks=1, latent_scale=none", q_rank)), batch()
    close(layer(x), twin(layer, f"mla({SIZES}, q_rank={q_rank})")(x))
    scaled = twin(layer, spec(1, ", blocks=1", q_rank))
    close(scaled(x), twin(layer, f"mla({SIZES}, q_rank={q_rank}, latent_scale=sqrt)")(x))


@pytest.mark.parametrize("branches", [2, 3])
def test_without_content_keys_all_branches_share_a_softmax(branches):
    """W_UK = 0: MLA with W_UK = 0 over √branches, as no norm couples the blocks."""
    extra = f", blocks={branches}, norm=false"
    layer, x = make(spec(branches, extra)), batch()
    up = layer.project.kv_b_proj.weight.detach().unflatten(0, (branches, HEADS, NOPE + V)).clone()
    up[:, :, :NOPE] = 0
    layer = twin(layer, str(layer.spec), project__kv_b_proj__weight=up.flatten(0, 2))
    whole = up.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # [H·(nope + v), rank]
    mla = twin(layer, f"mla({SIZES}, q_rank={Q}, norm=false)", project__kv_b_proj__weight=whole)
    close(layer(x), mla(x) / branches**0.5)


def test_folded_form_is_grouped_attention_with_tiled_queries():
    """One call: G = 4 key heads [c_b ; k_r] with values c_b, the queries of all branches as 4·H heads, then a sum."""
    layer, x = make(spec(4, ", view=absorbed")), batch()
    flow = {}
    keys = layer.project.keys
    layer.project.keys = lambda q, f: flow.setdefault("keys", keys(q, f))
    y = layer(x)
    q, k, v, _ = flow["keys"]
    assert q.shape[1] == 4 * HEADS and k.shape[1] == v.shape[1] == 4 and v.shape[-1] == R // 4
    k, v = k.repeat_interleave(HEADS, 1), v.repeat_interleave(HEADS, 1)
    o = weights(q, k, (NOPE + ROPE) ** -0.5) @ v @ layer.project._up()[1].transpose(-1, -2)
    close(y, join(o.unflatten(1, (4, HEADS)).sum(1) / 2, layer.project.o_proj))


def test_the_sum_over_devices_that_hold_one_block_each():
    """A rank holds its block and the rotary key: an MLA of rank/4; outputs of W_O add up, over √4."""
    layer, x = make(spec()), batch()
    p, width, total = layer.project, R // 4, 0
    for rank in range(4):
        mine = slice(rank * width, (rank + 1) * width)
        rows = p.kv_a_proj.weight.detach()
        device = twin(
            layer, f"mla({SIZES}, q_rank={Q}, latent_scale=sqrt)".replace(f"rank={R}", f"rank={width}", 1),
            project__kv_a_proj__weight=torch.cat([rows[mine], rows[R:]]),
            project__kv_a_norm__weight=p.kv_a_norm.weight.detach()[mine],
            project__kv_b_proj__weight=p.kv_b_proj.weight.detach().chunk(4)[rank],
        )  # fmt: skip
        assert device.spec.cost(DIM, HEADS).cache_floats == width + ROPE
        total = total + device(x) / 2
    close(layer(x), total)


def test_one_silent_branch_leaves_gla_of_half_the_latent():
    layer, x = make(spec(2)), batch()
    up = layer.project.kv_b_proj.weight.detach().unflatten(0, (2, HEADS, NOPE + V)).clone()
    up[1, :, NOPE:] = 0
    layer = twin(layer, spec(2), project__kv_b_proj__weight=up.flatten(0, 2))
    p, half = layer.project, R // 2
    rows = p.kv_a_proj.weight.detach()
    gla = twin(
        layer, f"gla({SIZES}, q_rank={Q}, latent_scale=sqrt)".replace(f"rank={R}", f"rank={half}", 1),
        project__kv_a_proj__weight=torch.cat([rows[:half], rows[R:]]),
        project__kv_a_norm__weight=p.kv_a_norm.weight.detach()[:half],
        project__kv_b_proj__weight=up[0].flatten(0, 1),
    )  # fmt: skip
    close(layer(x), gla(x) / 2**0.5)


@pytest.mark.parametrize("branches", [2, 4])
def test_expanded_equals_absorbed_and_decode_equals_both(branches):
    expanded, x = make(spec(branches, ", view=expanded")), batch()
    absorbed = twin(expanded, spec(branches, ", view=absorbed"))
    mask = torch.rand(2, 1, x.shape[1], x.shape[1]) < 0.6
    close(absorbed(x), expanded(x))
    close(absorbed(x, mask=mask), expanded(x, mask=mask))
    auto = twin(expanded, spec(branches))
    for block in (1, 4):
        close(decoded(auto, x, block), expanded(x))


def test_the_sum_stands_outside_the_softmax():
    """Another function than MLA with the same weights."""
    layer, x = make(spec(4, ", norm=false, latent_scale=none")), batch()
    up = layer.project.kv_b_proj.weight.detach().unflatten(0, (4, HEADS * (NOPE + V))).transpose(0, 1).flatten(1)
    mla = twin(layer, f"mla({SIZES}, q_rank={Q}, norm=false)", project__kv_b_proj__weight=up)
    differ(layer(x), mla(x))


def test_only_distances_matter():
    layer, x, positions = make(spec()), batch(), torch.arange(9)[None]
    close(layer(x, positions=positions + 1000), layer(x), 1e-9)
    differ(layer(x, positions=positions * 2), layer(x))


def test_the_output_is_zero_at_the_start():
    x = batch().float()
    assert not Attention(spec(), DIM, HEADS)(x).any()
    assert Attention(spec(4, ", zero_out=false"), DIM, HEADS)(x).any()


@pytest.mark.parametrize("scale", ["sqrt", "none"])
def test_scales_even_content_and_rotary_logits(scale):
    """i.i.d. weights and x of unit rms: a channel's logit varies as much in content as in rotary keys."""
    dim, heads, std = 512, 8, 0.02
    layer = Attention(f"mlra(latent_scale={scale})", dim, heads).double()
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=std)
    x = torch.randn(1, 400, dim).double()
    p = layer.project
    q = heads_of(p.q_b_proj(p.q_a_norm(p.q_a_proj(x))), heads)
    row = p.kv_a_proj(x)
    c = p.kv_a_norm(row[..., : p.rank])[..., : p.rank // 4]
    content = heads_of(c @ p.kv_b_proj.weight[: heads * (p.nope + p.v)].T, heads)[..., : p.nope]
    rotary = row[..., None, :, p.rank :]
    ratio = (q[..., : p.nope] * content).var() / (q[..., p.nope :] * rotary).var()
    assert abs(ratio - 1) < 0.2 if scale == "sqrt" else ratio < 0.3


def test_the_authors_sizes():
    """2.9B: D 3072, 24 heads, 576 cached numbers a token, 192 of them a device; MLRA-2 halves the up-projection."""
    common = "rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1024"
    four, two, mla = (Spec.parse(f"{name}{common})") for name in ("mlra(", "mlra(branches=2, ", "mla("))
    costs = [each.cost(3072, 24) for each in (four, two, mla)]
    up = 512 * 24 * (128 + 128)
    assert costs[0].parameters == costs[2].parameters == costs[1].parameters + up // 2
    assert {cost.cache_floats for cost in costs} == {576}
    assert costs[0].pair_flops == 24 * 2560 and costs[2].pair_flops == 24 * 2176
    assert Spec.parse("mlra").cost(3072, 24) == costs[0]  # the defaults
    with torch.device("meta"):
        assert sum(p.numel() for p in Attention(two, 3072, 24).parameters()) == costs[1].parameters


def test_cache_bytes():
    layer, x, cache = make(spec()), batch(), Cache()
    decoded(layer, x, 4, cache)
    assert cache.bytes() == x.shape[0] * x.shape[1] * (R + ROPE) * 8


def test_explain_sees_the_calls_of_one_branch():
    layer = Attention(spec(2), DIM, HEADS)
    assert "2 query rows a key head" in str(layer.explain(1))  # two key heads serve four heads
    assert "40 query rows a key head" in str(Attention(spec(2, ", view=expanded"), DIM, HEADS).explain(40))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mlra(rank=10)", r"rank=10 does not cut into 4 blocks; it does into \[1, 2, 5, 10\]"),
        ("mlra(branches=3)", r"4 blocks, 3 for each of 4 heads.*\[1, 2, 4\] branches fit"),
        ("mlra(branches=1, blocks=12, rank=12)", r"must divide the heads: \[3, 6, 12\] branches fit"),
        ("mlra(rope_dim=3)", "rope_dim=3 does not pair up"),
        ("mlra(q_rank=-1)", "q_rank=-1"),
    ],
)
def test_numbers_that_do_not_fit(line, said):
    with pytest.raises(OptionError, match=f"mlra: .*{said}"):
        Attention(line, DIM, HEADS)


def test_heads_have_several_maps():
    with pytest.raises(SpecError, match=r"'talking_heads' needs 'one map'.*which 'mlra' breaks; nearest legal: gla"):
        Attention("mlra + talking_heads", DIM, HEADS)
    with pytest.raises(SpecError, match=r"'qk-norm' needs 'head keys'.*mlra\(view=expanded\)"):
        Attention("mlra + qk-norm", DIM, HEADS)
