"""A layer with random scores fits H (n - 1) + 1 examples of one context, and as many labels exactly."""

import pytest
import torch
from examples.memorization_capacity import capacity, draw, features, layer, misfit, rank, saturation, weights


@pytest.mark.parametrize("spec", ["mha", "mqa", "mla(rank=16)", "mha + entmax"])
def test_weights_that_sum_to_one(spec):
    for seed, (heads, length) in enumerate([(2, 3), (4, 4), (4, 7)]):
        assert capacity(spec, heads, length, 32, seed) == heads * (length - 1) + 1


def test_weights_of_free_sum_have_one_more_a_head():
    for seed in range(3):
        assert capacity("mha + cog-attention(soft_ends=false)", 4, 4, 32, seed) == 4 * 4


def test_a_context_for_each():
    for seed in range(3):
        assert capacity("mha", 2, 4, 8, seed, fixed=False, examples=40) == 16
        assert capacity("mha", 2, 4, 8, seed, fixed=False, examples=10) == 10


def test_what_adds_nothing():
    torch.manual_seed(0)
    queries, context = draw(60, 4, 16)
    copied = layer("mha", 16, 4)
    for name in "qk":
        weight = copied.project.get_parameter(f"{name}_proj.weight")
        weight.data[8:] = weight.data[:8]
    assert rank(features(copied, queries, context)) == 2 * 3 + 1
    uniform = layer("mha", 16, 4, scale=0.0)
    assert rank(features(uniform, queries, context)) == 1
    assert rank(features(layer("mha", 16, 4), queries, context[:, :1])) == 1
    own = draw(60, 4, 16, fixed=False)
    assert rank(features(uniform, *own)) == 16


def test_labels_are_fitted_up_to_the_capacity_and_no_further():
    for seed in range(3):
        assert misfit("mha", 4, 4, 32, seed, 13) < 1e-12
        assert misfit("mha", 4, 4, 32, seed, 26) > 0.1


def test_larger_scores_saturate_and_keep_the_rank():
    for seed in range(3):
        shares = [saturation(scale, 4, 4, 16, seed)[0] for scale in (1, 10, 100, 1000, 10000)]
        assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] > 0.95


def test_weights_are_those_of_the_layer():
    torch.manual_seed(0)
    model, (queries, context) = layer("mqa", 16, 4), draw(5, 3, 16)
    found = weights(model, queries, context)
    assert found.shape == (5, 4, 3)
    torch.testing.assert_close(found.sum(-1), torch.ones(5, 4, dtype=torch.float64))
    heads = torch.einsum("thn,tnd->thd", found, model.project.v_proj(context))
    torch.testing.assert_close(model.project.o_proj(heads.flatten(1)), model(queries, context=context)[:, 0])
