import copy

import pytest
import torch
import torch.nn.functional as F
from tests.convert.tiny import model, tokens
from transformers import AutoModelForCausalLM

from manyheads.convert.account import account
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.plan import Goal, make_goal, shape_of
from manyheads.convert.shrink import shrink
from manyheads.convert.stream import InMemory
from manyheads.core.part import OptionError

EVERYTHING = 10**6


def loss(of, windows):
    with torch.no_grad():
        logits = of(windows).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


@pytest.mark.parametrize("kind", ["llama", "tied", "biased", "qwen2", "mistral"])
def test_stages_at_full_rank_add_nothing(kind, tmp_path):
    made, windows = model(kind), tokens()
    layers = InMemory(made)
    got = account(layers, windows, Goal("mla-all", "mla", EVERYTHING, 0, EVERYTHING), tmp_path)
    assert list(got) == ["source", "rope", "rank"]
    assert max(got.values()) - min(got.values()) < 1e-5
    assert got["source"] == pytest.approx(loss(model(kind), windows), abs=1e-5)
    assert account(layers, windows, Goal("gqa-all", "gqa", 64, 2, 0), tmp_path)["merge"] == got["source"]


def test_more_windows_than_go_together(tmp_path):
    made, windows = model(), tokens(windows=20)
    got = account(InMemory(made), windows, Goal("gqa-all", "gqa", 64, 2, 0), tmp_path)
    assert got["source"] == pytest.approx(loss(model(), windows), abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(("to", "stages"), [("mla", ["source", "rope", "rank"]), ("gqa", ["source", "merge"])])
def test_the_last_stages_are_the_converted_model(kind, to, stages, tmp_path):
    windows = tokens()
    layers = InMemory(model(kind))
    goal = make_goal("50%", to, shape_of(layers))
    shrink(layers, windows, [goal], tmp_path / "bare")
    shrink(layers, windows, [goal], tmp_path / "heal", heal=LayerwiseHeal(steps=3))
    bare, healed = (AutoModelForCausalLM.from_pretrained(tmp_path / name / goal.name) for name in ("bare", "heal"))
    got = account(layers, windows, goal, tmp_path / "bare", healed)
    assert list(got) == [*stages, "healed"]
    assert got[stages[-1]] == pytest.approx(loss(bare, windows), abs=1e-5)
    assert got["healed"] == pytest.approx(loss(healed, windows), abs=1e-5)


def test_the_model_is_left_alone_and_the_survey_kept(tmp_path):
    layers = InMemory(model())
    before = copy.deepcopy(layers.model.state_dict())
    seen = []
    goal = make_goal("50%", "mla", shape_of(layers))
    first = account(layers, tokens(), goal, tmp_path, progress=lambda *step: seen.append(step))
    assert account(layers, tokens(), goal, tmp_path, progress=lambda *step: seen.append(step)) == first
    assert [stage for stage, done, _ in seen if done] == ["calibrate"] * 2 + ["account"] * 4
    assert all(torch.equal(before[name], tensor) for name, tensor in layers.model.state_dict().items())


def test_mixed_plans_have_no_common_stages(tmp_path):
    layers = InMemory(model(num_key_value_heads=4))
    with pytest.raises(OptionError, match="auto-50 chooses by layer"):
        account(layers, tokens(), make_goal("50%", "auto", shape_of(layers)), tmp_path)
