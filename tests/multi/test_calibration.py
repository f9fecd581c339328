"""How sure heads are against how right, by hand and on draws from what the heads say themselves."""

import pytest
import torch

from manyheads.multi import Classification, Density, MultiLabel, Ordinal, Ranking, Regression, read_head
from manyheads.multi.calibration import LEVELS, calibration, coverage, reliability

D = torch.float64
NAN = float("nan")


def test_reliability_by_hand():
    likely = torch.tensor([0.95, 0.91, 0.55, 1.0, 0.51], dtype=D)
    found = reliability(likely, torch.tensor([True, False, True, True, False]))
    assert found["count"] == [2, 3] and found["accuracy"] == pytest.approx([1 / 2, 2 / 3])
    assert found["confidence"] == pytest.approx([0.53, (0.95 + 0.91 + 1) / 3])
    assert found["ece"] == pytest.approx(2 / 5 * abs(0.5 - 0.53) + 3 / 5 * abs(2 / 3 - 2.86 / 3))


def test_coverage_by_hand():
    below = torch.tensor([0.5, 0.3, 0.8, 0.02], dtype=D)  # |2u - 1|: 0, 0.4, 0.6, 0.96
    found = coverage(below, (0.1, 0.5, 0.9))
    assert (
        found["covered"] == [0.25, 0.5, 0.75]
        and found["count"] == [4]
        and found["error"] == pytest.approx((0.15 + 0 + 0.15) / 3)
    )


@pytest.mark.parametrize("line", [
    "classification(classes=3)", "ordinal(levels=4)", "matryoshka(classes=3, slices=[2, 4])", "multi-label(labels=2)",
])  # fmt: skip
def test_labels_drawn_from_what_a_head_says_are_calibrated(line):
    head = read_head(line)
    net = head.build(4).to(D)
    out = head.output(net, torch.randn(4000, 4, dtype=D) * 2, None)
    if isinstance(head, MultiLabel):
        target = out.sigmoid().bernoulli()
    else:
        probabilities = head.log_probabilities(out).exp() if isinstance(head, Ordinal) else (
            (out if isinstance(head, Classification) else out[:, -1]).softmax(-1))  # fmt: skip
        said = probabilities.gather(-1, head.predict(out)[:, None]).squeeze(-1)
        torch.testing.assert_close(head.likely(out), said)
        target = torch.multinomial(probabilities, 1).squeeze(-1).double()
    target[::5] = NAN
    found = calibration(head, out, target)
    assert found["kind"] == "reliability" and found["ece"] < 0.04
    assert sum(found["count"]) == 3200 * (2 if isinstance(head, MultiLabel) else 1)
    assert calibration(head, out * 6, target)["ece"] > 0.08  # too sure


@pytest.mark.parametrize("head", [
    Regression(uncertainty=True, shift=5.0, scale=3.0), Regression(uncertainty=True, size=2),
    Density(components=3, shift=-1.0, scale=2.0), Density(components=2, size=2),
])  # fmt: skip
def test_intervals_hold_the_part_of_draws_that_they_should(head):
    net = head.build(4).to(D)
    out = head.output(net, torch.randn(4000, 4, dtype=D), None)
    if isinstance(head, Density):
        target = head.sample(out)
    else:
        target = head.predict(out) + head.deviation(out) * torch.randn_like(head.predict(out))
    target[::4] = NAN
    found = calibration(head, out, target)
    assert found["kind"] == "coverage" and found["level"] == list(LEVELS) and found["error"] < 0.03
    centre = target.nanmean(0)
    assert calibration(head, out, centre + 3 * (target - centre))["error"] > 0.1


def test_below_is_the_distribution_function():
    head, y = Regression(uncertainty=True, shift=2.0, scale=3.0), torch.randn(5, dtype=D) * 3 + 2
    out = torch.randn(5, 1, 2, dtype=D)
    normal = torch.distributions.Normal(head.predict(out), head.deviation(out))
    torch.testing.assert_close(head.below(out, y), normal.cdf(y))
    head, out = Density(components=3, shift=2.0, scale=3.0), torch.randn(5, 3, 3, dtype=D)
    y = y.requires_grad_()
    head.below(out, y).sum().backward()  # its slope is the density
    known = torch.ones(5, dtype=torch.bool)
    torch.testing.assert_close(y.grad, (-head.losses(out, y.detach(), known)).exp() / 3)


def test_heads_that_say_nothing_of_it_and_rows_without_labels():
    out = torch.randn(3, 1)
    assert calibration(Regression(), out, torch.zeros(3)) is None
    assert calibration(Ranking(), torch.randn(2, 3), torch.rand(2, 3)) is None
    assert calibration(Classification(2), torch.randn(3, 2), torch.full((3,), -100)) is None


@pytest.mark.parametrize(("made", "says"), [
    (lambda: reliability(torch.zeros(2), torch.zeros(3)), "no two rows of a length"),
    (lambda: reliability(torch.zeros(0), torch.zeros(0)), "0 predictions in 10 bins"),
    (lambda: reliability(torch.tensor([1.5]), torch.ones(1)), "not from 0 to 1"),
    (lambda: coverage(torch.zeros(0)), "no labels"),
    (lambda: coverage(torch.zeros(1), (0.0,)), "between 0 and 1"),
])  # fmt: skip
def test_figures_that_cannot_be(made, says):
    with pytest.raises(ValueError, match=says):
        made()
