"""Both bodies under training: losses, checkpointing, packing, `Trainer`, adapters."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from tests.stack.tiny import BODIES, LAYERS, ZOO, batch, model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from manyheads import Links

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")

both = pytest.mark.parametrize("body", BODIES)
zoo = pytest.mark.parametrize("case", ZOO)


def labelled():
    inputs = batch()
    return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def gradients(of):
    return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}


@both
@zoo
def test_every_weight_has_a_gradient(case, body):
    of = model(case, body).train()
    out = of(**labelled())
    assert out.cache is None
    out.loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in of.parameters())


@both
def test_loss_and_auxiliary_loss(body):
    of, links = model("mla+moh", body, initializer_range=0.1).train(), Links()
    inputs = labelled()
    out = of(**inputs, links=links)
    plain = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    extra = torch.stack([*links.aux.values()]).mean()
    torch.testing.assert_close(out.loss, plain + 0.01 * extra)
    of.config.aux_weight = 0.5
    torch.testing.assert_close(of(**inputs).loss, plain + 0.5 * extra)
    assert torch.equal(of.eval()(**inputs).loss, of(**inputs, use_cache=True).loss)


@both
@zoo
def test_checkpointing_changes_nothing(case, body):
    of = model(case, body, initializer_range=0.1).double().train()
    again = copy.deepcopy(of)
    again.gradient_checkpointing_enable()
    assert again.is_gradient_checkpointing
    calls = []
    again.attentions[0].register_forward_hook(lambda *_: calls.append(1))
    losses = []
    for each in (of, again):
        losses.append(each(**labelled()).loss)
        losses[-1].backward()
    assert len(calls) == 2
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients(of), gradients(again), atol=1e-6, rtol=1e-6)
    again.gradient_checkpointing_disable()
    assert not again.is_gradient_checkpointing


@both
def test_reentrant_checkpointing_is_refused(body):
    of = model("shared", body)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        of.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert not of.is_gradient_checkpointing


@both
@zoo
def test_packed_documents_do_not_leak(case, body):
    of, cuts = model(case, body), (1, 5, 2, 4)
    ids = batch((0,))["input_ids"]
    places = torch.cat([torch.arange(length) for length in cuts])[None]
    alone = torch.cat([of(part, use_cache=False).logits for part in ids.split(cuts, 1)], 1)
    packed = of(ids, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(packed, alone, atol=5e-5, rtol=1e-4)
    labels = {"input_ids": ids, "position_ids": places, "labels": ids}
    torch.testing.assert_close(of(**labels).logits, alone, atol=5e-5, rtol=1e-4)
    if "moh" not in case:  # routing in training is what it is in evaluation, dropout is off
        torch.testing.assert_close(of.train()(**labels).logits, alone, atol=5e-5, rtol=1e-4)


class Counting(torch.utils.data.Dataset):
    """Sequences that count on."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(16) + index) % 20 + 3
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@both
@pytest.mark.parametrize("case", ["mla+moh", "shared"])
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate")
def test_trainer(tmp_path, case, body):
    of = model(case, body, initializer_range=0.05)
    arguments = TrainingArguments(
        tmp_path, max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1, save_steps=20,
        use_cpu=True, report_to=[], disable_tqdm=True, gradient_checkpointing=True, seed=0,
        eval_strategy="steps", eval_steps=20,
    )  # fmt: skip
    trainer = Trainer(of, arguments, train_dataset=Counting(), eval_dataset=Counting())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < 0.6 * losses[0] and evaluated[-1] < 0.6 * losses[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    with torch.no_grad():
        assert torch.equal(again(**batch()).logits, of.eval()(**batch()).logits)


@both
def test_lora_by_name(body):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    of, inputs = model("gqa", body), batch()
    with torch.no_grad():
        before = of(**inputs).logits
    tuned = peft.get_peft_model(of, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    names = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert len(names) == LAYERS * 2 * 2 and all("lora" in name for name in names)
    torch.testing.assert_close(tuned(**inputs).logits, before)
    tuned(**labelled()).loss.backward()
    assert all(p.grad is not None for p in tuned.parameters() if p.requires_grad)
    assert tuned.generate(**inputs, max_new_tokens=4, do_sample=False).shape == (3, 16)
