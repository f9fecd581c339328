"""Decoupled heads (arXiv 2406.06567): the layer, and what must hold of the conversion to it."""

import copy

import pytest
import torch
from tests.convert.tiny import DIM, HEADS, WIDTH, decode, error, inputs, layer, measured, out
from tests.oracles.reference import batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads.convert.methods import read_method
from manyheads.convert.moves.dha import (
    Fusion,
    Lagrangian,
    ToDHA,
    allot,
    fusion_loss,
    settle,
    spread,
    start_fusion,
    trees_of,
)
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec

MHA = "gqa(kv_heads=4, bias=qkvo)"
RAGGED = "dha(k_heads=3, v_heads=2, k_map=[0, 1, 1, 2], v_map=[1, 0, 1, 0])"


# --- the layer


@pytest.mark.parametrize("g", [1, 2, 4])
def test_equal_maps_in_blocks_are_grouped_heads(g):
    layer, x = make(f"dha(k_heads={g}, v_heads={g})"), batch()
    close(layer(x), twin(layer, f"gqa(kv_heads={g})")(x))
    close(decoded(layer, x, 2), layer(x))


def test_ragged_maps_are_what_they_say():
    layer, x = make(RAGGED), batch()
    q, k, v = (heads_of(getattr(layer.project, f"{n}_proj")(x), h) for n, h in (("q", 4), ("k", 3), ("v", 2)))
    k, v = k[:, [0, 1, 1, 2]], v[:, [1, 0, 1, 0]]
    close(layer(x), join(weights(rope(q), rope(k), 6**-0.5) @ v, layer.project.o_proj))
    close(decoded(layer, x), layer(x))


def test_one_key_map_for_all_heads():
    layer, x = make("dha(k_heads=1)"), batch()
    q, v = (heads_of(getattr(layer.project, f"{n}_proj")(x), 4) for n in "qv")
    k = heads_of(layer.project.k_proj(x), 1).expand(-1, 4, -1, -1)
    close(layer(x), join(weights(rope(q), rope(k), 6**-0.5) @ v, layer.project.o_proj))


def test_numbers_of_heads_do_not_matter():
    layer, x = make(RAGGED), batch()
    order = [2, 0, 1]  # new head n is old head order[n]
    k = layer.project.k_proj.weight.unflatten(0, (3, 6))[order].flatten(0, 1)
    renamed = [order.index(a) for a in (0, 1, 1, 2)]
    other = twin(layer, f"dha(k_heads=3, v_heads=2, k_map={renamed}, v_map=[1, 0, 1, 0])", project__k_proj__weight=k)
    close(other(x), layer(x))


def test_a_key_head_is_felt_by_its_own_query_heads_alone():
    layer, x = make(RAGGED), batch()
    layer.project.o_proj.weight.data = torch.eye(DIM, dtype=torch.float64)
    other = copy.deepcopy(layer)
    other.project.k_proj.weight.data[6:12] += 0.5
    moved = (other(x) - layer(x)).unflatten(-1, (4, 6)).abs().amax((0, 1, 3))
    assert (moved > 1e-4).tolist() == [False, True, True, False]


def test_cost_is_the_formula():
    cost = Spec.parse(RAGGED).cost(DIM, HEADS)
    assert cost.cache_floats == 6 * (3 + 2) and cost.parameters == DIM * 6 * (4 + 3 + 2 + 4)
    assert Spec.parse("gqa").cost(DIM, HEADS).parameters - cost.parameters == (2 * 4 - 3 - 2) * 6 * DIM


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("dha(k_heads=3)", r"k_heads=3 of 4 query heads are no equal groups; it may be \[1, 2, 4\]"),
        ("dha(k_heads=2, k_map=[0, 1, 2, 0])", "must name a head for each of 4 query heads"),
        ("dha(v_heads=3, v_map=[0, 1, 1, 0])", "at least once"),
        ("dha(v_heads=2, v_map=[0, 1, 1])", "must name a head for each"),
    ],
)
def test_maps_that_do_not_fit_are_refused(spec, said):
    with pytest.raises(OptionError, match=said):
        make(spec)


# --- the conversion


def tied(source, keys, values):
    """Heads of each group made equal to its first."""
    other = copy.deepcopy(source)
    for linear, groups in ((other.project.k_proj, keys), (other.project.v_proj, values)):
        for tensor in linear.parameters():
            rows = tensor.view(4, WIDTH, -1)
            tensor.copy_(rows[[groups.index(g) for g in groups]].view_as(tensor))
    return other


@pytest.mark.parametrize("fusion", ["linear", "mean"])
def test_equal_heads_are_found_and_fused_exactly(fusion):
    keys, values = (0, 1, 0, 1), (0, 1, 1, 1)
    source, x = tied(layer(MHA), keys, values), inputs()
    stats = measured(source, x)
    trees = trees_of(source, stats)
    assert trees[0].groups[1] == keys and trees[1].groups[1] == values
    assert all(tree.scatter[1] == pytest.approx(0, abs=1e-12) for tree in trees)
    made = ToDHA(2, 2, fusion)(source, stats)
    close(out(made, x), out(source, x), 1e-6)
    close(decode(made, x), out(made, x), 1e-9)


@pytest.mark.parametrize("spec", [MHA, "gqa(kv_heads=2, bias=qkv)", "gqa + alibi"])
def test_all_heads_kept_are_the_source(spec):
    source, x = layer(spec), inputs()
    heads = source.layout.kv
    made = ToDHA(heads, heads)(source, measured(source, x))
    close(out(made, x), out(source, x), 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_linear_fusion_is_no_worse_than_the_mean_and_groups_nest(seed):
    source, x = layer(MHA, seed), inputs()
    stats = measured(source, x)
    felt = {how: error(ToDHA(2, 2, how)(source, stats), source, x) for how in ("linear", "mean")}
    assert felt["linear"] < 1.1 * felt["mean"] and felt["linear"] > 0
    for tree in trees_of(source, stats):
        assert [max(groups) + 1 for groups in tree.groups] == [1, 2, 3, 4]
        assert tree.scatter == sorted(tree.scatter, reverse=True) and tree.scatter[-1] == 0
        for few, more in zip(tree.groups, tree.groups[1:], strict=False):
            assert all(len({f for f, m in zip(few, more, strict=True) if m == g}) == 1 for g in more)


def test_heads_are_allotted_greedily_and_all():
    assert allot([[9, 1, 0], [4, 3, 0]], 2) == [1, 1]
    assert allot([[9, 1, 0], [4, 3, 0]], 3) == [2, 1]
    assert allot([[9, 1, 0], [4, 3, 0]], 6) == [3, 3]
    assert sum(allot([[5, 2, 1, 0]] * 4, 9)) == 9
    for total in (1, 7):
        with pytest.raises(OptionError, match="2 to 6 fit"):
            allot([[9, 1, 0], [4, 3, 0]], total)


def test_what_cannot_be_decoupled_is_refused():
    assert "decoupled in gqa" in ToDHA(1, 1).refusal(Spec.parse("mla(rank=9, rope_dim=4)"))
    assert "use fusion=mean" in ToDHA(1, 1).refusal(Spec.parse("gqa + qk-norm"))
    assert ToDHA(1, 1, "mean").refusal(Spec.parse("gqa + qk-norm")) is None
    assert "one width" in ToDHA(1, 1).refusal(Spec.parse("gqa(v_dim=5)"))
    source = layer(MHA)
    with pytest.raises(OptionError, match="become 1 to 4 of either kind"):
        ToDHA(5, 1)(source, measured(source, inputs()))
    assert (read_method("dha").fusion, read_method("dha(mean)").fusion) == ("linear", "mean")


# --- fusion by training


def test_fusion_starts_at_the_source_bit_for_bit():
    source, x = layer(MHA).float(), inputs().float()
    fused = copy.deepcopy(source)
    start_fusion(fused, (0, 0, 1, 1), (0, 1, 2, 3))
    assert torch.equal(out(fused, x), out(source, x))
    assert fusion_loss(fused) > 0
    with pytest.raises(OptionError, match="do not name one for each of 4"):
        start_fusion(copy.deepcopy(source), (0, 0, 1), (0, 1, 2, 3))
    with pytest.raises(OptionError, match="start_fusion gives it some"):
        fusion_loss(source)


def test_the_spread_of_a_group_is_its_scatter():
    rows, groups = torch.randn(5, 3, 4, dtype=torch.float64), (0, 1, 0, 2, 0)
    group = rows[[0, 2, 4]]
    pairs = [(group[i] - group[j]).pow(2).sum() for i in range(3) for j in range(i + 1, 3)]
    close(spread(rows, groups), sum(pairs) / 3)
    close(sum(pairs), 3 * (group - group.mean(0)).pow(2).sum())
    assert spread(rows, (0, 1, 2, 3, 4)) == 0


def test_fusion_under_the_lagrangian_agrees_and_then_nothing_jumps():
    torch.manual_seed(0)
    source, x = layer(MHA), inputs()
    for parameter in source.parameters():
        parameter.requires_grad_(True)
    start_fusion(source, (0, 0, 1, 1), (0, 1, 0, 1))

    def jump():
        return (out(settle(source), x) - out(source, x)).norm().item() / out(source, x).norm().item()

    first, at_once = fusion_loss(source).item(), jump()
    penalty, adam = Lagrangian(150, rate=0.1), torch.optim.Adam(source.parameters(), 0.02)
    for step in range(300):
        loss = penalty(fusion_loss(source), step)
        adam.zero_grad()
        loss.backward()
        for group in adam.param_groups:
            group["lr"] = 0.02 * min(1, (301 - step) / 150)
        adam.step()
    assert fusion_loss(source).item() < 0.01 * first
    assert settle(source).spec.parts[0].k_heads == settle(source).spec.parts[0].v_heads == 2
    assert jump() < 0.2 * at_once


def test_at_agreement_any_member_is_the_group():
    source, x = tied(layer(MHA), (0, 1, 0, 1), (0, 0, 1, 1)), inputs()
    start_fusion(source, (0, 1, 0, 1), (0, 0, 1, 1))
    assert fusion_loss(source) == 0
    close(out(settle(source), x), out(source, x), 1e-9)


def test_multipliers_rise_while_the_loss_is_above_its_target():
    penalty = Lagrangian(steps=10)
    assert penalty(torch.tensor(4.0), 0) == 0 and (penalty.linear, penalty.square) == (0, 0)  # the first target is L
    assert penalty.target(5) == 2
    penalty(torch.tensor(4.0), 5)
    assert penalty.linear > 0 and penalty.square > 0
    assert penalty(torch.tensor(2.0), 5) == 0
    high = penalty.linear
    penalty(torch.tensor(0.0), 5)
    assert 0 <= penalty.linear < high and penalty.target(20) == 0


def test_scalars_outside_a_group_do_nothing():
    fusion, rows = Fusion((0, 1, 0)), torch.randn(6, 4)
    fusion.omega.data[0, 1] = 7.0
    close(fusion(rows), rows)
    fusion.omega.data[0, 2] = 1.0
    differ(fusion(rows), rows)
