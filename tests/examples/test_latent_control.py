"""A small model that knows when it does not know."""

import pytest
import torch
from examples.latent_control import experiment, routed, told


@pytest.mark.slow
def test_the_head_tells_right_answers_from_wrong_ones_and_saves_by_it():
    assert told(torch.tensor([0.9, 0.2, 0.5, 0.5]), torch.tensor([1.0, 0.0, 1.0, 0.0])) == 0.875
    said, right = experiment(160)
    assert 0.3 < right.mean() < 0.7
    assert told(said, right) > 0.7
    for budget in (2.0, 4.0):
        cost, ends, chance = routed(said, right, budget)
        assert cost <= budget and ends > chance + 0.02
