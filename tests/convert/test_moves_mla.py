import dataclasses

import pytest
import torch
from tests.convert.tiny import (
    BASE,
    DIM,
    HEADS,
    WIDTH,
    decode,
    error,
    everything,
    inputs,
    layer,
    measured,
    out,
    whole,
)
from tests.oracles.reference import close, differ

from manyheads.convert.moves.common import linear_rows
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.moves.mla import ToMLA, choose
from manyheads.convert.stats import Pairs, power
from manyheads.core.mask import Axis
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

STILL = "rope(scaling=linear, factor=1e30)"  # every frequency is zero
EXACT = [
    "gqa(kv_heads=1)",
    "gqa",
    BASE,
    "gqa(kv_heads=2, bias=qkv)",
    "gqa(kv_heads=2, bias=o)",
    "gqa(kv_heads=2, head_dim=10, scale=0.2)",
    f"{BASE} + rope(pairing=interleaved)",
    f"{BASE} + rope(fraction=0.7)",
    f"{BASE} + rope(pairing=interleaved, fraction=0.4)",
    f"{BASE} + rope(scaling=yarn, factor=4, original=8)",
    f"{BASE} + rope(scaling=llama3, factor=8, original=16)",
    f"{BASE} + window(5)",
    f"{BASE} + softmax(cap=3.0)",
    f"{BASE} + moh(top=2)",
]


@pytest.mark.parametrize("spec", EXACT)
def test_all_pairs_at_full_rank_lose_nothing(spec):
    """And the absorbed view, the expanded one and decoding are the same function."""
    source, x = layer(spec), inputs()
    made = whole(source)(source, measured(source, x))
    close(out(made, x), out(source, x), 1e-9)
    close(decode(made, x), out(source, x), 1e-9)
    close(decode(made, x, 5), out(source, x), 1e-9)


def viewed(made, view):
    project, *others = made.spec.parts
    other = SeamAttention(Spec((dataclasses.replace(project, view=view), *others)), DIM, HEADS).double().eval()
    other.load_state_dict(made.state_dict())
    return other


@pytest.mark.parametrize("spec", [BASE, f"{BASE} + window(5)", f"{BASE} + rope(fraction=0.7)"])
def test_views_agree_where_something_is_lost(spec):
    source, x = layer(spec), inputs()
    stats = measured(source, x)
    made = ToMLA(9, choose(gauge(source, stats).damage, 2))(source, stats)
    differ(out(made, x), out(source, x), 1e-3)
    for view in ("expanded", "absorbed"):
        other = viewed(made, view)
        close(out(other, x), out(made, x), 1e-9)
        close(decode(other, x), out(made, x), 1e-9)


@pytest.mark.parametrize("magnitude", [1.0, 1.4])
@pytest.mark.parametrize("turning", [(), ((0, 0), (2, 1))])
def test_rotation_that_does_not_turn_is_removed_exactly(turning, magnitude):
    source, x = layer(f"{BASE} + {STILL[:-1]}, magnitude={magnitude})"), inputs()
    made = ToMLA(10**6, turning)(source, measured(source, x))
    close(out(made, x), out(source, x), 1e-9)


def with_equal_keys(source):
    for linear in (source.project.k_proj,):
        rows = linear_rows(linear).view(-1, WIDTH, DIM + 1)
        linear.weight.copy_(rows[:1].expand_as(rows)[..., :-1].reshape_as(linear.weight))
        linear.bias.copy_(rows[:1].expand_as(rows)[..., -1].reshape_as(linear.bias))
    return source


def test_equal_key_heads_fill_one_slot_and_the_others_are_free():
    source, x = with_equal_keys(layer("gqa(bias=qkvo)")), inputs()
    stats = measured(source, x)
    damage = gauge(source, stats).damage
    assert damage[:, 1:].abs().max() < 1e-10 * damage[:, 0].min()
    made = ToMLA(10**6, tuple((pair, 0) for pair in range(WIDTH // 2)))(source, stats)
    close(out(made, x), out(source, x), 1e-7)


def keys_of(source, x):
    """Key numbers of all tokens, complex `[P, G, tokens]`."""
    rows = source.project.k_proj(x).view(-1, source.layout.kv, source.layout.qk_width).permute(1, 2, 0)
    return Pairs.of(source).join(rows).transpose(0, 1)


def alike(source, stats, x):
    """Statistics that weigh all heads, channels and tokens alike."""
    ones = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, 1)
    moment = ones.T @ ones / len(ones)
    same = torch.eye(WIDTH, dtype=torch.float64).expand(HEADS, -1, -1)
    each = HEADS // source.layout.kv
    value = torch.full((HEADS,), 1 / each, dtype=torch.float64)
    return stats._replace(keys=moment, rows=moment, query=same / (each * source.layout.scale**2), value=value)


def test_slots_are_principal_components_over_key_heads():
    source, x = layer("gqa(bias=qkvo)"), inputs()
    slots = gauge(source, alike(source, measured(source, x), x))
    k = keys_of(source, x)
    parts = slots.inverse @ k
    close(slots.mix @ parts, k, 1e-9)
    moment = parts @ parts.conj().transpose(1, 2) / k.shape[-1]
    energy = moment.diagonal(dim1=1, dim2=2).real
    close(moment, torch.diag_embed(energy + 0j), 1e-9)  # uncorrelated
    want = torch.linalg.eigvalsh(k @ k.conj().transpose(1, 2) / k.shape[-1]).flip(-1)
    close(energy / energy.sum(), want / want.sum(), 1e-9)  # in the order of their share
    total = slots.mix.abs().pow(2).sum(1) * energy
    close(total.sum(), want.sum(), 1e-9)  # and the energy of all keys is what it was


def by_hand(source, stats, x, turning):
    """Scores in which only some components turn; the others keep the mean of their rotation."""
    pairs, slots, project = Pairs.of(source), gauge(source, stats), source.project
    group = torch.arange(HEADS) // (HEADS // source.layout.kv)
    y = []
    for window in x:
        q = pairs.join(project.q_proj(window).view(-1, HEADS, source.layout.qk_width).permute(1, 2, 0))
        parts = slots.inverse @ keys_of(source, window[None])  # [P, G, T]
        time = torch.arange(len(window))
        turn = torch.polar(torch.ones(1).double(), pairs.theta[:, None, None] * (time[:, None] - time))  # [P, T, T]
        scores = 0
        for p in range(len(pairs.re)):
            for s in range(source.layout.kv):
                factor = turn[p] if (p, s) in turning else slots.mean[group, p].conj()[:, None, None]
                part = slots.mix[p, group, s][:, None] * parts[p, s]  # [H, T]
                scores = scores + (q[:, p, :, None] * part.conj()[:, None] * factor).real
        a = (scores * source.layout.scale).masked_fill(time[:, None] < time, -torch.inf).softmax(-1)
        v = project.v_proj(window).view(-1, source.layout.kv, source.layout.v_width).transpose(0, 1)[group]
        y.append(project.o_proj((a @ v).transpose(0, 1).flatten(1)))
    return torch.stack(y)


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_at_full_rank_only_the_stopped_rotations_are_lost(count):
    source, x = layer(), inputs()
    stats = measured(source, x)
    turning = choose(gauge(source, stats).damage, count)
    assert len(turning) == count
    close(out(ToMLA(10**6, turning)(source, stats), x), by_hand(source, stats, x, turning), 1e-9)


def test_the_mean_rotation_is_the_best_constant():
    """Under the distances that attention spans: E|e^{-iθΔ} - m|² is least at the mean, where it is 1 - |m|²."""
    source, x = layer("gqa(kv_heads=4)"), inputs()
    stats, pairs = measured(source, x), Pairs.of(source)
    turn = torch.polar(torch.ones(1).double(), -torch.arange(x.shape[1])[:, None] * pairs.theta)
    mean = gauge(source, stats).mean

    def cost(m):
        return torch.einsum("ht,htp->hp", stats.distance, (turn - m[:, None]).abs() ** 2)

    close(cost(mean), 1 - mean.abs() ** 2, 1e-9)
    for _ in range(5):
        assert (cost(mean + 0.1 * torch.randn_like(mean)) > cost(mean)).all()


def still_rows(made, groups=2):
    """What the latent gives each key head: `[G·(d + v), D + 1]`, constant channel last."""
    rank = made.project.rank
    rows = made.project.kv_b_proj.weight @ linear_rows(made.project.kv_a_proj)[:rank]
    k, v = rows.view(HEADS, 2, WIDTH, -1)[:: HEADS // groups].unbind(1)
    return torch.cat([k.flatten(0, 1), v.flatten(0, 1)])


def output_metric(source, stats):
    """√ of what errors in keys and values cost, as one block matrix over the rows of `still_rows`."""
    groups, o = source.layout.kv, source.project.o_proj.weight.view(DIM, HEADS, WIDTH)
    query = (stats.query * source.layout.scale**2).view(groups, -1, WIDTH, WIDTH).sum(1)
    value = torch.einsum("ehv,ehw,h->hvw", o, o, stats.value).view(groups, -1, WIDTH, WIDTH).sum(1)
    return torch.block_diag(*(power(block, 0.5) for block in (*query, *value)))


def test_discarded_energy_is_the_sum_of_the_dropped_eigenvalues():
    source, x = layer(), inputs()
    stats, turning = measured(source, x), ((0, 0), (1, 1))
    rows, outer = still_rows(ToMLA(10**6, turning)(source, stats)), output_metric(source, stats)
    dropped = torch.linalg.eigvalsh(outer @ rows @ stats.rows @ rows.T @ outer.T)
    lost = []
    for rank in range(1, 20):
        left = outer @ (rows - still_rows(ToMLA(rank, turning)(source, stats)))
        lost.append(torch.trace(left @ stats.rows @ left.T))
        close(lost[-1], dropped[:-rank].sum(), 1e-8)
    assert lost == sorted(lost, reverse=True)


def test_without_a_metric_the_rank_cut_is_output_pca():
    """The three forms of one fit: W P Pᵀ, C^-½ of the truncated SVD of C^½ W, and ours."""
    source, x = layer(f"{BASE} + {STILL}"), inputs()
    source.project.o_proj.weight.copy_(torch.linalg.qr(torch.randn(DIM, DIM).double())[0])
    stats, rank = alike(source, measured(source, x), x), 7
    rows = torch.cat([linear_rows(source.project.k_proj), linear_rows(source.project.v_proj)])
    ours = still_rows(ToMLA(rank, ())(source, stats))
    basis = torch.linalg.eigh(rows @ stats.rows @ rows.T)[1][:, -rank:]
    close(ours, basis @ basis.T @ rows, 1e-8)
    root = power(stats.rows, 0.5, 0.0)
    u, s, v = torch.linalg.svd(root @ rows.T, full_matrices=False)
    close(ours, torch.linalg.solve(root, u[:, :rank] * s[:rank] @ v[:rank]).T, 1e-8)


def test_the_metric_beats_plain_principal_components():
    """In what it minimises; there a smaller error is a theorem."""
    source, x = layer(), inputs()
    stats, outer = measured(source, x), output_metric(source, measured(source, x))
    rows = still_rows(ToMLA(10**6, ((0, 0),))(source, stats))
    basis = torch.linalg.eigh(rows @ rows.T)[1][:, -8:]

    def cost(fit):
        left = outer @ (rows - fit)
        return torch.trace(left @ stats.rows @ left.T)

    assert cost(still_rows(ToMLA(8, ((0, 0),))(source, stats))) < 0.9 * cost(basis @ basis.T @ rows)


def replicated(source):
    """The same function with a key head for every query head."""
    other = layer(str(source.spec).replace("kv_heads=2, ", ""))
    state = source.state_dict()
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            rows = state[f"project.{name}.{kind}"].unflatten(0, (2, WIDTH))
            state[f"project.{name}.{kind}"] = rows.repeat_interleave(2, 0).flatten(0, 1)
    other.load_state_dict(state)
    return other


def test_replicated_heads_convert_like_one():
    """To the same latent, up to the damping of the metrics, which counts heads.

    Where nothing rotates: otherwise each of the copies takes a mean rotation of its own, and loses less.
    """
    source, x = layer(f"{BASE} + {STILL}"), inputs()
    other = replicated(source)
    close(out(other, x), out(source, x), 1e-9)
    a, b = (ToMLA(9, ())(one, measured(one, x)) for one in (source, other))
    assert (out(a, x) - out(b, x)).norm() < 0.02 * (out(a, x) - out(source, x)).norm()


def test_replicated_heads_have_the_same_slots():
    source, x = layer(), inputs()
    other = replicated(source)
    slots, more = (gauge(one, measured(one, x)).damage for one in (source, other))
    close(more[:, :2], slots, 0.02)
    assert more[:, 2:].abs().max() < 1e-8


def test_a_rank_above_the_exact_one_is_clipped():
    source, x = layer(), inputs()
    stats = measured(source, x)
    exact = 2 * 2 * WIDTH - 2 * 6
    made = [ToMLA(rank, everything(source))(source, stats) for rank in (exact, exact + 1, 999)]
    assert [str(each.spec) for each in made] == [str(made[0].spec)] * 3
    assert made[0].spec.parts[0].rank == exact
    close(out(made[2], x), out(made[0], x), 1e-12)


@pytest.mark.parametrize("bias", ["none", "qkv"])
def test_a_latent_as_wide_as_the_input_holds_everything(bias):
    source, x = layer(f"gqa(head_dim=10, bias={bias})"), inputs()
    made = ToMLA(999, everything(source)[:6])(source, measured(source, x))
    assert made.spec.parts[0].rank == DIM + (bias == "qkv")
    stats = measured(source, x)
    close(out(made, x), by_hand(source, stats, x, everything(source)[:6]), 1e-6)


@pytest.mark.parametrize("spec", [BASE, f"{BASE} + rope(fraction=0.7)", f"{BASE} + rope(of=12, pairs=[1, 3, 5])"])
def test_the_kept_pairs_are_in_the_spec(spec):
    source, x = layer(spec), inputs()
    stats = measured(source, x)
    turning = choose(gauge(source, stats).damage, 3)
    made = ToMLA(9, turning)(source, stats)
    rope = made.spec.by_stage["position"][0]
    own = Pairs.of(source)
    assert rope.pairs == tuple(int(own.index[pair]) for pair, _ in turning)
    assert all(0 <= pair < rope.of // 2 for pair in rope.pairs)
    assert f"pairs=[{', '.join(map(str, rope.pairs))}]" in str(made.spec)
    assert Spec.parse(str(made.spec)) == made.spec
    close(rope.frequencies(6).double(), own.theta[[pair for pair, _ in turning]], 1e-7)


def test_what_costs_most_keeps_turning():
    damage = torch.tensor([[5.0, 1.0], [3.0, 0.0], [4.0, 2.0]])
    assert choose(damage, 3) == ((0, 0), (1, 0), (2, 0))
    assert choose(damage, 99) == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
    assert choose(damage, 0) == ()


def test_channels_that_never_turned_are_never_kept_turning():
    source, x = layer(f"{BASE} + rope(fraction=0.4)"), inputs()
    stats = measured(source, x)
    damage = gauge(source, stats).damage
    assert choose(damage, 99) == ((0, 0), (0, 1))
    with pytest.raises(OptionError, match="pair 2 does not turn"):
        ToMLA(9, ((2, 0),))(source, stats)


@pytest.mark.parametrize("options", ["", "pairing=interleaved", "fraction=0.7", "pairing=interleaved, fraction=0.4"])
def test_pairs_are_complex_numbers_that_turn(options):
    source = layer(f"{BASE} + rope({options})" if options else BASE)
    pairs, rows = Pairs.of(source), torch.randn(2, WIDTH, 9, dtype=torch.float64)
    close(pairs.split(pairs.join(rows)), rows, 0)
    assert sorted([*pairs.re.tolist(), *pairs.im.tolist()]) == list(range(WIDTH))
    turned = source._turn(rows.transpose(1, 2)[None], "q", Axis(9, 0))[0].transpose(1, 2)
    turn = torch.polar(torch.ones(1).double(), pairs.theta[:, None] * torch.arange(9))
    close(pairs.join(rows) * turn, pairs.join(turned), 1e-12)


@pytest.mark.parametrize("part", ["qk-norm", "kha"])
def test_a_transform_between_projection_and_rotation_is_refused_by_name(part):
    source = layer(f"gqa(kv_heads=2) + {part}")
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    with pytest.raises(OptionError, match=part):
        ToMLA(8, ())(source, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())
    assert part in ToMLA(8, ()).refusal(source.spec)


def test_what_is_not_gqa_with_rope_is_refused():
    for spec in ("mla(rank=9, rope_dim=4)", "gqa + alibi"):
        assert "gqa with rope" in ToMLA(8, ()).refusal(Spec.parse(spec))


@pytest.mark.parametrize("seed", range(3))
def test_more_cache_loses_less(seed):
    source, x = layer(seed=seed), inputs(seed)
    stats = measured(source, x)
    damage = gauge(source, stats).damage
    errors = [error(ToMLA(rank, choose(damage, count))(source, stats), source, x) for rank, count in
              ((4, 1), (8, 2), (11, 4), (12, 6))]  # fmt: skip
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_the_source_layer_is_left_alone_and_biases_follow():
    for bias, own, o in (("none", False, False), ("qkv", True, False), ("qkvo", True, True), ("o", False, True)):
        source, x = layer(f"gqa(kv_heads=2, bias={bias})"), inputs()
        before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
        made = whole(source)(source, measured(source, x))
        assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())
        project = made.project
        assert (project.q_proj.bias is not None, project.kv_a_proj.bias is not None) == (own, own)
        assert (project.o_proj.bias is not None) == o
        assert project.q_proj.weight.dtype == torch.float64
