"""All networks that instances of parts make."""

import torch
from examples.combinatorial_aggregation import Combined, consistency, draw, measure, train


def test_networks_are_counted_and_a_step_uses_each_instance_once():
    model = Combined(3)
    assert len(set(model.every())) == 27
    drawn = model.drawn()
    assert len(drawn) == 3 and all(sorted(part) == [0, 1, 2] for part in zip(*drawn, strict=True))


def test_instances_that_are_one_average_to_it():
    model, (x, y) = Combined(3, near=True), draw(20)
    torch.testing.assert_close(model.averaged()(x, (0, 0, 0)), model(x, (2, 0, 1)))
    single, together = measure(model, x, y)
    assert abs(single - together) < 1e-5


def test_consistency_is_none_just_of_equal_predictions():
    logits = torch.randn(3, 5, 4)
    assert consistency(logits) > 0 and abs(consistency(logits[:1].expand(3, 5, 4) + 2)) < 1e-6
    p = logits.softmax(-1)
    want = torch.stack([(p.mean(0) * (p.mean(0) / each).log()).sum(-1).mean() for each in p]).mean()
    torch.testing.assert_close(consistency(logits), want)


def test_together_they_are_better_than_one():
    torch.manual_seed(0)
    (x, y), test = draw(100), draw(2000)
    plain = measure(train(Combined(1), x, y, 120), *test)[0]
    single, together = measure(train(Combined(3), x, y, 120), *test)
    assert together < single and together < plain
    near = train(Combined(3, near=True), x, y, 120, 1.0)
    assert measure(near.averaged(), *test)[0] < measure(near, *test)[0] + 0.1
