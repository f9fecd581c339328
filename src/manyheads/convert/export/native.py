"""Our own checkpoint: read by transformers' Auto classes once manyheads is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from manyheads.convert.export.atomic import new_folder
from manyheads.convert.export.reload import compare_reloaded
from manyheads.convert.export.report import ExportReport
from manyheads.convert.quiet import quiet
from manyheads.stack.pretrained import ManyheadsForCausalLM


def save(
    model: ManyheadsForCausalLM,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    notes: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write a model, its tokenizer and its notes to a new folder, reload it and compare.

    Args:
        model: is left as it is; notes go to the file alone.
        notes: how the checkpoint came to be; added to those in the model's config, must be JSON.

    Raises:
        FileExistsError: `folder` exists.
        ExportError: the file reads back as another model.
        OSError: the disk is full.
    """
    own = model.config.notes
    # Tied tensors are counted once, as they are written.
    size = sum(tensor.numel() * tensor.element_size() for tensor in {*model.parameters(), *model.buffers()})
    try:
        model.config.notes = own | dict(notes or {})
        with new_folder(folder, needed=size) as work:
            with quiet():
                model.save_pretrained(work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
            found = compare_reloaded(model, work, model.dtype)
            size = sum(file.stat().st_size for file in work.glob("*.safetensors"))
    finally:
        model.config.notes = own
    return ExportReport(
        folder=Path(folder), format="manyheads", loads_as=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."), bytes=size, cache_floats=_cache_floats(model),
        difference=found.difference, kl=found.kl, lossless=("every tensor, as it is in the model",),
    )  # fmt: skip


def _cache_floats(model: ManyheadsForCausalLM) -> float:
    """The mean over layers of the numbers cached for each token."""
    costs = [layer.spec.cost(layer.dim, layer.heads, layer.site) for layer in model.attentions]
    return float(sum(cost.cache_floats for cost in costs)) / len(costs)
