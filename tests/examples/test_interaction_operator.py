"""The operator span of a layer is its heads, and a state space is as many factorised heads as its span."""

import pytest
import torch
from examples.interaction_operator import (
    DIM,
    LENGTH,
    SPECS,
    causal,
    factorised,
    layer,
    missed,
    operator,
    reach,
    selective,
    span,
    state_space,
)


@pytest.mark.parametrize("name", SPECS)
def test_span_is_the_number_of_heads(name):
    spec, maps = SPECS[name]
    for seed, heads in enumerate((1, 2, 3)):
        assert span(operator(*layer(spec, heads, seed))) == maps * heads


def test_the_operators_add_up_to_the_layer():
    for spec in ("gqa + rope", "gqa + rope(none) + retention(first=1)", "gqa + rope(none) + ssd"):
        made, x = layer(spec, 2, 0)
        torch.testing.assert_close(
            torch.einsum("ijab,jb->ia", operator(made, x), x), made(x[None])[0].detach(), atol=1e-12, rtol=1e-11
        )


def test_no_more_than_pairs_of_tokens():
    """n (n + 1)/2 of them, less the n - 1 that are known as the weights of a query sum to one."""
    made, x = layer("gqa + rope", 6, 0)
    assert [span(operator(made, x[:n])) for n in (1, 2, 3, 4)] == [1, 2, 4, 6]


@pytest.mark.parametrize("state", [2, 4])
def test_a_state_space_is_so_many_factorised_heads(state):
    for seed in range(3):
        lags = state_space(3, state, 6, seed)
        k = span(lags)
        assert k == state
        assert missed(lags, k) < 1e-12 and missed(lags, k - 1) > 1e-6


def test_a_number_for_a_decay_is_one_head():
    lags = state_space(3, 4, 6, 0, scalar=True)
    assert span(lags) == 1 and missed(lags, 1) < 1e-12


def test_factorised_heads_are_a_number_a_pair_and_a_map():
    assert span(causal(factorised(state_space(3, 4, 6, 1), 2))) == 2


def test_a_selective_one_has_no_fixed_span():
    spans = [span(selective(6, 2, n, 0)) for n in (1, 2, 4, 8)]
    assert spans[0] == 1 and spans == sorted(spans) and spans[-1] == 36


def test_a_scan_forgets_at_its_rate():
    """|W_ij| of a head of retention at distance t is γᵗ |q_i·k_j| |M|, γ = ½ in its first head."""
    made, x = layer("gqa(bias=qkv) + rope(none) + retention(first=1)", 1, 0)
    for name in "qk":
        made.project.get_parameter(f"{name}_proj.weight").data.zero_()  # products the same for all pairs
    assert reach(operator(made, x)) == pytest.approx(0.5 ** (LENGTH - 2), rel=1e-9)


def test_attention_reaches_any_distance():
    made, x = layer("gqa + rope(none)", 1, 0)
    x[0], x[1:] = 1.0, torch.zeros(LENGTH - 1, DIM)
    x[-1] = 1.0
    made.project.get_parameter("q_proj.weight").data = made.project.get_parameter("k_proj.weight").data = torch.eye(
        DIM, dtype=torch.float64
    )
    assert reach(operator(made, x)) > 10
