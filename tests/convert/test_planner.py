"""`--to auto`: what each layer becomes, where a budget is spent by what each layer loses."""

import copy
import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.tiny import model, saved, tokens
from transformers import AutoModelForCausalLM

from manyheads.convert.methods import read_method
from manyheads.convert.plan import BudgetError, make_goal, shape_of
from manyheads.convert.planner import Plan, spend, unseen_windows, with_readers
from manyheads.convert.prices import Costs, Option, Prices, between_ranks, price
from manyheads.convert.ranks import Ranks
from manyheads.convert.shrink import refuse, shrink
from manyheads.convert.stream import InMemory, OnDisk
from manyheads.convert.survey import Calibration, survey
from manyheads.convert.verify import quality
from manyheads.core.part import OptionError

GENERATOR = torch.Generator().manual_seed(0)


def option(cost, harm, kind="mla", at=0):
    return Option(kind, at, "", cost, harm)


def goal_of(layers, budget="50%", to="auto"):
    return make_goal(budget, to, shape_of(layers))


def cached(loaded):
    return sum(layer.spec.cost(layer.dim, layer.heads, layer.site).cache_floats for layer in loaded.attentions)


def test_spending_is_the_best_of_all_choices():
    for _ in range(20):
        draws = torch.rand(4, 3, 2, generator=GENERATOR, dtype=torch.float64)
        layers = [[option(int(20 * c), h.item()) for c, h in layer] for layer in draws]
        choices = [c for c in itertools.product(*layers) if sum(o.cost for o in c) <= 40]
        found = spend(layers, 40)
        if not choices:
            assert found is None
            continue
        assert sum(o.cost for o in found) <= 40
        assert sum(o.harm for o in found) == pytest.approx(min(sum(o.harm for o in c) for c in choices))


def test_a_large_budget_is_never_overspent():
    """Costs of millions are counted in coarse steps, and these round up."""
    layers = [[option(1_000_003.0, 0.1), option(3e6, 0.0)] for _ in range(9)]
    found = spend(layers, 1.51e7)
    assert sum(o.cost for o in found) <= 1.51e7
    assert sum(o.harm for o in found) == pytest.approx(0.6)


def test_harms_between_two_prices_fall_from_the_one_to_the_other():
    filled = between_ranks([option(8, 4.0, at=8), option(24, 1.0, at=24), option(99, 0.0, "whole")])
    latents = {each.at: each for each in filled if each.kind == "mla"}
    assert sorted(latents) == [8, 12, 16, 20, 24]
    assert latents[16].harm == pytest.approx(2.0) and latents[16].cost == 16
    assert any(each.kind == "whole" for each in filled)


def test_a_reader_is_taken_where_that_lowers_the_sum():
    whole, small = option(10, 0.0, "whole"), option(2, 1.0)
    prices = Prices([[whole, small]] * 3, {(1, 0): option(0, 0.1, "share", 0), (2, 1): option(0, 0.05, "share", 1)})
    found = with_readers(prices, 12)
    assert [each.kind for each in found] == ["mla", "whole", "share"]
    assert found[2].at == 1 and sum(each.harm for each in found) == pytest.approx(1.05)
    assert [each.kind for each in with_readers(prices, 30)] == ["whole"] * 3  # nothing to save


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A model whose third layer attends as its second does, planned and converted at half its cache."""
    made = model(layers=4)
    made.model.layers[2].self_attn.load_state_dict(made.model.layers[1].self_attn.state_dict())
    layers, folder = InMemory(made), tmp_path_factory.mktemp("plan")
    goal = goal_of(layers)
    shrink(layers, tokens(), [goal], folder)
    return layers, folder, goal


def test_the_plan_keeps_to_the_budget(planned):
    layers, folder, goal = planned
    loaded = AutoModelForCausalLM.from_pretrained(folder / goal.name)
    assert cached(loaded) <= 0.5 * sum(Costs(layers.config, goal.method).of(n) for n in range(4))
    plan = Plan.load(folder / "auto-50.plan.json")
    assert loaded.config.notes["plan"]["reasons"] == list(plan.reasons)


def test_the_plan_is_never_worse_than_a_single_method_on_what_it_was_tried_on(planned):
    _, folder, _ = planned
    plan = json.loads((folder / "auto-50.plan.json").read_text())
    kl = {each["name"]: each["kl"] for each in plan["tried"]}
    assert {"source", "mixed", "mla", "gqa"} <= kl.keys() and kl.pop("source") == pytest.approx(0, abs=1e-6)
    won = plan["method"] or "mixed"
    assert 0 < kl[won] == min(kl.values())
    assert all(each["cost"] <= 0.5 + 1e-9 for each in plan["tried"] if each["name"] != "source")
    assert won in plan["reasons"][0]


def test_what_was_tried_is_what_is_written(planned, tmp_path):
    """The loss of a plan in the whole model is that of the checkpoint without healing."""
    _, folder, goal = planned
    loaded = AutoModelForCausalLM.from_pretrained(folder / goal.name).eval()
    plan = Plan.load(folder / "auto-50.plan.json")
    said = {each["name"]: each["loss"] for each in plan.tried}[plan.method or "mixed"]
    windows = tokens()
    some = unseen_windows(Calibration(windows, torch.arange(windows.shape[1]).expand_as(windows)))
    assert quality(loaded, windows[some]).nll == pytest.approx(said, rel=0.1)  # there, half of the windows have jumps


def with_a_dead_layer():
    """Attention of layer 1 adds nothing."""
    made = model(layers=3)
    with torch.no_grad():
        made.model.layers[1].self_attn.o_proj.weight.zero_()
    return made


def test_a_layer_that_needs_no_rows_of_its_own_reads_others(tmp_path):
    """Two thirds of the cache are enough for the very same model; a run that was interrupted does the same."""
    layers = InMemory(with_a_dead_layer())
    with torch.no_grad():
        want = layers.model(tokens()).logits
    goal = goal_of(layers, "67%")
    (lost,) = shrink(layers, tokens(), [goal], tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / goal.name).eval()
    assert loaded.config.kv_source == [None, 0, None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens()).logits, want, atol=1e-4, rtol=1e-4)
    assert [each.fitted for each in lost] == pytest.approx([0] * 3, abs=1e-6)
    assert "model.model.layers.1.self_attn.project.k_proj.weight" not in loaded.state_dict()
    out = loaded.generate(tokens()[:1], max_new_tokens=5, do_sample=False)
    torch.testing.assert_close(out, layers.model.generate(tokens()[:1], max_new_tokens=5, do_sample=False))

    class Stop(Exception):
        pass

    def stop(stage, done, total):
        if stage == goal.name and done == 2:
            raise Stop

    with pytest.raises(Stop):
        shrink(layers, tokens(), [goal], tmp_path / "b", progress=stop)
    shrink(layers, tokens(), [goal], tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b" / goal.name)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(("target", "budget"), [("params", "90%"), ("speed", "70%")])
def test_other_targets_are_costs_of_their_own(target, budget, tmp_path):
    layers = InMemory(model(layers=3))
    goal = goal_of(layers, budget, f"auto(target={target})")
    shrink(layers, tokens(), [goal], tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name)
    costs = Costs(layers.config, goal.method)
    spent = sum(costs.of(n, layer.spec, layer.site.kv_source) for n, layer in enumerate(loaded.attentions))
    assert spent <= goal.share * costs.whole
    if target == "params":
        numbers = [sum(p.numel() for p in layer.parameters()) for layer in loaded.attentions]
        assert spent == sum(numbers)


def test_a_model_on_disk_is_planned_layer_by_layer(tmp_path):
    disk = OnDisk(saved(model(layers=3), tmp_path / "source"))
    goal = goal_of(disk)
    shrink(disk, tokens(), [goal], tmp_path / "job")
    plan = Plan.load(tmp_path / "job" / "auto-50.plan.json")
    assert all(each["loss"] > 0 and each["kl"] >= 0 for each in plan.tried)


def test_many_short_windows_are_tried_as_few_long_ones_are(tmp_path):
    layers = InMemory(model(layers=2))
    shrink(layers, tokens(windows=40), [goal_of(layers)], tmp_path)
    assert len(Plan.load(tmp_path / "auto-50.plan.json").tried) > 2


def test_what_no_plan_reaches_is_refused_at_once():
    layers = InMemory(model())
    with pytest.raises(BudgetError, match=r"no plan fits 5%.*smallest is [\d.]+%"):
        refuse(layers.config, [goal_of(layers, "5%")])
    with pytest.raises(BudgetError, match=r"attention parameters; the smallest"):
        refuse(layers.config, [goal_of(layers, "20%", "auto(target=params)")])
    with pytest.raises(BudgetError, match="share of the source's, such as 50%"):
        goal_of(layers, "16", "auto(target=speed)")
    with pytest.raises(BudgetError, match="nothing to shrink"):
        goal_of(layers, "100%")
    with pytest.raises(OptionError, match="context=9 is of target=speed"):
        read_method("auto(context=9)")


def test_processes_share_the_pricing(planned, tmp_path):
    """Each prices every second layer; both know what one process knows."""
    layers, _, goal = planned
    text = Calibration(tokens(), torch.arange(tokens().shape[1]).expand_as(tokens()))

    def priced(rank, world):
        seen = []
        found = price(
            layers, text, goal, tmp_path / "survey", (), lambda *step: seen.append(step), Ranks(rank, world)
        )  # fmt: skip
        return found, seen

    survey(layers, text, tmp_path / "survey", lambda *_: None)
    whole, _ = priced(0, 1)
    with ThreadPoolExecutor(2) as both:
        one, other = both.map(priced, (0, 1), (2, 2))
    assert one[0] == other[0] == whole
    files = sorted(tmp_path.glob("survey/*.prices-*.json"))
    of = [{index for index, _ in json.loads(file.read_text())} for file in files]
    assert len(of) == 2 and not of[0] & of[1] and of[0] | of[1] == {*range(len(layers.config.specs))}


def test_processes_share_the_survey(tmp_path):
    made = model(layers=3)
    text = Calibration(tokens(), torch.arange(tokens().shape[1]).expand_as(tokens()))

    def surveys(folder, rank, world):
        survey(InMemory(copy.deepcopy(made)), text, tmp_path / folder, lambda *_: None, Ranks(rank, world))

    surveys("one", 0, 1)
    with ThreadPoolExecutor(2) as both:
        assert [*both.map(surveys, ("two", "two"), (0, 1), (2, 2))] == [None, None]
    for index in range(3):
        one, two = (load_file(tmp_path / name / f"{index}.safetensors") for name in ("one", "two"))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor)
