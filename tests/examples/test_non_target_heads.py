"""Heads on inputs of other tasks."""

import copy

import torch
from examples.non_target_heads import HEADS, accuracy, causal, draw, found, models, train


def test_rows_are_as_they_say():
    rows = draw("sum", 50)
    assert (
        (rows.marked.sum(1) == 2).all()
        and torch.equal(rows.x[..., 6], rows.marked.float())
        and (rows.x[..., 7] == 0).all()
    )
    assert torch.equal((rows.x[..., :6].argmax(-1) * rows.marked).sum(1), rows.total)
    assert draw("copy").x[..., 7].sum() == 128


def test_all_heads_at_once_are_each_alone_on_one_run_of_the_trunk_and_nothing_is_changed():
    model = train(("sum", "copy"), 1)
    ran, rows = [], draw("sum")
    model.trunk.register_forward_hook(lambda *_: ran.append(1))
    out = model(rows.x).outputs
    assert len(ran) == 1
    state = copy.deepcopy(model.state_dict())
    for name in HEADS:
        assert torch.equal(model(rows.x, heads=[name]).outputs[name], out[name])
    found(model, rows), causal(model, rows)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_control_of_the_same_weights_shows_no_effect():
    model, rows = train(("sum", "copy"), 1), draw("sum")
    assert found(copy.deepcopy(model), rows) == found(model, rows)
    assert accuracy(model, rows, torch.zeros_like(rows.marked)) == accuracy(model, rows)


def test_the_span_head_points_at_what_is_added_up_only_where_both_were_learned_together():
    every = models(250)
    torch.manual_seed(1)
    own, other = draw("copy", 500), draw("sum", 500)
    both, alone = every["both tasks"], every["copy alone"]
    assert found(both, own).f1 > 0.95 and found(alone, own).f1 > 0.95
    assert found(both, other).f1 > found(alone, other).f1 + 0.2
    assert found(both, other).f1 > found(every["copy, trunk of none"], other).f1 + 0.2
    whole, pointed, others = causal(both, other)
    assert whole > 0.9 and others > 0.9 and pointed < 0.5
