"""Which heads learn, by what has been learned."""

import pytest
import torch
from torch import nn

from manyheads.multi import Curriculum, MultiHead

ORDER = ["2", "3", "4", "5"]


def walk(plan, rounds=5):
    active, seen = plan.start(), []
    for _ in range(rounds):
        seen.append(active)
        active = plan.after(active, dict.fromkeys(active, 0.99))
    return seen


def test_heads_join_and_leave():
    assert walk(Curriculum(ORDER)) == [("2",), ("2", "3"), ("2", "3", "4"), tuple(ORDER), tuple(ORDER)]
    assert walk(Curriculum(ORDER, window=2)) == [("2",), ("2", "3"), ("3", "4"), ("4", "5"), ("4", "5")]
    assert walk(Curriculum(ORDER, window=1), 4) == [("2",), ("3",), ("4",), ("5",)]
    assert walk(Curriculum(ORDER, window=9)) == walk(Curriculum(ORDER))


def test_both_accuracies_must_be_above():
    plan = Curriculum(ORDER)
    assert plan.after(("2", "3"), {"2": 1.0, "3": 0.97}) == ("2", "3")
    assert plan.after(("2", "3"), {"2": 0.9, "3": 1.0}) == ("2", "3")
    assert plan.after(("2",), {"2": 0.98}) == ("2",)
    assert plan.after(("2", "3"), {"2": 0.97, "3": 1.0}) == ("2", "3", "4")


def test_a_task_keeps_its_head_or_one_head_has_all():
    assert Curriculum(ORDER).head("4") == "4"
    assert Curriculum(ORDER, window=1, reuse=True).head("4") == "2"


def test_heads_that_do_not_learn_stay_as_they_are():
    net = MultiHead(nn.Linear(3, 4), {name: "classification(classes=2)" for name in ORDER})
    before = {name: net.net(name).weight.clone() for name in ORDER}
    optimiser = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1)
    active = Curriculum(ORDER, window=2).after(("2", "3"), {"2": 1.0, "3": 1.0})
    net(torch.randn(5, 3), targets={name: torch.randint(2, (5,)) for name in ORDER}, heads=active).loss.backward()
    optimiser.step()
    assert {name for name in ORDER if not torch.equal(net.net(name).weight, before[name])} == set(active) == {"3", "4"}


def test_what_is_refused():
    for options in ({"order": []}, {"order": ["a", "a"]}, {"order": ["a"], "enough": 1.0},
                    {"order": ["a"], "window": -1}, {"order": ["a"], "reuse": True}):  # fmt: skip
        with pytest.raises(ValueError, match="curriculum"):
            Curriculum(**options)
    with pytest.raises(ValueError, match="no accuracy of '3'"):
        Curriculum(ORDER).after(("2", "3"), {"2": 1.0})
    with pytest.raises(ValueError, match="are not learned here"):
        Curriculum(ORDER).after(("9",), {"9": 1.0})
