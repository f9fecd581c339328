"""Methods by name: how lines read, what is refused, what each budget becomes, and whole jobs."""

import json

import pytest
from tests.convert.tiny import model, tokens
from transformers import AutoModelForCausalLM

from manyheads.convert.account import account
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.methods import METHODS, Latent, Merge, read_method
from manyheads.convert.moves.of_goal import adjusted_heads, adjusted_ranks
from manyheads.convert.plan import BudgetError, Goal, Shape, make_goal, shape_of
from manyheads.convert.shrink import refuse, shrink
from manyheads.convert.stream import InMemory
from manyheads.convert.survey import turning_damage
from manyheads.core.part import OptionError

SHAPE = Shape(kv_heads=4, qk_width=32, v_width=32)
LINES = [
    *METHODS,
    "gqa(mean)",
    "gqa(random)",
    "gqa(lowrank, basis=weights)",
    "mha2mla(keep=high)",
    "mha2mla(keep=low, latents=split)",
    "mha2mla(keep=uniform)",
    "transmla(fold=2)",
    "transmla(balance=2.0, stopped=mean)",
    "care(ranks=adjusted)",
    "mla(ranks=adjusted)",
    "mla(high, slots=complex)",
    "dha(mean, heads=uniform)",
    "qkv-sharing(copy)",
    "mfa(key_reuse=true, q_rank=24)",
    "tensorllm([12, 8, 3], layers=[0], sweeps=2)",
    "retrieval_distill(heads=3, state=4, pairs=8)",
]


@pytest.mark.parametrize("line", LINES)
def test_lines_read_back(line):
    method = read_method(line)
    assert read_method(str(method)) == method and read_method(method) is method


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mlaa", "no method 'mlaa' (there are mla, gqa, auto, .*did you mean mla"),
        ("gqa(median)", "median is none of best, fitted, lowrank, mean, first, random"),
        ("gqa(keep=high)", "'gqa' has no option 'keep'; it has how, basis"),
        ("auto(mean)", "target"),
        ("gqa(mean, basis=weights)", "basis=weights is an option of how=lowrank"),
        ("mla(slots=heads)", "keep=damage chooses among slots=fitted; with slots=heads keep is high, low"),
        ("mla(norm)", "slots=heads, not slots=fitted"),
        ("mha2mla(rotary=3)", "rotary=3 channels do not pair up"),
        ("mha2mla(fold=2)", "frequencies are folded with slots=rorope"),
        ("transmla(keep=high)", "keep=high has not; give one"),
        ("mla(balance=1)", "balance has no use: factor=fitted"),
        ("care(balance=1)", "balance has no use: of latents=split"),
        ("transmla(balance=-1)", "no ratio of sizes"),
        ("dha(heads=3)", "3 is none of adjusted, uniform"),
        ("dha(how=mean)", "'dha' has no option 'how'; it has fusion, heads"),
        ("mfa(q_rank=0)", "q_rank=0 must be positive"),
        ("tensorllm([2, 3])", r"ranks=\[2, 3\] are not three positive numbers"),
        ("tensorllm(layers=[-1])", "are not numbers of layers"),
        ("tensorllm(sweeps=-1)", "0 is the first guess"),
        ("retrieval_distill(heads=-1)", "heads=-1; 0 keeps none"),
        ("retrieval_distill(threshold=2)", "no difference of accuracies"),
        ("retrieval_distill(state=0)", "state=0; at least 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_what_does(line, said):
    with pytest.raises(OptionError, match=said.replace("(there", r"\(there")):
        read_method(line)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("budget", ["50%", "25%", "13%", "96"])
def test_goals_keep_to_their_budget(line, budget):
    method = read_method(line)
    try:
        goal = make_goal(budget, line, SHAPE)
    except BudgetError as error:
        assert "the smallest is" in str(error) or "the one budget that it reaches is 100%" in str(error)
        return
    assert goal.method == method and goal.to == method.move
    assert goal.name.startswith(f"{method.name}-")
    if goal.to == "gqa":
        assert goal.kv_heads * SHAPE.head <= goal.floats
    elif goal.to == "qkv-sharing":
        assert goal.kv_heads * SHAPE.qk_width <= goal.floats
    elif goal.to == "mfa":
        assert goal.rank <= goal.floats and goal.rank <= 4 * 32 * (1 if method.key_reuse else 2)
    elif goal.to == "retrieval":
        assert goal.floats < SHAPE.floats
    elif goal.to == "dha":
        assert goal.floats // SHAPE.qk_width >= 2
    else:
        assert goal.rank >= 1 and goal.turning >= 1 and goal.rank + 2 * goal.turning == goal.floats


def test_budgets_of_the_other_moves():
    assert make_goal("100%", "tensorllm", SHAPE).floats == SHAPE.floats
    for line, said in (
        ("tensorllm", "leaves the cache as it is; the one budget that it reaches is 100%, not 50%"),
        ("dha", "no dha fits 20 .* the smallest is 64"), ("qkv-sharing", "the smallest is 32"),
        ("mfa", "no mfa fits 3 .* the smallest is 4"), ("mfa(key_reuse=true)", "the smallest is 2"),
    ):  # fmt: skip
        text = {"tensorllm": "50%", "mfa": "3", "mfa(key_reuse=true)": "1"}.get(line, "20")
        with pytest.raises(BudgetError, match=said):
            make_goal(text, line, SHAPE)
    for line in ("dha", "qkv-sharing", "mfa"):
        with pytest.raises(BudgetError, match="leaves nothing to shrink"):
            make_goal("100%", line, SHAPE)
    assert make_goal("50%", "qkv-sharing", SHAPE).kv_heads == 4
    assert make_goal("40%", "qkv-sharing", SHAPE).kv_heads == 2
    assert "it takes 128" in make_goal("60%", "qkv-sharing", SHAPE).note
    assert "it takes 128" in make_goal("60%", "mfa(key_reuse=true)", SHAPE).note
    assert make_goal("50%", "mfa(key_reuse=true)", SHAPE).note is None


def test_rotary_channels_by_hand():
    assert make_goal("50%", "mha2mla(rotary=16)", SHAPE).turning == 4 * 8
    assert make_goal("50%", "transmla(rotary=8)", SHAPE).turning == 4
    assert make_goal("50%", "mla(rotary=24)", SHAPE).turning == 12
    with pytest.raises(OptionError, match=r"rotary may be \[2, 4, 8, 16, 32\]"):
        make_goal("50%", "mha2mla(keep=uniform, rotary=6)", SHAPE)
    with pytest.raises(OptionError, match="at most 32"):
        make_goal("50%", "transmla(rotary=34)", SHAPE)
    with pytest.raises(BudgetError, match="the smallest is 70"):
        make_goal("25%", "mha2mla(rotary=16)", SHAPE)
    with pytest.raises(OptionError, match=r"fold may be \[1, 2, 4, 8, 16\]"):
        make_goal("50%", "transmla(fold=3)", SHAPE)


@pytest.mark.parametrize("line", LINES)
def test_every_method_makes_a_model_of_its_budget(line, tmp_path):
    layers = InMemory(model("llama" if "mfa" in line else "biased", hidden_size=64, num_key_value_heads=4))
    goal = make_goal("100%" if "tensorllm" in line else "50%", line, shape_of(layers))
    (lost,) = shrink(layers, tokens(), [goal], tmp_path, bfloat16=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name)
    owners = zip(loaded.attentions, loaded.config.kv_source, strict=True)
    costs = [float(layer.spec.cost(64, layer.heads).cache_floats) for layer, source in owners if source is None]
    assert sum(costs) <= goal.floats * len(loaded.specs)
    assert sum(costs) == goal.floats * len(loaded.specs) or line == "auto" or "heads=3" in line
    if "adjusted" not in str(line) and line not in ("dha", "share", "auto") and goal.to != "retrieval":
        assert set(costs) == {goal.floats}
    limit = 1 if goal.to in ("mla", "auto") else 3  # heads of a random model have nothing in common
    limit = float("inf") if goal.to == "retrieval" else limit  # linear attention, before it learns anything
    assert all(0 <= each.fitted < limit for each in lost)
    notes = json.loads((tmp_path / goal.name / "config.json").read_text())["notes"]["goal"]
    assert Goal(**notes).method == goal.method


@pytest.mark.parametrize("line", [
    "mha2mla", "transmla(fold=2)", "care(fold=2)", "gqa(mean)", "kv_head_lowrank", "dha(heads=uniform)", "qkv-sharing",
    "mfa(key_reuse=true)",
])  # fmt: skip
def test_the_account_of_a_method_ends_at_its_model(line, tmp_path):
    layers, windows = InMemory(model(hidden_size=64, num_key_value_heads=4)), tokens()
    goal = make_goal("50%", line, shape_of(layers))
    shrink(layers, windows, [goal], tmp_path, stretch=0, bfloat16=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name)
    got = account(layers, windows, goal, tmp_path, loaded)
    *_, last, healed = got
    assert got[last] == pytest.approx(got[healed], abs=1e-5)


@pytest.mark.parametrize("line", ["transmla", "care(ranks=adjusted, fold=1)", "auto", "dha"])
def test_what_chooses_by_layer_has_no_account(line, tmp_path):
    layers = InMemory(model(num_key_value_heads=4))
    with pytest.raises(OptionError, match="by layer"):
        account(layers, tokens(), make_goal("50%", line, shape_of(layers)), tmp_path)


def test_a_fold_of_the_layers_own_is_the_one_that_harms_it_least(tmp_path):
    layers = InMemory(model(hidden_size=64, num_key_value_heads=4))
    lost = {}
    for line in ("transmla", *(f"transmla(fold={f})" for f in (2, 4, 8))):
        goal = make_goal("50%", line + "", shape_of(layers))
        assert goal.turning == 4
        lost[line] = shrink(layers, tokens(), [goal], tmp_path / line, bfloat16=False)[0][0].fitted
    assert lost["transmla"] == pytest.approx(min(value for line, value in lost.items() if "fold" in line), rel=1e-4)


@pytest.mark.parametrize("line", ["care(ranks=adjusted)", "mla(ranks=adjusted)"])
def test_adjusted_ranks_spend_the_uniform_sum_within_bounds(line, tmp_path):
    layers, windows = InMemory(model(layers=3, hidden_size=64, num_key_value_heads=4)), tokens()
    goal = make_goal("50%", line, shape_of(layers))
    shrink(layers, windows, [goal], tmp_path, heal=LayerwiseHeal(steps=1), bfloat16=False)
    damage = turning_damage(tmp_path / "survey", 3)
    ranks = adjusted_ranks(layers, goal, tmp_path / "survey", damage)
    parts = 2 if goal.method.latents == "split" else 1
    assert {len(each) for each in ranks} == {parts}
    uniform = [goal.rank // 2, goal.rank - goal.rank // 2] if parts == 2 else [goal.rank]
    for part, of_all in enumerate(zip(*ranks, strict=True)):
        assert sum(of_all) == 3 * uniform[part]
        assert all(uniform[part] // 2 <= rank <= 2 * uniform[part] for rank in of_all)
    specs = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name).config.specs
    assert [f"rank={sum(each)}," in spec for each, spec in zip(ranks, specs, strict=True)] == [True] * 3
    assert adjusted_ranks(layers, make_goal("50%", "care", shape_of(layers)), tmp_path, damage) == [()] * 3


def test_defaults_are_the_librarys_own():
    assert read_method("mla") == Latent() and read_method("gqa") == Merge()
    assert read_method("mla").move == "mla" and make_goal("50%", "mla", SHAPE).how == ""


def test_heads_of_either_kind_go_where_they_are_worth_most(tmp_path):
    layers, windows = InMemory(model(layers=3, hidden_size=64, num_key_value_heads=4)), tokens()
    goal = make_goal("50%", "dha", shape_of(layers))
    shrink(layers, windows, [goal], tmp_path, bfloat16=False)
    counts = adjusted_heads(layers, goal, tmp_path / "survey")
    assert sum(map(sum, counts)) == 3 * 4 and all(1 <= each <= 4 for pair in counts for each in pair)
    specs = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name).specs
    assert [(spec.parts[0].k_heads, spec.parts[0].v_heads) for spec in specs] == counts


def test_layers_that_are_not_there_are_refused_before_any_work():
    layers = InMemory(model(num_key_value_heads=4))
    with pytest.raises(OptionError, match="the model has 2 layers, 0 to 1"):
        refuse(layers.config, [make_goal("100%", "tensorllm(layers=[0, 2])", shape_of(layers))])
    biased = InMemory(model("biased", num_key_value_heads=4))
    with pytest.raises(OptionError, match="layer 0 cannot become mfa-50: mfa has no biases"):
        refuse(biased.config, [make_goal("50%", "mfa", shape_of(biased))])
    normed = InMemory(model("qwen3", num_key_value_heads=4))
    for line in ("qkv-sharing", "mfa", "dha"):
        with pytest.raises(OptionError, match="qk-norm"):
            refuse(normed.config, [make_goal("50%", line, shape_of(normed))])
