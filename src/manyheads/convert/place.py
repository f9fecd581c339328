"""Where a training runs: in this process alone, or in one of several under `accelerate launch`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.convert.ranks import Ranks

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Trained weights by name, and an optimiser's state."""


class Alone:
    """One process, on the device where the model is."""

    rank, world, sharded = 0, 1, False

    def __init__(self, device: torch.device, bfloat16: bool) -> None:
        self.device, self.bfloat16 = device, bfloat16

    def prepare(self, module: nn.Module, optimiser: Optimizer) -> tuple[nn.Module, Optimizer]:
        return module, optimiser

    def compute(self) -> AbstractContextManager[Any]:
        """Matrix products inside are in half precision, where that was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Gradients of passes inside are not exchanged yet."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, module: nn.Module, limit: float) -> Tensor:
        """Scale gradients so that their norm is at most `limit`; the norm before."""
        return nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], limit)

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes, the same in each."""
        return values

    def state(self, module: nn.Module, optimiser: Optimizer) -> State:
        """All of both, on the CPU, where rank 0 needs it."""
        weights = {name: p.detach().cpu() for name, p in _plain(module).named_parameters() if p.requires_grad}
        return weights, optimiser.state_dict()

    @torch.no_grad()
    def restore(self, module: nn.Module, optimiser: Optimizer, weights: dict[str, Tensor], state: Any = None) -> None:
        """Put back what `state` gave; without a state, the weights alone."""
        trained = {name: p for name, p in _plain(module).named_parameters() if p.requires_grad}
        if trained.keys() != weights.keys():
            raise KeyError(f"{len(trained.keys() ^ weights.keys())} weights differ")
        for name, p in trained.items():
            p.copy_(weights[name])
        if state is not None:
            optimiser.load_state_dict(state)

    def wait(self) -> None:
        """Until every process is here."""


class Launched(Alone):
    """One of the processes of `accelerate launch`, which says how models are wrapped and computed."""

    def __init__(self, bfloat16: bool) -> None:
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise ImportError("several processes need accelerate; pip install 'manyheads[train]'") from error
        self.accelerator = Accelerator()
        super().__init__(self.accelerator.device, bfloat16)
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.sharded = str(self.accelerator.distributed_type).endswith("FSDP")
        if self.sharded and not self.accelerator.is_fsdp2:
            raise ValueError("weights are sharded by FSDP 2 only; set fsdp_version: 2 in accelerate's configuration")

    def prepare(self, module: nn.Module, optimiser: Optimizer) -> tuple[nn.Module, Optimizer]:
        return self.accelerator.prepare(module, optimiser)

    def accumulating(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(module)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, module: nn.Module, limit: float) -> Tensor:
        trained = [p for p in module.parameters() if p.requires_grad]
        norm: Any = self.accelerator.clip_grad_norm_(trained, limit)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def total(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values, "sum")  # type: ignore[return-value]

    def state(self, module: nn.Module, optimiser: Optimizer) -> State:
        if not self.sharded:
            return super().state(module, _inner(optimiser))
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return get_state_dict(module, _inner(optimiser), options=_whole())  # type: ignore[return-value]

    def restore(self, module: nn.Module, optimiser: Optimizer, weights: dict[str, Tensor], state: Any = None) -> None:
        if not self.sharded:
            super().restore(module, _inner(optimiser), weights, state)
            return
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        given: dict[str, Any] = {**weights}
        set_model_state_dict(module, given, options=_whole(strict=False))
        if state is not None:
            set_optimizer_state_dict(module, _inner(optimiser), state, options=_whole())

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def here(device: torch.device, bfloat16: Callable[[torch.device], bool]) -> Alone:
    """The place of this process. bfloat16: whether products are in half precision, by device."""
    launched = Ranks.here().world > 1 or any(name.startswith("ACCELERATE_") for name in os.environ)
    if not launched:
        return Alone(device, bfloat16(device))
    place = Launched(False)
    place.bfloat16 = bfloat16(place.device)
    return place


def _plain(module: nn.Module) -> nn.Module:
    """Without the wrapper of data parallelism."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def _inner(optimiser: Any) -> Optimizer:
    """Without accelerate's wrapper."""
    return getattr(optimiser, "optimizer", optimiser)


def _whole(**options: Any) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, **options)
