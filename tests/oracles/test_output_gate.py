"""Oracles of the gate that `sqa` and `mlra` are reported with: y = W_O (σ(W_g x) ∘ o)."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, heads_of, join, make, rope, twin, weights


def test_written_out():
    layer, x = make("sqa(ssqa) + output_gate"), batch()
    p = layer.project
    q, k, v = (heads_of(f(x), 2) for f in (p.q_proj, p.k_proj, p.v_proj))
    o = weights(rope(q), rope(k), (DIM / HEADS) ** -0.5) @ v
    gate = torch.sigmoid(x @ layer.gates[0].g_proj.weight.T)
    assert gate.shape[-1] == 2 * DIM // HEADS
    close(layer(x), join(o * heads_of(gate, 2), p.o_proj))


@pytest.mark.parametrize("base", ["sqa", "mlra", "mlra(branches=2, v_dim=5)", "gqa(kv_heads=2)"])
def test_zero_weights_halve_the_layer(base):
    layer, x = make(f"{base} + output_gate"), batch()
    layer.gates[0].g_proj.weight.data.zero_()
    close(layer(x), twin(layer, base)(x) / 2)


@pytest.mark.parametrize("base", ["sqa", "mlra(v_dim=5)"])
def test_cost_and_decode(base):
    layer, x = make(f"{base} + output_gate"), batch()
    close(decoded(layer, x, 4), layer(x))
    cost, plain = (each.spec.cost(DIM, HEADS) for each in (layer, make(base)))
    assert cost.parameters - plain.parameters == DIM * layer.layout.out * layer.layout.v_width
    assert cost.cache_floats == plain.cache_floats
