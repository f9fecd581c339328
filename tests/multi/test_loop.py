"""The loop of tables: curves, the best weights; models of one head of equal total size."""

import pytest
import torch

from manyheads.multi import MultiHead, read_head
from manyheads.multi.fit import make_trunk
from manyheads.multi.loop import fit, measure, parameters, single_width

NAN = float("nan")


def task(rows=60):
    x = torch.randn(rows, 4)
    y = {"a": x[:, 0] * 2 + 1, "b": (x[:, 1] > 0).double(), "late": torch.full((rows,), NAN)}
    y["a"][::3] = NAN
    y["late"][50:] = 1.0  # labels in the held-out rows alone
    return x, y, torch.arange(50), torch.arange(50, rows)


def net(width=8, **heads):
    heads = heads or {"a": "regression", "b": "classification(classes=2)", "late": "regression"}
    return MultiHead(make_trunk(4, width, 1, 0.0), heads, width=width)


def test_curves_end_in_the_best_weights():
    x, y, train, rest = task()
    model, told = net(), []
    history = fit(model, x, y, train, rest, epochs=12, batch=16, lr=0.02, progress=lambda *each: told.append(each))
    held = {name: each[rest] for name, each in y.items()}
    now = measure(model, x[rest], held)
    assert now.loss == history.loss == history.losses[history.best_epoch - 1]
    assert all(len(each) == 12 for curves in history.curves.values() for each in curves.values())
    at = history.best_epoch - 1
    assert history.curves["a"]["held_out"][at] == now.losses["a"]
    assert history.curves["b"]["metric"][at] == now.metrics["b"]["accuracy"]
    assert history.curves["late"]["train"] == [None] * 12 and history.curves["late"]["held_out"][0] > 0
    assert history.curves["a"]["train"][-1] < history.curves["a"]["train"][0]
    assert told[-1] == (12, 12)


def test_patience_ends_it_and_an_infinite_loss_is_an_error():
    x, y, train, rest = task()
    y["a"] = torch.randn(60)
    del y["late"]
    told = []
    history = fit(net(), x, y, train, rest, epochs=200, patience=3, lr=0.1, progress=lambda *each: told.append(each))
    assert len(history.losses) == history.best_epoch + 3 < 200 and told[-1] == (200, 200)
    with pytest.raises(FloatingPointError, match=r"in epoch 1; a lower learning rate may help"):
        fit(net(), x * 1e30, {"a": y["a"]}, train, rest, epochs=2)


def test_singles_are_the_widest_that_are_together_no_larger():
    heads = {"a": read_head("regression"), "b": read_head("classification(classes=5)"), "c": read_head("density")}

    def trunk(width):
        return make_trunk(7, width, 2, 0.1)

    def total(width):
        return sum(parameters(MultiHead(trunk(width), {name: head}, width=width)) for name, head in heads.items())

    one = parameters(MultiHead(trunk(32), heads, width=32))
    width = single_width(trunk, heads, 32)
    assert total(width) <= one < total(width + 1) and 1 < width < 32
    assert single_width(trunk, heads, 32, budget=1) == 1
    assert single_width(trunk, {"a": heads["a"]}, 32) == 32  # one head alone is the model itself
