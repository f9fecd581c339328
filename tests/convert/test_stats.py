import math

import pytest
import torch
from tests.convert.tiny import VOCAB, inputs, layer, measured, model, tokens
from tests.oracles.reference import close

from manyheads.convert.stats import measure, power, sensitivity
from manyheads.core.mask import Axis

T, DIM, HEADS, GROUPS, WIDTH = 6, 8, 4, 2, 4
SPEC = f"gqa(kv_heads={GROUPS}, head_dim={WIDTH}, bias=qkvo)"


def small(spec=SPEC):
    return layer(spec, dim=DIM, heads=HEADS), inputs(windows=2, tokens=T, dim=DIM)


def rotated(source, rows):
    return source._turn(rows.transpose(0, 1)[None], "q", Axis(len(rows), 0))[0]


def derivatives(source, window, metric, size=None, cap=None):
    """How R y moves with each score `[T, D, H, T, T]` and with each query head's own values `[T, D, H, T, v]`."""
    project = source.project
    q = rotated(source, project.q_proj(window).view(T, HEADS, WIDTH))
    k = rotated(source, project.k_proj(window).view(T, GROUPS, WIDTH)).repeat_interleave(2, 0)
    v = project.v_proj(window).view(T, GROUPS, WIDTH).transpose(0, 1).repeat_interleave(2, 0)
    lag = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (lag < 0) | (lag >= (size or T))

    def y(score_error, value_error):
        scores = q @ k.transpose(1, 2) * source.layout.scale + score_error
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        o = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ (v + value_error)
        return project.o_proj(o.transpose(0, 1).flatten(1)) @ metric.T

    return torch.autograd.functional.jacobian(y, (torch.zeros(HEADS, T, T).double(), torch.zeros_like(v)))


@pytest.mark.parametrize(
    ("spec", "size", "cap"),
    [(SPEC, None, None), (f"{SPEC} + window(3)", 3, None), (f"{SPEC} + softmax(cap=0.3)", None, 0.3)],
)
@pytest.mark.parametrize("plain", [True, False])
def test_measure_is_its_definition(spec, size, cap, plain):
    """Weights of errors in scores and values are squared derivatives of the layer's output, in the metric."""
    source, x = small(spec)
    metric = torch.eye(DIM).double() if plain else torch.randn(DIM, DIM).double()
    stats = measure(source, x, metric)
    felt = metric @ source.project.o_proj.weight
    query, value = torch.zeros(HEADS, WIDTH, WIDTH).double(), torch.zeros(HEADS).double()
    distance, key_tokens, value_tokens = torch.zeros(HEADS, T).double(), [], []
    for window in x:
        by_score, by_value = derivatives(source, window, metric, size, cap)
        weight = by_score.pow(2).sum((0, 1))  # [H, T, T]
        share = by_value.pow(2).sum((0, 1, 4)) / felt.view(DIM, HEADS, WIDTH).pow(2).sum((0, 2))[:, None]  # Σ_i a_ij²
        q = source.project.q_proj(window).view(T, HEADS, WIDTH)
        query += torch.einsum("hij,ihd,ihe->hde", weight, q, q) / (len(x) * T)
        value += share.sum(1) / (len(x) * T)
        far = weight * (torch.arange(T) > 0)  # without the first token
        for lag in range(T):
            distance[:, lag] += far.diagonal(-lag, 1, 2).sum(-1)
        key_tokens.append(weight.sum((0, 1)) / HEADS)
        value_tokens.append(share.mean(0))
    close(stats.query, query, 1e-8)
    close(stats.value, value, 1e-8)
    close(stats.distance, distance / distance.sum(1, keepdim=True), 1e-8)
    key_weights, value_weights = (torch.stack(each) / torch.stack(each).mean() for each in (key_tokens, value_tokens))
    ones = torch.cat([x, torch.ones(len(x), T, 1)], -1)

    def moment(weights):
        weights = weights.clamp(max=20)
        return torch.einsum("nt,ntd,nte->de", weights, ones, ones) / (len(x) * T)

    close(stats.keys, moment(key_weights), 1e-8)
    close(stats.rows, moment((key_weights + value_weights) / 2), 1e-8)
    assert torch.equal(stats.metric, metric)


def test_a_key_error_costs_what_the_weight_says():
    """By finite differences of the layer: tiny random errors in one key head, drawn anew for every token."""
    source, x = small("gqa(kv_heads=2, head_dim=4) + rope(none)")
    stats, project, step = measured(source, x), source.project, 1e-4
    write, metric = project.write, torch.randn(WIDTH, WIDTH).double()
    plain, costs = source(x)[0], []
    for _ in range(400):
        noise = step * torch.randn(len(x), T, WIDTH).double() @ metric

        def noisy(flow, noise=noise):
            rows = write(flow)
            rows["k"] = rows["k"].clone()
            rows["k"][:, 0] += noise
            return rows

        project.write = noisy
        costs.append((source(x)[0] - plain).pow(2).sum() / (len(x) * T * step**2))
    del project.write
    felt = (stats.query[:2] * source.layout.scale**2).sum(0)  # of the two query heads that read it
    assert abs(torch.stack(costs).mean() / torch.trace(metric @ felt @ metric.T) - 1) < 0.1


def test_rows_of_distances_sum_to_one_and_end_with_the_window():
    source, x = small(f"{SPEC} + window(3)")
    distance = measured(source, x).distance
    close(distance.sum(1), torch.ones(HEADS).double(), 1e-9)
    assert distance[:, 3:].abs().max() == 0


def test_positions_that_jump_are_distances_that_grow():
    source, x = small()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 40, 41, 90]])
    stats = measure(source, x, torch.eye(DIM).double(), positions)
    assert stats.distance.shape == (HEADS, 91)
    lags = {int(a - b) for row in positions for a in row for b in row[1:] if a >= b}
    felt = set(stats.distance.sum(0).nonzero()[:, 0].tolist())
    assert felt == lags
    close(stats.distance.sum(1), torch.ones(HEADS).double(), 1e-9)
    moved = measure(source, x, torch.eye(DIM).double(), positions + 7)  # scores see distances only
    close(moved.query, stats.query, 1e-7)
    close(moved.distance[:, :91], stats.distance, 1e-7)


def test_one_window_or_many_are_one_average():
    source, x = small()
    both, twice = measured(source, x), measured(source, torch.cat([x, x]))
    for a, b in zip(both, twice, strict=True):
        close(a, b, 1e-9)


def test_a_scaled_metric_scales_what_queries_cost_and_nothing_else():
    source, x = small()
    plain, scaled = measured(source, x), measured(source, x, 3 * torch.eye(DIM).double())
    close(scaled.query, 9 * plain.query, 1e-9)
    for name in ("keys", "rows", "distance", "value"):
        close(getattr(scaled, name), getattr(plain, name), 1e-9)


def test_float32_agrees_with_float64():
    source, x = small()
    wide = measured(source, x)
    narrow = measured(source.float(), x.float())
    for a, b in zip(wide, narrow, strict=True):
        close(b.double(), a.double(), 1e-3)
    assert narrow.keys.dtype == torch.float64


def after_attention(made):
    return [layer.post_attention_layernorm for layer in made.model.layers]


def test_sensitivity_is_the_fisher_information():
    """On a model of one layer a position's stream reaches its own prediction only: every label can be tried."""
    made = model(layers=1, vocab_size=7, hidden_size=8, num_attention_heads=2, num_key_value_heads=1)
    windows = torch.randint(0, 7, (600, 5))
    places = after_attention(made)
    (moment,) = sensitivity(made, windows, places, batch=100)
    streams = []
    handle = places[0].register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    with torch.no_grad():
        made(windows)
    handle.remove()
    stream = streams[0][:, 1:].flatten(0, 1).requires_grad_()
    block = made.model.layers[0]
    logits = made.lm_head(made.model.norm(stream + block.mlp(block.post_attention_layernorm(stream))))
    p = logits.softmax(-1).detach()
    size = stream.detach().pow(2).mean(-1, keepdim=True).sqrt()
    want = torch.zeros(8, 8)
    for label in range(7):
        (g,) = torch.autograd.grad(-logits.log_softmax(-1)[:, label].sum(), stream, retain_graph=True)
        g = g * size
        want += (p[:, label, None] * g).T @ g / windows.numel()
    assert (moment - want).norm() < 0.1 * want.norm()  # one drawn label a position: 2,400 draws
    close(moment, moment.T, 1e-6)


def test_sensitivity_leaves_the_model_as_it_was():
    made = model()
    frozen = made.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    a = sensitivity(made, tokens(), after_attention(made))
    b = sensitivity(made, tokens(), after_attention(made), batch=8)
    assert not frozen.requires_grad
    assert all(p.requires_grad for p in made.parameters() if p is not frozen)
    assert all(p.grad is None for p in made.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())
    assert not any(place._forward_pre_hooks for place in after_attention(made))
    assert [each.shape for each in a] == [(32, 32)] * 2 and len(b) == 2
    assert torch.linalg.eigvalsh(a[0]).min() > -1e-5 * a[0].diagonal().max()


def test_sensitivity_restores_the_model_when_it_fails():
    made = model()
    with pytest.raises(IndexError):
        sensitivity(made, torch.full((1, 4), VOCAB), after_attention(made))
    assert all(p.requires_grad for p in made.parameters())
    assert not any(place._forward_pre_hooks for place in after_attention(made))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_powers_of_a_matrix_do_not_know_its_unit(scale):
    factor = torch.randn(6, 6).double()
    matrix = factor @ factor.T
    root = power(scale * matrix, 0.5, 0.0)
    close(root @ root / scale, matrix, 1e-9)
    close(power(scale * matrix, -0.5, 0.0) @ root, torch.eye(6).double(), 1e-8)
    damped = power(scale * matrix, 1.0, 0.1) / scale
    close(damped, matrix + 0.1 * matrix.diagonal().mean() * torch.eye(6).double(), 1e-9)


def test_powers_of_nothing_are_still_invertible():
    root = power(torch.zeros(3, 3), 0.5)
    assert torch.linalg.solve(root, root).isfinite().all() and math.isfinite(root.sum())
