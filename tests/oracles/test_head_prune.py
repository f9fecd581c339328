"""Head pruning (Michel et al. 2019, arXiv 1905.10650): gates, their gradients, and what is removed."""

import pytest
import torch
from tests.convert.tiny import model, tokens
from tests.edit.models import logits, multi_head

import manyheads as mh
from manyheads.edit import mask, prune, select
from manyheads.edit.select import measure_of
from manyheads.inspect.measures import ablation, importance, next_token_loss


def score(made, ids, reduction="token", **options):
    return importance(made, ids, reduction=reduction, **options).grid


def test_masked_and_pruned_models_are_one():
    made, ids = multi_head(bias="attention_bias"), tokens()
    heads = {0: [0, 2], 1: [3]}
    with mask(made, heads):
        want = logits(made, ids)
    torch.testing.assert_close(logits(prune(made, heads), ids), want, rtol=0, atol=1e-12)


@pytest.fixture
def stack():
    """Of two layers whose norms are float64: the derivative of a loss towards scaled heads, and signed scores."""
    made, x = mh.Stack("gqa(kv_heads=2)", dim=32, heads=4, layers=2).double().eval(), torch.randn(3, 5, 32).double()
    loss = lambda y, _: y.square().flatten(1).sum(1)

    def slope(heads, step=1e-4):
        found = []
        for scale in (1 + step, 1 - step):
            with torch.no_grad(), mh.steer(made, heads, scale=scale):
                found.append(loss(made(x), None).mean().item())
        return (found[0] - found[1]) / (2 * step)

    return slope, importance(made, [lambda: made(x)], loss, reduction="signed").grid


def test_a_gate_has_the_gradient_of_the_loss_by_a_finite_difference(stack):
    slope, signed = stack
    assert slope({1: [2]}) == pytest.approx(signed[1, 2].item(), rel=1e-6)
    assert slope({0: [3]}) == pytest.approx(signed[0, 3].item(), rel=1e-6)


@pytest.mark.parametrize("of", ["o", "v"])
def test_a_head_without_an_output_scores_zero_and_goes_first(of):
    made, ids = multi_head(), tokens()
    weight = getattr(made.attentions[1].project, f"{of}_proj").weight
    with torch.no_grad():
        (weight[:, 8:16] if of == "o" else weight[8:16]).zero_()  # head 1
    assert score(made, ids)[1, 1] == 0
    assert select(made, ids, keep=7 / 8).heads == {1: [1]}


def test_scores_do_not_feel_a_change_of_basis_between_values_and_output():
    made, ids = multi_head(), tokens()
    before = score(made, ids)
    change = torch.randn(8, 8, dtype=torch.float64)
    with torch.no_grad():
        project = made.attentions[0].project
        project.v_proj.weight[:8] = change @ project.v_proj.weight[:8]
        project.o_proj.weight[:, :8] = project.o_proj.weight[:, :8] @ torch.linalg.inv(change)
    torch.testing.assert_close(score(made, ids), before)


def test_where_the_loss_is_linear_the_score_is_what_removal_changes():
    made = multi_head(layers=1)
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    layer = made.attentions[0]
    run = lambda: layer(x, position_ids=torch.arange(5)[None])[0]
    options = {"loss": lambda y, _: y.flatten(1).sum(1), "inputs": [run]}
    torch.testing.assert_close(
        -importance(layer, reduction="signed", **options)[0], ablation(layer, **options)[0]
    )  # fmt: skip


def test_signed_scores_add_up_to_the_derivative_towards_no_heads_at_all(stack):
    slope, signed = stack
    assert slope({0: None, 1: None}) == pytest.approx(signed.sum().item(), rel=1e-6)


def test_finer_absolute_values_are_larger():
    made, ids = multi_head(), tokens()
    each = {name: score(made, ids, name) for name in ("token", "sample", "signed")}
    assert (each["token"] * ids.shape[1] >= each["sample"] - 1e-12).all()
    assert (each["sample"] >= each["signed"].abs() - 1e-12).all()


def test_the_order_does_not_feel_the_scale_of_the_loss_and_layers_have_length_one():
    made, ids = multi_head(), tokens()
    twice = lambda output, batch: 2 * next_token_loss(output, batch)
    assert select(made, ids, keep=0.5).heads == select(made, ids, keep=0.5, loss=twice).heads
    lengths = measure_of("gradient-by-layer")(made, [ids]).grid.norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_in_one_step_or_step_by_step_with_fixed_scores():
    made, ids = multi_head(), tokens()
    table = measure_of("gradient-by-layer")(made, [ids])
    whole = select(made, ids, keep=0.5, by=table)
    assert select(made, ids, keep=0.5, by=table, again=1).heads == whole.heads
    small = made
    for index, step in enumerate(whole.steps):
        gone = [head for before in whole.steps[:index] if before.layer == step.layer for head in before.heads]
        small = prune(small, {step.layer: [head - sum(other < head for other in gone) for head in step.heads]})
    torch.testing.assert_close(logits(small, ids), logits(prune(made, whole), ids), rtol=0, atol=1e-12)


def test_permuted_heads_have_permuted_scores():
    made, ids = multi_head(), tokens()
    before = score(made, ids)
    order = [2, 0, 3, 1]
    rows = torch.arange(32).view(4, 8)[order].flatten()
    with torch.no_grad():
        for name, linear in made.attentions[0].project.named_children():
            linear.weight.copy_(linear.weight[:, rows] if name == "o_proj" else linear.weight[rows])
    after = score(made, ids)
    torch.testing.assert_close(after[0], before[0][order])
    torch.testing.assert_close(after[1], before[1])


@pytest.mark.parametrize("least", [1, 2, 3])
def test_no_layer_falls_below_the_number_it_keeps(least):
    made, ids = multi_head(layers=3), tokens()
    choice = select(made, ids, keep=least / 4, by="output", at_least=least)
    assert prune(made, choice).config.heads == [least] * 3
    with pytest.raises(ValueError, match=r"out of reach: at least"):
        select(made, ids, keep=least / 4 - 0.05, at_least=least)


def test_pruned_heads_take_their_parameters_and_cache():
    made = multi_head(layers=1)
    small, layer = prune(made, {0: [1]}), made.attentions[0]
    count = lambda each: sum(p.numel() for p in each.parameters())
    assert count(layer) - count(small.attentions[0]) == 4 * 8 * 32
    costs = [each.spec.cost(32, each.heads).cache_floats for each in (layer, small.attentions[0])]
    assert costs[0] - costs[1] == 2 * 8


def test_a_key_head_stays_while_a_query_reads_it():
    made = mh.adopt(model())
    with pytest.raises(ValueError, match="no equal groups"):
        prune(made, {0: [1]})
    small = prune(made, {0: [1]}, regroup="map")
    assert small.attentions[0].project.k_proj.weight.shape[0] == made.attentions[0].project.k_proj.weight.shape[0]
