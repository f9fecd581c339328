"""Write a model for others to load: a stock class where one can hold it, our own where none can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from manyheads.convert.export.atomic import new_folder
from manyheads.convert.export.deepseek import to_deepseek
from manyheads.convert.export.family import to_family
from manyheads.convert.export.native import save
from manyheads.convert.export.report import ExportError, ExportReport
from manyheads.stack.pretrained import ManyheadsForCausalLM

FORMATS: dict[str, Callable[..., ExportReport]] = {
    "deepseek": to_deepseek,
    "family": to_family,
    "manyheads": save,
}
"""By name; each takes (model, folder, *, tokenizer=None) and options of its own."""


def save_plainly(
    model: ManyheadsForCausalLM, folder: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None
) -> ExportReport:
    """As the stock class of the model's family where that holds it, else as our own."""
    try:
        return to_family(model, folder, tokenizer=tokenizer)
    except ExportError:
        return save(model, folder, tokenizer=tokenizer)


__all__ = [
    "FORMATS", "ExportError", "ExportReport", "new_folder", "save", "save_plainly", "to_deepseek", "to_family",
]  # fmt: skip
