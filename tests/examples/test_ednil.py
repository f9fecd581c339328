"""What holds when colours are reversed."""

import torch
from examples.ednil import accuracy, alternate, draw, plain, told_apart, world


def test_a_plain_learner_falls_with_the_colours_and_an_invariant_one_does_not():
    torch.manual_seed(0)
    rows, same, reversed_ = world(), draw(2000, 0.9), draw(2000, 0.1)
    assert abs(rows.agrees.double().mean() - 0.85) < 0.03
    model, p = alternate(rows, 100)
    assert told_apart(p, rows.agrees) > 0.9 > rows.agrees.double().mean()
    assert accuracy(model, reversed_) > 0.6 and accuracy(model, same) > 0.65
    erm = plain(rows, 200)
    assert accuracy(erm, same) > 0.85 and accuracy(erm, reversed_) < 0.4
