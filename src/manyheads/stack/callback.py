"""Schedules under transformers' `Trainer`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Listener(Protocol):
    """What has a schedule."""

    def on_step(self, progress: float) -> None: ...


class ScheduleCallback(TrainerCallback):
    """Tells every part with a schedule how far training is, 0 before the first step and 1 after the last.

    >>> Trainer(model, arguments, train_dataset=data, callbacks=[ScheduleCallback()])

    A loop of your own calls `model.on_step(step / steps)` itself.

    Args:
        listeners: what else has an `on_step`, such as `EPAS`.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        model: nn.Module | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self._tell(model, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        model: nn.Module | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self._tell(model, state)

    def _tell(self, model: nn.Module | None, state: TrainerState) -> None:
        progress = min(1.0, state.global_step / max(1, state.max_steps))
        for listener in self.listeners:
            listener.on_step(progress)
        _tell(model, progress)


def _tell(model: nn.Module | None, progress: float) -> None:
    """To the outermost module that listens: adapters and data parallelism wrap it."""
    for module in () if model is None else model.modules():
        if callable(getattr(type(module), "on_step", None)):
            module.on_step(progress)  # type: ignore[operator]
            return
