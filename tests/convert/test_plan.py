import pytest

from manyheads.convert.plan import SMALLEST_LATENT, BudgetError, Shape, check_uniform, make_goal, read_budget
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec

SHAPE = Shape(kv_heads=6, qk_width=64, v_width=32)


def test_a_shape_knows_its_cache():
    assert (SHAPE.floats, SHAPE.head) == (6 * 96, 96)


@pytest.mark.parametrize(("text", "floats"), [("50%", 288), (" 12.5 % ", 72), ("192", 192), ("33%", 190), ("100", 100)])
def test_budgets(text, floats):
    assert read_budget(text, SHAPE) == floats


@pytest.mark.parametrize("text", ["", "half", "-5%", "50%%", "5e2", "50 percent", "nan"])
def test_what_is_no_budget_says_how_one_reads(text):
    with pytest.raises(BudgetError, match=r"50%.*192"):
        read_budget(text, SHAPE)


@pytest.mark.parametrize("text", ["100%", "576", "250%", "99999"])
def test_a_budget_of_everything_merges_nothing_and_clips_the_latent_with_a_note(text):
    with pytest.raises(BudgetError, match="the source caches 576 numbers"):
        make_goal(text, "gqa", SHAPE)
    goal = make_goal(text, "mla", SHAPE)
    assert goal.rank + 2 * goal.turning == SHAPE.floats
    said = "nothing is saved" if goal.floats == SHAPE.floats else f"clipped to {goal.rank}"
    assert goal.note is not None and said in goal.note


@pytest.mark.parametrize(("to", "smallest"), [("mla", SMALLEST_LATENT), ("gqa", 96)])
def test_the_smallest_budget_is_reached_and_the_next_below_is_refused_with_it(to, smallest):
    assert make_goal(str(smallest), to, SHAPE).floats == smallest
    with pytest.raises(BudgetError, match=rf"the smallest is {smallest} "):
        make_goal(str(smallest - 1), to, SHAPE)


@pytest.mark.parametrize("to", ["mla", "gqa", "auto"])
@pytest.mark.parametrize("text", ["8", "9", "20", "25%", "96", "50%", "97%", "575"])
@pytest.mark.parametrize("shape", [SHAPE, Shape(1, 64, 64), Shape(8, 8, 8), Shape(7, 6, 4)])
def test_every_goal_fits_its_budget(text, to, shape):
    try:
        goal = make_goal(text, to, shape)
    except BudgetError:
        return
    assert goal.to == to and goal.floats == read_budget(text, shape)
    assert goal.kv_heads * shape.head <= goal.floats
    assert goal.kv_heads == 0 or shape.kv_heads % goal.kv_heads == 0 < shape.kv_heads
    assert to != "gqa" or goal.kv_heads > 0
    if to != "gqa":
        assert goal.rank >= 1 and goal.turning >= 1
        assert goal.rank + 2 * goal.turning == min(goal.floats, shape.floats)
        assert (goal.note is None) == (goal.floats <= shape.floats)
        assert 2 * goal.turning <= shape.kv_heads * shape.qk_width


def test_names_tell_goals_apart():
    texts = ["50%", "25%", "12.5%", "288", "144", "12"]
    names = [make_goal(text, "mla", SHAPE).name for text in texts]
    assert names == ["mla-50", "mla-25", "mla-12.5", "mla-288f", "mla-144f", "mla-12f"]
    assert make_goal(" 50 % ", "auto", SHAPE).name == "auto-50"


def test_layers_must_be_alike():
    specs = [Spec.parse("gqa(kv_heads=2)"), Spec.parse("gqa(kv_heads=4)")]
    assert check_uniform(specs, [SHAPE, SHAPE]) == SHAPE
    with pytest.raises(OptionError, match=r"kv_heads=2.*kv_heads=4"):
        check_uniform(specs, [SHAPE, Shape(4, 64, 32)])
