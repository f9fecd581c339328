import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.convert.tiny import VOCAB, model, saved, tokens
from tests.oracles.reference import close
from transformers import AutoModelForCausalLM, GPT2Config

from manyheads.convert import resume
from manyheads.convert import shrink as job
from manyheads.convert import survey as surveys
from manyheads.convert.adopt import adopted_config
from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.plan import Goal, make_goal, shape_of
from manyheads.convert.resume import ResumeError
from manyheads.convert.shrink import Damage, shrink
from manyheads.convert.stream import InMemory, OnDisk, attention_of, put_attention, run
from manyheads.convert.survey import Calibration, stretched, surveyed
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack import ManyheadsForCausalLM
from manyheads.stack.seam import SeamAttention

HEAL = LayerwiseHeal(steps=3)
LAYERS, FAMILIES = 3, ["llama", "tied", "biased", "qwen2", "mistral", "phi3", "gemma2"]


def source(kind="llama", layers=LAYERS, **options):
    return model(kind, layers, **{"num_key_value_heads": 4, **options})


def goals(layers, *wanted):
    return [make_goal(text, to, shape_of(layers)) for text, to in wanted or (("50%", "mla"), ("50%", "gqa"))]


def files(folder):
    """Every tensor and every text of a job, byte for byte."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def composed(layers, windows, folder):
    """Logits by hand: the source's own pieces with the attention that each layer file holds."""
    hidden = layers.embed(windows)
    notes = json.loads((folder / "config.json").read_text())
    for index, spec in enumerate(notes["specs"]):
        with layers.open(index) as block:
            old = attention_of(block, layers.config)
            new = SeamAttention(spec, old.dim, old.heads, site=old.site).eval()
            prefix = f"model.model.layers.{index}.self_attn."
            tensors = load_file(folder / f"layer-{index:05d}.safetensors")
            new.load_state_dict({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
            put_attention(block, layers.config, new)
            hidden = run(block, layers.config, hidden, record=False).after
    family = layers.model.model
    with torch.no_grad():
        logits, cap = family.lm_head(family.model.norm(hidden)), getattr(family.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_candidate_reloads_as_the_model_that_was_built(kind, tmp_path):
    layers, windows = InMemory(source(kind)), tokens()
    wanted = goals(layers, ("50%", "mla"), ("50%", "gqa"), ("25%", "auto"))
    damage = shrink(layers, windows, wanted, tmp_path, heal=HEAL)
    for goal, lost in zip(wanted, damage, strict=True):
        folder = tmp_path / goal.name
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert isinstance(loaded, ManyheadsForCausalLM)
        with torch.no_grad():
            logits = loaded(windows).logits
        close(logits, composed(layers, windows, folder), 1e-4)
        assert [str(spec) for spec in loaded.specs] == loaded.config.specs == [each.spec for each in lost]
        assert ("window(" in loaded.config.specs[0]) == (kind in ("mistral", "gemma2"))
        assert ("softmax(cap=0.7)" in loaded.config.specs[1]) == (kind == "gemma2")
        assert loaded.config.notes["goal"]["name"] == goal.name
        assert [Damage(**each) for each in loaded.config.notes["damage"]] == lost
        assert len(lost) == LAYERS and all(0 < each.healed <= each.fitted for each in lost)
        assert {spec.split("(")[0] for spec in loaded.config.specs} <= {"mla", "gqa"}
        assert goal.to == "auto" or all(spec.startswith(goal.to) for spec in loaded.config.specs)
        assert not list(folder.glob("*.tmp")) and not (folder / "streams.safetensors").exists()
        state = loaded.state_dict()
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() <= state.keys()
        assert index["metadata"]["total_size"] == sum(state[name].nbytes for name in index["weight_map"])


def test_cached_tokens_cost_what_was_asked_for(tmp_path):
    layers = InMemory(source())
    wanted = goals(layers, ("50%", "mla"), ("24", "mla"), ("50%", "gqa"), ("25%", "gqa"))
    shrink(layers, tokens(), wanted, tmp_path)
    for goal in wanted:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name)
        assert {spec.cost(32, 4).cache_floats for spec in loaded.specs} == {goal.floats}


def test_healing_helps_the_model(tmp_path):
    made, windows = source(), tokens(windows=12)
    reference = copy.deepcopy(made)
    layers = InMemory(made)
    goal = goals(layers, ("25%", "gqa"))
    far = {}
    for name, heal in (("bare", None), ("healed", LayerwiseHeal(steps=30))):
        shrink(layers, windows, goal, tmp_path / name, heal=heal, stretch=0, bfloat16=False)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name / goal[0].name)
        with torch.no_grad():
            want, got = (each(windows).logits.log_softmax(-1) for each in (reference, loaded))
        far[name] = torch.nn.functional.kl_div(got, want, log_target=True, reduction="sum").item()
    assert far["healed"] < 0.9 * far["bare"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    layers = InMemory(source(layers=2))
    shrink(layers, tokens(), goals(layers), folder, heal=HEAL)
    return files(folder)


class Stop(BaseException):
    """Like an interrupt from the keyboard, nothing that code may catch as an error."""


def interrupt_at(count):
    left = [count]

    def maybe(*args):
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return maybe


def test_an_interrupt_after_any_layer_changes_nothing(uninterrupted, tmp_path):
    layers = InMemory(source(layers=2))
    for count in range(3 * 2):
        folder = tmp_path / str(count)
        with pytest.raises(Stop):
            shrink(layers, tokens(), goals(layers), folder, heal=HEAL, progress=interrupt_at(count))
        shrink(layers, tokens(), goals(layers), folder, heal=HEAL)
        assert files(folder) == uninterrupted, count


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_before_or_after_any_write_changes_nothing(uninterrupted, before, tmp_path, monkeypatch):
    """Survey, layer, log, streams, what surrounds the layers, index: a job is interrupted at each in turn."""
    layers = InMemory(source(layers=2))
    wanted = goals(layers, ("50%", "mla"))
    one_goal = {name: content for name, content in uninterrupted.items() if not name.startswith("gqa")}
    writes = [(job, "save"), (surveys, "save"), (job, "write_text"), (resume, "write_text")]

    def armed(write, stop):
        def wrapped(what, file):
            if before:
                stop()
            write(what, file)
            if not before:
                stop()

        return wrapped

    for count in range(100):
        stop = interrupt_at(count)
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch:
            for module, name in writes:
                patch.setattr(module, name, armed(getattr(module, name), stop))
            try:
                shrink(layers, tokens(), wanted, folder, heal=HEAL)
                break
            except Stop:
                pass
        shrink(layers, tokens(), wanted, folder, heal=HEAL)
        assert files(folder) == one_goal, count
    assert count > 12


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    layers = InMemory(source())
    first = shrink(layers, tokens(), goals(layers, ("50%", "mla")), tmp_path, heal=HEAL)
    before = files(tmp_path)

    def never(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(surveys, "measure", never)
    monkeypatch.setattr(surveys, "sensitivity", never)
    both = shrink(layers, tokens(), goals(layers, ("50%", "mla"), ("25%", "mla")), tmp_path, heal=HEAL)
    assert both[0] == first[0]
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert any(name.startswith("mla-25") for name in after.keys() - before.keys())


def test_a_resume_with_other_options_is_refused_by_name(tmp_path):
    layers = InMemory(source())
    shrink(layers, tokens(), goals(layers), tmp_path, heal=HEAL, options={"model": "a"})
    before = files(tmp_path)
    other = InMemory(model("llama", LAYERS, num_key_value_heads=4, initializer_range=0.3))
    for change, name in (
        ({"heal": LayerwiseHeal(steps=4)}, "heal.*steps.*3.*4"),
        ({"heal": None}, "heal.*steps.*3.*0"),
        ({"options": {"model": "b"}}, "model was 'a', is 'b'"),
        ({"options": {}}, "model was 'a', is None"),
        ({"tokens": tokens(seed=2)}, "tokens was"),
        ({"layers": other}, "source was"),
    ):
        given = {"layers": layers, "tokens": tokens(), "heal": HEAL, "options": {"model": "a"}, **change}
        with pytest.raises(ResumeError, match=name):
            shrink(given["layers"], given["tokens"], goals(layers), tmp_path, heal=given["heal"],
                   options=given["options"])  # fmt: skip
        assert files(tmp_path) == before


def test_qk_norm_is_refused_before_anything_moves(tmp_path):
    made = source("qwen3")
    before = copy.deepcopy(made.state_dict())
    layers = InMemory(made)
    with pytest.raises(OptionError, match=r"layer 0 cannot become mla-50.*qk-norm"):
        shrink(layers, tokens(), goals(layers, ("50%", "gqa"), ("50%", "mla")), tmp_path / "job")
    assert not (tmp_path / "job").exists()
    after = layers.model.model.state_dict()
    for name, tensor in before.items():  # adoption renames them
        assert any(other.shape == tensor.shape and torch.equal(other, tensor) for other in after.values()), name


@pytest.mark.parametrize(("kind", "to"), [("qwen3", "gqa"), ("qwen3", "auto"), ("gemma3", "gqa")])
def test_layers_with_qk_norm_are_pooled_and_keep_it(kind, to, tmp_path):
    layers = InMemory(source(kind))
    goal = goals(layers, ("50%", to))
    (lost,) = shrink(layers, tokens(), goal, tmp_path, heal=HEAL)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal[0].name).eval()
    assert all(each.spec.startswith("gqa") and "qk-norm" in each.spec for each in lost)
    assert to == "auto" or all("kv_heads=2" in each.spec for each in lost)
    with torch.no_grad():
        close(loaded(tokens()).logits, composed(layers, tokens(), tmp_path / goal[0].name), 1e-4)


@pytest.mark.parametrize(("kind", "same"), [("gemma2", True), ("llama", False)])
def test_behind_a_norm_a_layer_is_to_do_what_its_source_does(kind, same, tmp_path):
    """Elsewhere it is also to make good what earlier layers lost."""
    targets = []

    class Seen(LayerwiseHeal):
        def __call__(self, attention, x, target, *rest):
            targets.append(target)
            return super().__call__(attention, x, target, *rest)

    layers = InMemory(source(kind))
    shrink(layers, tokens(), goals(layers, ("50%", "gqa")), tmp_path, heal=Seen(steps=0), stretch=0, bfloat16=False)
    hidden = layers.embed(tokens())
    for index, target in enumerate(targets):
        with layers.open(index) as block:
            seen = run(block, layers.config, hidden)
        hidden = seen.after
        assert torch.allclose(target, seen.y, atol=1e-5) == (same or not index)
    assert len(targets) == LAYERS


def test_positions_that_come_with_the_embeddings_are_refused():
    config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(OptionError, match="a gpt2 adds positions to its embeddings"):
        shape_of(adopted_config(config))


def test_a_merge_is_never_worse_than_pooling_in_any_layer(tmp_path):
    """Both are tried on the inputs that the layer really gets."""
    layers, windows = InMemory(source()), tokens()
    goal = goals(layers, ("50%", "gqa"))
    (lost,) = shrink(layers, windows, goal, tmp_path, stretch=0, bfloat16=False)
    stats, felt = surveyed(tmp_path / "survey", 0)
    with layers.open(0) as block:
        seen = run(block, layers.config, layers.embed(windows))
        attention = attention_of(block, layers.config)
        given = (seen.x, seen.y, seen.before + seen.y, felt)
        pooled = LayerwiseHeal().error(ToGQA(2, "mean")(attention, stats), *given)
        fitted = LayerwiseHeal().error(ToGQA(2)(attention, stats), *given)
    assert lost[0].fitted == pytest.approx(min(fitted, pooled), rel=1e-4)


def test_a_layer_that_was_converted_is_no_source(tmp_path):
    layers = InMemory(source())
    shrink(layers, tokens(), goals(layers, ("50%", "mla")), tmp_path)
    again = InMemory(AutoModelForCausalLM.from_pretrained(tmp_path / "mla-50"))
    with pytest.raises(OptionError, match="conversions start from gqa"):
        shape_of(again)


def test_auto_is_free_to_differ_from_layer_to_layer(tmp_path):
    """Equal heads in one layer make its merge exact; the others get what that saves."""
    made = source()
    attention = made.model.layers[1].self_attn
    with torch.no_grad():
        for linear in (attention.k_proj, attention.v_proj):
            rows = linear.weight.view(2, 2, 8, -1)
            rows.copy_(rows[:, :1].expand_as(rows).clone())
    layers = InMemory(made)
    goal = goals(layers, ("75%", "auto"))
    (lost,) = shrink(layers, tokens(), goal, tmp_path)
    assert "gqa(kv_heads=2)" in lost[1].spec and lost[1].fitted < 1e-3
    costs = [float(Spec.parse(each.spec).cost(32, 4).cache_floats) for each in lost]
    assert costs[1] == 32 < min(costs[0], costs[2]) and sum(costs) <= 0.75 * 3 * 64
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal[0].name)
    prompt = {"input_ids": tokens()[:2, :5], "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    assert loaded.generate(**prompt, max_new_tokens=6, do_sample=False).shape == (2, 11)


def test_disk_and_memory_make_models_of_the_same_kind(tmp_path):
    """Not the same weights: the loss's own metric needs the whole model in memory."""
    made = source()
    disk = OnDisk(saved(made, tmp_path / "source"))
    wanted = goals(disk)
    a = shrink(disk, tokens(), wanted, tmp_path / "disk", heal=HEAL)
    b = shrink(InMemory(made), tokens(), wanted, tmp_path / "memory", heal=HEAL)
    assert [[each.spec.split(" + ")[0] for each in one] for one in a] == [
        [each.spec.split(" + ")[0] for each in one] for one in b
    ]
    for goal in wanted:
        one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / w / goal.name) for w in ("disk", "memory"))
        assert one.state_dict().keys() == two.state_dict().keys()


def test_a_full_disk_leaves_no_partial_file(tmp_path, monkeypatch):
    def full(tensors, file, **options):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    layers = InMemory(source())
    monkeypatch.setattr(surveys, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        shrink(layers, tokens(), goals(layers), tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_stretched_positions_go_far_in_half_of_the_windows():
    positions = stretched(400, 64, 4096)
    steps = positions.diff(dim=1)
    assert (positions[:, 0] == 0).all() and (steps >= 1).all() and positions.max() < 4096
    jumped = (steps > 1).any(1)
    assert 0.4 < jumped.float().mean() < 0.6
    assert ((steps[jumped] > 1).sum(1) <= 2).all()
    assert positions.max() > 2048
    assert torch.equal(positions, stretched(400, 64, 4096))
    assert not torch.equal(positions, stretched(400, 64, 4096, seed=1))
    for limit in (0, 64):
        assert torch.equal(stretched(3, 64, limit), torch.arange(64).repeat(3, 1))


def test_some_windows_are_spread_evenly():
    text = Calibration(tokens(windows=9), torch.zeros(9, 16))
    assert text.some(3 * 16).tolist() == [0, 4, 8]
    assert text.some(10**6).tolist() == list(range(9))
    assert len(text.some(1)) == 1


def test_progress_counts_every_layer_of_every_stage(tmp_path):
    layers, seen = InMemory(source()), []
    shrink(layers, tokens(), goals(layers), tmp_path, progress=lambda *step: seen.append(step))
    done = [step for step in seen if step[1]]
    assert done == [(stage, i + 1, LAYERS) for stage in ("calibrate", "mla-50", "gqa-50") for i in range(LAYERS)]


def test_budgets_beyond_what_turns_still_fit(tmp_path):
    """Partial RoPE turns fewer pairs than a budget would keep; the rest of it goes to the latent."""
    layers = InMemory(model("llama", 2))
    layers.config.specs = [f"{spec} + rope(fraction=0.25)".replace("+ rope +", "+") for spec in layers.config.specs]
    goal = Goal("mla-28f", "mla", 28, 0, 6)
    shrink(layers, tokens(), [goal], tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / goal.name)
    assert {spec.cost(32, 4).cache_floats for spec in loaded.specs} == {28}
