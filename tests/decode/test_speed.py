"""The choice of a tree from costs and odds."""

import pytest
import torch
from tests.stack.tiny import model

from manyheads.decode import Costs, costs, plan
from manyheads.decode.speed import grow

ODDS = torch.tensor([[0.6, 0.2, 0.1], [0.5, 0.3, 0.0]], dtype=torch.float64)


def test_costs_lie_on_lines_between_what_was_measured():
    cost = Costs((1, 2, 4), (1.0, 2.0, 3.0))
    assert [cost(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 2.0, 2.5, 3.0, 4.0]
    assert Costs((2,), (3.0,))(1) == 3.0


def test_nodes_come_from_the_likeliest_on_each_after_its_parent():
    found = dict(grow(ODDS))
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert found[0,] == 0.6 and found[0, 1] == pytest.approx(0.18) and found[2, 0] == pytest.approx(0.05)
    assert len(found) == 3 + 3 * 2  # nothing that cannot come
    seen = {()}
    for path in found:
        assert path[:-1] in seen
        seen.add(path)


def test_rows_that_cost_nothing_give_the_whole_tree_and_rows_at_full_price_none():
    free = plan(ODDS, lambda rows: 1.0)
    assert len(free.tree) == 10 and free.tokens == pytest.approx(1 + 0.9 + 0.9 * 0.8) and free.gain == free.tokens
    dear = plan(ODDS, lambda rows: float(rows))
    assert dear.plain and dear.gain == 1.0 and dear.tokens == 1.0
    assert plan(ODDS, lambda rows: 1.0, most=3).tree.paths == ((), (0,), (0, 0))
    assert plan(ODDS, lambda rows: 1.0, draft=5.0).plain


def test_the_plan_is_the_best_of_all_sizes():
    def cost(rows):
        return 1.0 + 0.06 * (rows - 1)

    best = plan(ODDS, cost)
    tokens, gains = 1.0, []
    for count, (_, chance) in enumerate(grow(ODDS), 2):
        tokens += chance
        gains.append(tokens / cost(count))
    assert best.gain == pytest.approx(max(gains)) and len(best.tree) == 2 + gains.index(max(gains))


def test_a_model_is_timed_once():
    made = model("gqa")
    first = costs(made, 2, 20, (1, 4))
    assert first.batch == 2 and len(first.seconds) == 2 and min(first.seconds) > 0
    assert costs(made, 2, 30, (1, 4)) is first and costs(made, 1, 20, (1, 4)) is not first
