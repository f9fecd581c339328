"""Low-rank adapters of the peft package on what a training trains; merged into the weights afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def put_lora(model: PreTrainedModel, inside: Iterable[nn.Module], rank: int) -> Any:
    """Put LoRA of a rank beside each linear layer inside some modules of a model, in place; all else is frozen.

    Returns:
        peft's model around `model`. Its `merge_and_unload()` adds the adapters to the weights and takes them away.

    Raises:
        ImportError: peft is not installed. ValueError: no linear layer.
    """
    try:
        import peft  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("LoRA is peft's; pip install 'manyheads[peft]'") from error
    names = linear_layers(model, inside)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def linear_layers(model: nn.Module, inside: Iterable[nn.Module]) -> list[str]:
    """Names of the linear layers inside some modules of a model, but for those whose weight is read past them."""
    within = {id(module) for each in inside for module in each.modules()}
    names = [
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear) and id(child) in within and name not in getattr(module, "unhooked", ())
    ]
    if not names:
        raise ValueError("there is no linear layer to put LoRA on")
    return names
