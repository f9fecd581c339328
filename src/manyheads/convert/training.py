"""What trainings have in common: steps that follow from a seed, rates, whole files, interrupts."""

from __future__ import annotations

import io
import math
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from manyheads.convert.resume import whole_file


def step_seed(seed: int, step: int) -> int:
    """An even number for each step of a training with this seed: what the step draws follows from it alone."""
    return 2 * (1_000_003 * (seed + 1) + step)


def rate(step: int, steps: int, lr: float, warmup: int) -> float:
    """The learning rate: rising over `warmup` steps, then a cosine to a tenth of `lr`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return lr * (0.1 + 0.9 * cosine)


def save_state(state: dict[str, Any], file: Path) -> None:
    """Whole or not at all."""
    buffer = io.BytesIO()  # torch's own writer does not say that a disk is full
    torch.save(state, buffer)
    with whole_file(file) as partial:
        partial.write_bytes(buffer.getbuffer())


def load_state(file: Path) -> dict[str, Any]:
    """Raises a ValueError for what `save_state` did not write."""
    with readable(file):
        return torch.load(file, weights_only=True, map_location="cpu")


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Whatever is wrong with a checkpoint that is read inside is a ValueError that names it."""
    try:
        yield
    except (KeyError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read as a checkpoint; remove it, and its run starts anew") from error


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[Any, ...]] = []
    before = signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])
