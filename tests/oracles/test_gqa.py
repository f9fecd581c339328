"""Oracles of `gqa`; those of conversion are with the moves."""

import torch
from tests.oracles.reference import HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Cache

WIDTH = 6


def repeated(weight, times):
    """Each head's rows `times` times in a row: repeat_interleave, not tiling."""
    return weight.unflatten(0, (-1, WIDTH)).repeat_interleave(times, 0).flatten(0, 1)


def as_mha(layer, times):
    k, v = (repeated(p.weight.detach(), times) for p in (layer.project.k_proj, layer.project.v_proj))
    return twin(layer, "gqa", project__k_proj__weight=k, project__v_proj__weight=v)


def test_all_heads_is_mha_bit_for_bit():
    layer, x = make("gqa"), batch()
    assert torch.equal(twin(layer, "gqa(kv_heads=4)")(x), layer(x))


def test_mha_written_out():
    layer, x = make("gqa"), batch()
    p = layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    close(layer(x), join(weights(rope(q), rope(k), WIDTH**-0.5) @ v, p.o_proj))


def test_equals_mha_with_repeated_heads_and_gradients_sum_over_the_group():
    layer, x = make("gqa(kv_heads=2)"), batch()
    other = as_mha(layer, 2)
    close(layer(x), other(x))
    for each in (layer, other):
        each(x).pow(2).sum().backward()
    for name in ("k_proj", "v_proj"):
        copies = getattr(other.project, name).weight.grad.unflatten(0, (2, 2, WIDTH))
        close(getattr(layer.project, name).weight.grad, copies.sum(1).flatten(0, 1), 1e-9)


def test_equal_queries_in_a_group_merge():
    layer, x = make("gqa(kv_heads=2)"), batch()
    q = layer.project.q_proj.weight.detach().unflatten(0, (2, 2, WIDTH)).clone()
    q[:, 1] = q[:, 0]
    layer = twin(layer, "gqa(kv_heads=2)", project__q_proj__weight=q.flatten(0, 2))
    o = layer.project.o_proj.weight.detach().unflatten(1, (2, 2, WIDTH)).sum(2).flatten(1)
    merged = make(f"gqa(head_dim={WIDTH})", heads=2)
    merged.load_state_dict(
        layer.state_dict() | {"project.q_proj.weight": q[:, 0].flatten(0, 1), "project.o_proj.weight": o}
    )
    close(layer(x), merged(x))


def permuted(layer, order, spec, kv=None):
    """Query heads (and, by `kv`, key heads) in another order, W_O with them."""
    state = {name: value.clone() for name, value in layer.state_dict().items()}

    def rows(name, index):
        return state[name].unflatten(0, (-1, WIDTH))[index].flatten(0, 1)

    changes = {"project__q_proj__weight": rows("project.q_proj.weight", order)}
    o = state["project.o_proj.weight"].unflatten(1, (-1, WIDTH))[:, order].flatten(1)
    changes["project__o_proj__weight"] = o
    for name in ("k_proj", "v_proj") if kv is not None else ():
        changes[f"project__{name}__weight"] = rows(f"project.{name}.weight", kv)
    return twin(layer, spec, **changes)


def test_permuting_groups_and_heads_inside_a_group():
    layer, x = make("gqa(kv_heads=2)"), batch()
    close(permuted(layer, [2, 3, 0, 1], "gqa(kv_heads=2)", [1, 0])(x), layer(x))
    close(permuted(layer, [1, 0, 2, 3], "gqa(kv_heads=2)")(x), layer(x))
    differ(permuted(layer, [2, 1, 0, 3], "gqa(kv_heads=2)")(x), layer(x))


def test_mean_pooled_weights_cache_the_mean_of_rotated_keys():
    layer, x = make("gqa"), batch()
    pooled = {
        f"project__{name}__weight": getattr(layer.project, name)
        .weight.detach().unflatten(0, (2, 2, WIDTH)).mean(1).flatten(0, 1)
        for name in ("k_proj", "v_proj")
    }  # fmt: skip
    few = twin(layer, "gqa(kv_heads=2)", **pooled)
    many_cache, few_cache = Cache(), Cache()
    decoded(layer, x, 4, many_cache), decoded(few, x, 4, few_cache)
    for name in ("k", "v"):
        mean = many_cache.site(0).growing[name].rows().unflatten(1, (2, 2)).mean(2)
        close(few_cache.site(0).growing[name].rows(), mean)


def test_decode_and_a_row_that_sees_nothing():
    layer, x = make("gqa(kv_heads=2)"), batch().requires_grad_()
    close(decoded(layer, x), layer(x))
    mask = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask[..., 3, :] = False
    y = layer(x, mask=mask)
    y.sum().backward()
    assert torch.equal(y[:, 3], torch.zeros_like(y[:, 3])) and x.grad.isfinite().all()


def test_cost():
    cost = make("gqa(kv_heads=2)").spec.cost(24, HEADS)
    assert cost.parameters == 24 * WIDTH * (2 * HEADS + 2 * 2) and cost.cache_floats == 2 * 2 * WIDTH
