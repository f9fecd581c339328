"""What the jobs that heal end to end share: devices, and checkpoints that say how they were healed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manyheads.convert.distil import Distil, Distilled
from manyheads.convert.quiet import quiet


@contextmanager
def on_device(*models: PreTrainedModel) -> Iterator[None]:
    """Models on this process's GPU, where there is one, and back on the CPU afterwards."""
    there = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true", "yes")
    if there:
        for model in models:
            model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for model in models if there else ():
            model.to("cpu")  # type: ignore[arg-type]


def summary(found: Distilled) -> dict[str, Any]:
    """What a training found, for a file."""
    return {
        "curve": [held._asdict() for held in found.curve], "steps": found.steps, "best": found.best,
        "tokens": found.tokens, "seconds": found.seconds,
        "seconds_per_step": round(found.stepping / max(1, found.steps), 3),
    }  # fmt: skip


def save_healed(
    student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, found: Distilled, options: Distil
) -> None:
    """The checkpoint; the notes of one of ours say how it was healed."""
    notes = getattr(student.config, "notes", None)
    if notes is not None:
        student.config.notes = notes | {"healed": summary(found) | {"options": asdict(options)}}
    with quiet():
        student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def put_weights(model: PreTrainedModel, found: Distilled) -> None:
    """The best weights of a training into a model as it was before."""
    assert found.file is not None
    weights = {name.removeprefix("student."): tensor for name, tensor in load_file(found.file).items()}
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.copy_(weights.pop(name))
    if weights:
        raise ValueError(f"{found.file} holds {len(weights)} weights that the model has not")
