"""Adapters on whole models: any torch model, transformers' and our own; trained, generated with, saved, taken off."""

import copy
import importlib.util
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import manyheads as mh
from manyheads.experts.adapters import Adapter, kinds
from manyheads.experts.adapters.peft import to_peft
from manyheads.stack import Decoder, ManyheadsConfig, ManyheadsForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")

VOCAB, LAYERS, TASKS = 61, 2, 5
SPECS = {
    "mhr": f"mhr(splits=4, skills=3, rank=2, tasks={TASKS})",
    "ia3": f"mhr(splits=4, skills=3, tasks={TASKS}, form=ia3)",
    "headwise": "headwise-moe(heads=4, experts=3, rank=2, balance=0.1)",
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ours():
    torch.manual_seed(0)
    config = ManyheadsConfig(
        specs="gqa(kv_heads=2) + moh(top=3)", vocab_size=VOCAB, hidden_size=32, intermediate_size=48,
        num_hidden_layers=LAYERS, num_attention_heads=4, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    return ManyheadsForCausalLM(config).eval()


MODELS = {"llama": llama, "ours": ours, "adopted": lambda: mh.adopt(llama())}
all_models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
all_specs = pytest.mark.parametrize("kind", SPECS)


def batch():
    ids = torch.randint(3, VOCAB, (3, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def put_on(model, kind, targets=TARGETS):
    found = mh.adapt(model, SPECS[kind], targets)
    redraw(found)
    return found


def redraw(found, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for parameter in found.parameters():
        parameter.data.normal_(std=0.3, generator=generator)


def logits(model, tasks=(0, 4, 2), **arguments):
    with torch.no_grad():
        return model(**batch(), **arguments, **({} if tasks is None else {"task_ids": list(tasks)})).logits


@all_models
@all_specs
def test_a_model_keeps_its_names_its_outputs_and_its_weights(make, kind):
    model = make()
    before, want = copy.deepcopy(model.state_dict()), logits(model, None)
    found = mh.adapt(model, SPECS[kind], TARGETS)
    assert len(found) == 3 * LAYERS and {name.split(".")[-1] for name in found} == {*TARGETS}
    torch.testing.assert_close(logits(model), want)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    assert all(".adapter." in name for name in state.keys() - before.keys())
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {name for name in state if ".adapter." in name}
    redraw(found)
    assert (logits(model) - want).abs().max() > 1e-2
    found.unload()
    assert model.state_dict().keys() == before.keys() and torch.equal(logits(model, None), want)
    assert all(p.requires_grad for p in model.parameters()) and not mh.adapters(model)


@all_models
def test_tasks_by_argument_by_context_and_standing(make):
    model = make()
    found = put_on(model, "mhr")
    by_argument = logits(model, (0, 4, 2))
    with found.tasks([0, 4, 2]):
        assert torch.equal(logits(model, None), by_argument)
        assert not torch.equal(logits(model, (1, 1, 1)), by_argument)  # the argument goes before
        assert torch.equal(logits(model, None), by_argument)
        with found.tasks(torch.tensor(1)):
            torch.testing.assert_close(logits(model, None), logits(model, (1, 1, 1)))
        assert torch.equal(logits(model, None), by_argument)
    with pytest.raises(ValueError, match="not told which"):
        logits(model, None)
    found.tasks([0, 4, 2])
    assert torch.equal(logits(model, None), by_argument)
    for wrong, why in (((0, 5, 1), "no task 5"), ((0, -1, 1), "no task -1"), ((0, 1), "do not fit a batch of 3")):
        with pytest.raises(ValueError, match=why):
            logits(model, wrong)
    with pytest.raises(ValueError, match="one for each sequence"):
        found.tasks([[0, 1]])


@all_models
@all_specs
def test_generation(make, kind):
    """With the cache, with beams, at tasks of their own: what each sequence gives alone."""
    model = make()
    found = put_on(model, kind)
    with found.tasks([0, 4, 2]):
        together = model.generate(**batch(), max_new_tokens=6, do_sample=False)
        uncached = model.generate(**batch(), max_new_tokens=6, do_sample=False, use_cache=False)
        beams = model.generate(**batch(), max_new_tokens=4, do_sample=False, num_beams=3)
    assert torch.equal(together, uncached)
    for row, task in enumerate((0, 4, 2)):
        one = {name: value[row : row + 1] for name, value in batch().items()}
        with found.tasks(task):
            assert torch.equal(model.generate(**one, max_new_tokens=6, do_sample=False)[0], together[row])
            assert torch.equal(model.generate(**one, max_new_tokens=4, do_sample=False, num_beams=3)[0], beams[row])


@all_models
@all_specs
def test_save_and_load(make, kind, tmp_path):
    """The file holds the adapters alone; a fresh model with them gives the very same logits."""
    model, path = make(), tmp_path / "adapters.safetensors"
    found = put_on(model, kind)
    if kind != "headwise":
        found.few_shot("routing")
    want = logits(model)
    found.save(path)
    assert sum(t.numel() for t in load_file(path).values()) == sum(p.numel() for p in found.parameters())
    assert not any("weight" in name for name in load_file(path))
    fresh = make()
    assert len(mh.load_adapters(fresh, path)) == len(found)
    assert torch.equal(logits(fresh), want)
    if kind != "headwise":
        assert torch.equal(logits(fresh, [TASKS] * 3), logits(model, [TASKS] * 3))
    assert {n for n, p in fresh.named_parameters() if p.requires_grad} == {
        n for n in fresh.state_dict() if "adapter" in n
    }
    redraw(mh.adapters(fresh), seed=4)
    assert not torch.equal(logits(fresh), want)
    mh.load_adapters(fresh, path)  # into those that are there
    redraw(found, seed=5)
    mh.load_adapters(model, path)  # the one with a row that was added later
    assert torch.equal(logits(fresh), want) and torch.equal(logits(model), want)


def test_a_file_that_does_not_fit_changes_nothing(tmp_path):
    model, path = llama(), tmp_path / "adapters.safetensors"
    found = put_on(model, "mhr")
    found.save(path)
    narrow = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "intermediate_size": 40})).eval()
    with pytest.raises(mh.OptionError, match=r"down_proj.lora_a is \[4, 3, 12, 2\], wanted \[4, 3, 10, 2\]"):
        mh.load_adapters(narrow, path)
    shallow = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1})).eval()
    with pytest.raises(mh.OptionError, match=r"no layer 'model\.layers\.1"):
        mh.load_adapters(shallow, path)
    assert not mh.adapters(narrow) and not mh.adapters(shallow)
    other = llama()
    mh.adapt(other, SPECS["mhr"], ["q_proj"])
    with pytest.raises(mh.OptionError, match=r"differ from the file's at model\.layers\.0\.mlp\.down_proj"):
        mh.load_adapters(other, path)
    tensors, meta = (
        load_file(path),
        {"manyheads.adapters": json.dumps({"model.layers.0.self_attn.q_proj": SPECS["mhr"]})},
    )
    save_file(dict([*tensors.items()][:1]), path, meta)
    with pytest.raises(mh.OptionError, match="missing, wanted"):
        mh.load_adapters(llama(), path)
    save_file(tensors, path)
    with pytest.raises(mh.OptionError, match="no file of adapters"):
        mh.load_adapters(llama(), path)


@all_models
@pytest.mark.parametrize("kind", ["mhr", "ia3"])
def test_merging(make, kind):
    model = make().double()
    found = put_on(model, kind)
    with torch.no_grad():
        want = model(**batch(), task_ids=3).logits
    found.merge(3)
    assert not any("adapter" in name for name in model.state_dict())
    torch.testing.assert_close(logits(model, None), want, atol=1e-10, rtol=1e-10)


def test_merging_refuses_and_changes_nothing():
    model = llama()  # whose head is its embedding
    found = mh.adapt(model, "mhr(splits=1)", ["q_proj", "lm_head"])
    redraw(found)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="shares its weight"):
        found.merge()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = put_on(llama(), "headwise")
    with pytest.raises(ValueError, match="only with one expert"):
        other.merge()


def step(model, checkpointing, **arguments):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    inputs = batch()
    loss = model(**inputs, labels=inputs["input_ids"], **arguments).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@all_models
@all_specs
def test_gradient_checkpointing_changes_nothing(make, kind):
    model = make().double()
    put_on(model, kind)
    (plain, slopes), (again, checked) = (step(model, on, task_ids=[0, 4, 2]) for on in (False, True))
    torch.testing.assert_close(again, plain)
    torch.testing.assert_close(checked, slopes)
    assert all(slope is not None and slope.abs().sum() > 0 for slope in slopes.values())


def test_checkpointing_refuses_tasks_that_changed_in_between():
    model = llama().train()
    found = put_on(model, "mhr")
    model.gradient_checkpointing_enable()
    inputs = batch() | {"labels": batch()["input_ids"]}
    with found.tasks([0, 4, 2]):
        lost = model(**inputs).loss
    with pytest.raises(ValueError, match="around the backward pass too"):
        lost.backward()
    first = model(**inputs, task_ids=[0, 4, 2]).loss
    second = model(**inputs, task_ids=[1, 1, 1]).loss
    second.backward()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        first.backward()
    first = model(**inputs, task_ids=[0, 4, 2]).loss
    second = model(**inputs, task_ids=[0, 4, 2]).loss
    (first + second).backward()
    with found.tasks([0, 4, 2]):
        first = model(**inputs).loss
        logits(model, (1, 1, 1))  # evaluation in between
        first.backward()


@all_models
def test_balance_loss_joins_the_loss(make):
    model = make().train()
    found = put_on(model, "headwise")
    inputs = batch() | {"labels": batch()["input_ids"]}
    with_balance = model(**inputs).loss
    balance = found.loss().detach()
    assert 0.1 * len(found) * 0.9 < balance < 0.1 * len(found) * 3
    for adapter in found.values():
        adapter.options = type(adapter.options)(heads=4, experts=3, rank=2)
    torch.testing.assert_close(with_balance, model(**inputs).loss + balance)


class Counting(torch.utils.data.Dataset):
    """Sequences that count on, by one or two, as their task says."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        task = index % 2
        ids = (torch.arange(12) * (1 + task) + index) % 20 + 3
        return {"input_ids": ids, "labels": ids, "task_ids": task}


@pytest.mark.parametrize(
    ("make", "kind"),
    [(llama, "mhr"), (ours, "headwise"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (llama, "headwise"), (ours, "mhr"), (MODELS["adopted"], "headwise")))],
)  # fmt: skip
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate")
def test_trainer(make, kind, tmp_path):
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = mh.adapt(model, SPECS[kind], TARGETS)
    arguments = TrainingArguments(
        tmp_path, max_steps=25, per_device_train_batch_size=8, learning_rate=0.1, logging_steps=5, save_strategy="no",
        use_cpu=True, report_to=[], disable_tqdm=True, gradient_checkpointing=True, gradient_accumulation_steps=2,
        remove_unused_columns=False, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0] and trainer.evaluate()["eval_loss"] < 0.8 * losses[0]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    found.save(tmp_path / "adapters.safetensors")
    fresh = make()
    mh.load_adapters(fresh, tmp_path / "adapters.safetensors")
    both = (logits(each.eval(), (0, 1, 0), use_cache=False) for each in (fresh, model))  # as checkpointing has it
    assert torch.equal(*both)


def test_any_module():
    """Of any shape of input, beside norms and convolutions; with other adapters on other layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 1), nn.Flatten(), nn.Linear(40, 12), nn.GELU(), nn.Linear(12, 8))
    first = mh.adapt(model, "mhr(splits=2, tasks=3)", ["2"])
    both = mh.adapt(model, "headwise-moe(heads=3)", ["4"])
    assert [*first] == ["2"] and [*both] == [*mh.adapters(model)] == ["2", "4"]
    assert all(p.requires_grad for p in both.parameters()) and not model[0].weight.requires_grad
    redraw(both)
    x = torch.randn(6, 4, 5)
    y = model(x, task_ids=[0, 1, 2])  # two rows for each
    torch.testing.assert_close(y[2:4], model(x[2:4], task_ids=1))
    with pytest.raises(mh.OptionError, match="has an adapter already"):
        mh.adapt(model, "mhr(splits=2)", ["2"])
    with pytest.raises(ValueError, match="only adapters of mhr"):
        both.few_shot()
    assert "2 adapters" in repr(both) and "headwise-moe(heads=3)" in repr(both)
    groups = both.groups(lr=1.0, routing_lr=2.0)
    assert [sum(p.numel() for p in group["params"]) for group in groups] == [
        8 * 4 * 52 + 4 * 4 * (12 + 3 * 8), 3 * 2 * 8 + 12 * 4
    ]  # fmt: skip
    both.unload()
    assert all(p.requires_grad for p in model.parameters())


def test_our_decoder():
    torch.manual_seed(0)
    model = Decoder(VOCAB, "mla(rank=12, rope_dim=4)", 32, 4, 2).eval()
    found = put_on(model, "mhr", ["q_proj", "o_proj", "up_proj"])
    ids, cache = batch()["input_ids"], mh.Cache()
    full = model(ids, task_ids=[0, 4, 2])
    with found.tasks([0, 4, 2]), torch.no_grad():
        steps = [model(ids[:, t : t + 1], cache=cache) for t in range(8)]
    torch.testing.assert_close(torch.cat(steps, 1), full, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", ["mla", "mla(view=absorbed)", "mlra"])
def test_a_weight_that_is_read_past_its_layer_is_refused(spec):
    """An absorbed view would not see the adapter."""
    model = Decoder(VOCAB, spec, 32, 4, 1)
    with pytest.raises(mh.OptionError, match="reads the weight of 'kv_b_proj' itself"):
        mh.adapt(model, "mhr(splits=4)", ["kv_b_proj"])
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("q", "no layer 'q'; the linear layers are called"),
        ("mlp", "is a LlamaMLP; adapters go beside linear layers"),
        ("embed_tokens", "is a Embedding"),
    ],
)
def test_refused_targets(target, why):
    with pytest.raises(mh.OptionError, match=why):
        mh.adapt(llama(), "mhr", ["q_proj", target])
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
    with pytest.raises(mh.OptionError, match="reads the weight of 'out_proj' itself"):
        mh.adapt(attention, "mhr", ["out_proj"])


def test_an_error_points_at_the_token():
    with pytest.raises(mh.SpecError, match=r"no option 'skils'; it has splits, skills") as error:
        mh.adapt(llama(), "mhr(splits=4, skils=3)", ["q_proj"])
    *_, line, mark = str(error.value).splitlines()
    assert line[mark.index("^") :].startswith("skils")


def test_copies_and_pickles_are_independent():
    model = llama()
    found = put_on(model, "mhr")
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    want = logits(model)
    assert torch.equal(logits(twin), want) and torch.equal(logits(loaded), want)
    mh.adapters(twin).tasks(1)
    with pytest.raises(ValueError, match="not told which"):
        logits(model, None)
    mh.adapters(twin).unload()
    assert torch.equal(logits(model), want) and len(found) == 3 * LAYERS


def test_numbers_of_adapters_are_float32_or_wider():
    model = llama().to(torch.bfloat16)
    found = put_on(model, "mhr")
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    got = logits(model)
    exact = llama().to(torch.bfloat16).double()
    mh.adapt(exact, SPECS["mhr"], TARGETS)
    exact.load_state_dict(model.state_dict())
    assert got.dtype == torch.bfloat16
    want = logits(exact)
    assert ((got.double() - want).norm() / want.norm()) < 0.05
    found.merge(2)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_every_kind_is_listed_with_its_paper():
    assert [*kinds()] == ["headwise-moe", "mhr"]
    for name, kind in kinds().items():
        options = kind()
        assert isinstance(options.build(16, 8), Adapter) and kind.paper in kind.__doc__ and options.name == name


def test_example(monkeypatch, capsys):
    """It runs, on equal terms."""
    path = Path(__file__).parents[2] / "examples" / "forgetting.py"
    monkeypatch.setattr("sys.argv", [str(path), "--seeds", "1", "--steps", "2"])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[0].split(":")[1] == said[1].split(":")[1] and sum("-BWT" in line for line in said) == 4


def test_peft_is_asked_for_by_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"manyheads\[peft\]"):
        to_peft(put_on(llama(), "mhr"), tmp_path)


def test_equal_to_poly_of_peft(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, inputs, ids = llama(), batch(), torch.tensor([0, 4, 2])
    found = mh.adapt(model, f"mhr(splits=4, skills=3, rank=2, tasks={TASKS}, alpha=3.0)", TARGETS)
    redraw(found)
    to_peft(found, tmp_path)
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(**inputs, task_ids=ids).logits, logits(model), atol=1e-5, rtol=1e-5)
    saved = peft.get_peft_model_state_dict(theirs)
    assert saved.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    for spec, why in (("headwise-moe(heads=4)", "no adapter like"), ("mhr(splits=4, form=ia3)", "Poly has no mhr")):
        with pytest.raises(ValueError, match=why):
            to_peft(mh.adapt(llama(), spec, ["q_proj"]), tmp_path)
    mixed = llama()
    mh.adapt(mixed, "mhr(splits=4)", ["q_proj"])
    with pytest.raises(ValueError, match="one set of numbers"):
        to_peft(mh.adapt(mixed, "mhr(splits=2)", ["v_proj"]), tmp_path)
