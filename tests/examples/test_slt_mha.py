"""Masks of a random layer make another layer of it, with an error that halves with each channel more."""

import pytest
import torch
from examples.slt_mha import DIM, GROUPS, HEADS, apart, draw, factors, found, layer, predicted, products, slope, subset


def test_the_error_falls_as_predicted():
    medians = {g: sum(found(g, seed)[0].median for seed in range(3)) / 3 for g in (4, 7, 10)}
    assert -1.5 < slope(medians) < -0.7
    assert all(predicted(g) / 3 < median < 4 * predicted(g) for g, median in medians.items())


def test_outputs_are_near_whatever_the_length():
    for seed in range(3):
        ticket, target = found(12, seed)
        short, long = (apart(ticket.model, target, length) for length in (8, 256))
        assert short < 100 * ticket.largest and long < 100 * ticket.largest


def test_a_ticket_is_zeros_among_the_source_and_nothing_else():
    torch.manual_seed(5)
    torch.manual_seed(5)
    draw(layer(DIM), 0.5)
    source = draw(layer(DIM * 6))
    ticket, _ = found(6, 5)
    for before, after in zip(source.parameters(), ticket.model.parameters(), strict=True):
        assert ((after == before) | (after == 0)).all() and (after == 0).any()
    zeros = sum((p == 0).sum().item() for p in ticket.model.parameters())
    assert ticket.kept == pytest.approx(1 - zeros / sum(p.numel() for p in ticket.model.parameters()))


def test_factors_are_those_of_the_layer():
    """Its output from the merged maps alone, M and N of each head."""
    torch.manual_seed(0)
    model = draw(layer(5))
    m, n = products(model)
    x = torch.randn(7, DIM, dtype=torch.float64)
    want = ((x @ m @ x.T).softmax(-1) @ x @ n).sum(0)
    assert len(m) == HEADS and factors(model)[0].shape == (HEADS, DIM, 5)
    torch.testing.assert_close(model(x[None])[0], want)


def test_a_planted_subset_is_found():
    torch.manual_seed(0)
    numbers, planted = torch.rand(20, 8, dtype=torch.float64), torch.rand(20, 8) < 0.5
    torch.testing.assert_close(subset(numbers, (numbers * planted).sum(-1)), planted)


def test_the_published_setting():
    medians = {g: sum(found(g, seed)[0].median for seed in range(3)) / 3 for g in GROUPS}
    assert slope(medians) == pytest.approx(slope({g: predicted(g) for g in GROUPS}), abs=0.2)
