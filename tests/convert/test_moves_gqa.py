import copy

import pytest
import torch
from tests.convert.tiny import DIM, HEADS, WIDTH, decode, error, inputs, layer, measured, out
from tests.oracles.reference import close, differ

from manyheads.convert.moves.common import linear_rows
from manyheads.convert.moves.gqa import ToGQA
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec

MHA = "gqa(bias=qkvo)"
SPECS = [
    MHA,
    "gqa",
    "gqa(bias=o)",
    "gqa(head_dim=10, scale=0.2)",
    "gqa + rope(pairing=interleaved, fraction=0.7)",
    "gqa + window(5)",
    "gqa + softmax(cap=3.0) + moh(top=2)",
]
HOW = ("mean", "first", "fitted", "lowrank")


def equal_in_groups(source, groups):
    """All key and value heads of a group become its first."""
    for linear in (source.project.k_proj, source.project.v_proj):
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                rows = tensor.view(groups, HEADS // groups, WIDTH if len(tensor) == DIM else 10, -1)
                tensor.copy_(rows[:, :1].expand_as(rows).reshape_as(tensor))
    return source


@pytest.mark.parametrize("how", [*HOW, "random"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_as_many_heads_is_the_identity_bit_for_bit(how, dtype):
    source, x = layer("gqa(kv_heads=2, bias=qkvo) + moh(top=2)").to(dtype), inputs().to(dtype)
    stats = measured(copy.deepcopy(source).double(), x.double())
    made = ToGQA(2, how)(source, stats)
    assert made.spec == source.spec
    assert made.state_dict().keys() == source.state_dict().keys()
    for name, tensor in source.state_dict().items():
        assert tensor.dtype == made.state_dict()[name].dtype and torch.equal(made.state_dict()[name], tensor)
    assert torch.equal(out(made, x), out(source, x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("groups", [1, 2])
def test_equal_heads_merge_exactly(spec, how, groups):
    source, x = equal_in_groups(layer(spec), groups), inputs()
    made = ToGQA(groups, how)(source, measured(source, x))
    close(out(made, x), out(source, x), 1e-7)
    assert made.layout.kv == groups
    assert f"kv_heads={groups}" in str(made.spec)
    assert [part for part in made.spec.parts if part.name != "gqa"] == [
        part for part in source.spec.parts if part.name != "gqa"
    ]


@pytest.mark.parametrize("how", [*HOW, "random"])
@pytest.mark.parametrize("spec", SPECS)
def test_decoding_is_the_full_pass(spec, how):
    source, x = layer(spec), inputs()
    made = ToGQA(2, how)(source, measured(source, x))
    differ(out(made, x), out(source, x), 1e-3)
    close(decode(made, x), out(made, x), 1e-9)


def test_the_mean_is_the_least_squares_head():
    source, x = layer(MHA), inputs()
    made = ToGQA(2, "mean")(source, measured(source, x))
    for name in ("k_proj", "v_proj"):
        rows = linear_rows(getattr(source.project, name)).view(2, 2, WIDTH, -1)
        merged = linear_rows(getattr(made.project, name)).view(2, 1, WIDTH, -1)
        least = (rows - merged).pow(2).sum()
        close(least / 2, rows.var(1, correction=0).sum(), 1e-9)
        for _ in range(5):
            assert (rows - merged - 0.1 * torch.randn_like(merged)).pow(2).sum() > least
    for name in ("q_proj", "o_proj"):
        close(linear_rows(getattr(made.project, name)), linear_rows(getattr(source.project, name)), 0)


def test_pooled_keys_are_the_mean_of_rotated_keys():
    """Rotation is linear and the same in every head."""
    source, x = layer(MHA), inputs()
    made = ToGQA(2, "mean")(source, measured(source, x))
    flows = [each._flow(x, None, None, None, None, None) for each in (source, made)]
    many, few = (each._rows(None, flow, None)["k"] for each, flow in zip((source, made), flows, strict=True))
    close(few, many.unflatten(1, (2, 2)).mean(2), 1e-9)


def test_means_in_two_steps_are_the_means_in_one():
    source, x = layer(MHA), inputs()
    two = ToGQA(2, "mean")(source, measured(source, x))
    one = ToGQA(1, "mean")(two, measured(two, x))
    direct = ToGQA(1, "mean")(source, measured(source, x))
    assert one.spec == direct.spec
    for name, tensor in direct.state_dict().items():
        close(one.state_dict()[name], tensor, 1e-12)


def permuted(source, order):
    """Heads in another order, each with its queries, keys, values and output columns."""
    other = copy.deepcopy(source)
    for linear in (other.project.q_proj, other.project.k_proj, other.project.v_proj):
        for tensor in (linear.weight, linear.bias):
            tensor.copy_(tensor.view(HEADS, WIDTH, -1)[order].view_as(tensor))
    o = other.project.o_proj.weight
    o.copy_(o.view(DIM, HEADS, WIDTH)[:, order].reshape_as(o))
    return other


@pytest.mark.parametrize("how", ["mean", "fitted", "lowrank"])
def test_order_inside_a_group_does_not_matter_and_the_groups_do(how):
    source, x = layer(MHA), inputs()
    inside, across = permuted(source, [1, 0, 3, 2]), permuted(source, [0, 2, 1, 3])
    same, other = (ToGQA(2, how)(each, measured(each, x)) for each in (inside, across))
    made = ToGQA(2, how)(source, measured(source, x))
    close(out(inside, x), out(source, x), 1e-9)
    close(out(same, x), out(made, x), 1e-7)
    differ(out(other, x), out(made, x), 1e-2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_error_of_each_start(spec, groups, seed):
    """On the text that it was fitted on, the fitted merge is never worse than pooling."""
    source, x = layer(spec, seed), inputs(seed)
    stats = measured(source, x)
    table = {how: error(ToGQA(groups, how)(source, stats), source, x) for how in HOW}
    assert table["fitted"] < min(table["mean"], table["first"]), table
    assert table["lowrank"] < table["first"], table


def test_fewer_heads_lose_more():
    source, x = layer(MHA), inputs()
    errors = [error(ToGQA(groups)(source, measured(source, x)), source, x) for groups in (4, 2, 1)]
    assert errors == sorted(errors) and errors[0] == 0


def test_fitted_values_are_the_best_of_their_rank():
    """With equal keys in a group, values are all that is lost, and no other value head loses less in the metric."""
    source, x = layer(MHA), inputs()
    stats = measured(source, x)
    made = ToGQA(2)(source, stats)
    v = linear_rows(source.project.v_proj).view(2, 2, WIDTH, -1)
    o, fitted = (each.project.o_proj.weight.view(DIM, 2, 2, WIDTH) for each in (source, made))
    merged = linear_rows(made.project.v_proj).view(2, WIDTH, -1)
    size = stats.value.view(2, 2)

    def cost(heads, outputs):
        left = torch.einsum("egmv,gmvd->gmed", o, v) - torch.einsum("egmw,gwd->gmed", outputs, heads)
        return (torch.einsum("gmed,df,gmef->gm", left, stats.rows, left) * size).sum()

    least = cost(merged, fitted)
    for _ in range(5):
        assert cost(merged + 0.05 * merged.std() * torch.randn_like(merged), fitted) > least
        assert cost(merged, fitted + 0.05 * fitted.std() * torch.randn_like(fitted)) > least
    mean = v.mean(1)
    assert cost(mean, o) > 1.2 * least


def test_head_counts_that_do_not_divide_are_refused_with_those_that_do():
    source = layer(MHA)
    for groups in (3, 8, 0):
        with pytest.raises(OptionError, match=r"kv_heads may be \[1, 2, 4\]"):
            ToGQA(groups)(source, measured(source, inputs()))


def test_what_cannot_be_merged_is_refused_by_name():
    for how in ("fitted", "lowrank"):
        assert "qk-norm" in ToGQA(1, how).refusal(Spec.parse("gqa + qk-norm"))
        assert "kha" in ToGQA(1, how).refusal(Spec.parse("gqa + kha"))
    assert "RoPE" in ToGQA(1).refusal(Spec.parse("gqa + alibi"))
    assert ToGQA(1, "lowrank").refusal(Spec.parse("gqa + alibi")) is None
    assert "or alibi" in ToGQA(1, "lowrank").refusal(Spec.parse("gqa + window_bias"))
    assert "merged in gqa" in ToGQA(1, "mean").refusal(Spec.parse("mla(rank=9, rope_dim=4)"))
    with pytest.raises(OptionError, match="qk-norm"):
        ToGQA(1)(layer("gqa + qk-norm"), None)


@pytest.mark.parametrize("spec", ["gqa + qk-norm", "gqa + alibi", "gqa + kha"])
def test_pooling_takes_what_the_fit_refuses(spec):
    source, x = layer(spec), inputs()
    made = ToGQA(2, "mean")(source, measured(layer("gqa"), x))
    assert out(made, x).isfinite().all()
    gains = {name: tensor for name, tensor in source.state_dict().items() if name.startswith("transforms")}
    assert all(torch.equal(made.state_dict()[name], tensor) for name, tensor in gains.items())


def test_gradients_of_a_merged_head_are_sums_over_its_group():
    source, x = equal_in_groups(layer(MHA), 2), inputs()
    made = ToGQA(2, "mean")(source, measured(source, x)).requires_grad_()
    source.requires_grad_()
    for each in (source, made):
        out(each, x).pow(2).sum().backward()
    for name in ("k_proj", "v_proj"):
        many, few = (getattr(each.project, name).weight.grad for each in (source, made))
        close(few, many.view(2, 2, WIDTH, DIM).sum(1).flatten(0, 1), 1e-6)


def test_random_heads_are_new_as_large_and_always_the_same():
    source, x = layer(MHA, dim=96), inputs(dim=96)
    stats = measured(source, x)
    made, again = (ToGQA(2, "random")(source, stats) for _ in range(2))
    for name in ("k_proj", "v_proj"):
        weight, old = getattr(made.project, name).weight, getattr(source.project, name).weight
        assert torch.equal(weight, getattr(again.project, name).weight)
        assert weight.std().item() == pytest.approx(old.std().item(), rel=0.1)
        rows = torch.cat([weight, old]).T  # neither is made of the other
        assert torch.corrcoef(rows.T)[: len(weight), len(weight) :].abs().max() < 0.5
        assert getattr(made.project, name).bias.abs().max() == 0
    for name in ("q_proj", "o_proj"):
        assert torch.equal(getattr(made.project, name).weight, getattr(source.project, name).weight)


def test_pooled_heads_are_the_source_with_tied_heads():
    """Each head given the mean of its group, and the many-headed code run: the same."""
    source, x = layer(MHA), inputs()
    made, tied = ToGQA(2, "mean")(source, measured(source, x)), copy.deepcopy(source)
    for name in ("k_proj", "v_proj"):
        for few, many in zip(
            getattr(made.project, name).parameters(), getattr(tied.project, name).parameters(), strict=True
        ):
            many.copy_(few.view(2, 1, WIDTH, -1).expand(-1, 2, -1, -1).reshape_as(many))
    close(out(made, x), out(tied, x), 1e-9)


def test_pooled_values_are_exact_where_outputs_do_not_feel_what_they_lose():
    """With equal maps in a group, only Σ W_O (W_V - mean) counts."""
    source, x = equal_in_groups(layer(MHA), 2), inputs()
    for linear in (source.project.q_proj,):
        for tensor in linear.parameters():
            rows = tensor.view(2, 2, WIDTH, -1)
            tensor.copy_(rows[:, :1].expand_as(rows).reshape_as(tensor))
    shift = torch.randn(2, 1, WIDTH, DIM, dtype=torch.float64)
    v = source.project.v_proj.weight
    v.add_(torch.cat([shift, -shift], 1).view_as(v))
    lost = error(ToGQA(2, "mean")(source, measured(source, x)), source, x)
    assert lost > 1e-2
    o = source.project.o_proj.weight.view(DIM, 2, 2, WIDTH)
    o.copy_(o[:, :, :1].expand_as(o))  # both heads of a group read alike: what one gains the other loses
    close(out(ToGQA(2, "mean")(source, measured(source, x)), x), out(source, x), 1e-9)
