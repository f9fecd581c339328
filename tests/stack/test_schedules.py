"""Parts that change in the course of training, in a plain loop and under `Trainer`."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from tests.stack.test_training import Counting
from tests.stack.tiny import BODIES, LAYERS, model
from torch import nn
from transformers import Trainer, TrainingArguments

from manyheads.core import registry
from manyheads.core.part import Gate, Part
from manyheads.stack import ScheduleCallback, Stack
from manyheads.stack.callback import _tell


class Listener(Gate):
    def __init__(self):
        super().__init__()
        self.heard = []

    def on_step(self, progress):
        self.heard.append(progress)


@dataclass(frozen=True)
class Listening(Part):
    name = "listening"
    stage = "gate"

    def build(self, before, after, site):
        return Listener()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(registry._PARTS, "listening", Listening)


def heard(layers):
    return [layer.gates[0].heard for layer in layers]


def test_a_plain_loop():
    stack = Stack("gqa + listening", 24, 4, 2, loops=2, cross="gqa + listening")
    for step in range(5):
        stack.on_step(step / 4)
    layers = [*stack.attentions, *(cross for block in stack.blocks for _, cross in block.turns)]
    assert len(layers) == 8 and heard(layers) == [[0.0, 0.25, 0.5, 0.75, 1.0]] * 8


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Trainer needs accelerate")
def test_trainer(tmp_path, body):
    of = model({"specs": "gqa + listening"}, body)
    arguments = TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_steps=2,
    )  # fmt: skip
    Trainer(of, arguments, train_dataset=Counting(), callbacks=[ScheduleCallback()]).train()
    assert heard(of.attentions) == [[0.0, 0.25, 0.5, 0.75, 1.0]] * LAYERS
    heard(of.attentions)[0].clear()
    trainer = Trainer(of, arguments, train_dataset=Counting(), callbacks=[ScheduleCallback()])
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert heard(of.attentions)[0] == [0.5, 0.75, 1.0]


def test_what_wraps_a_model_is_looked_through():
    of = model({"specs": "gqa + listening", "loops": 2})
    _tell(nn.DataParallel(nn.Sequential(of)), 0.5)
    stack = of.model.decoder.stack
    assert heard(stack.attentions) == [[0.5]] * 2 * LAYERS
    _tell(torch.nn.Linear(2, 2), 0.5)
    _tell(None, 0.5)
