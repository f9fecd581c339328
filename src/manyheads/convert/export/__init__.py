"""Write a model for others to load: a stock class where one can hold it, our own where none can."""

from __future__ import annotations

from collections.abc import Callable

from manyheads.convert.export.atomic import new_folder
from manyheads.convert.export.deepseek import to_deepseek
from manyheads.convert.export.native import save
from manyheads.convert.export.report import ExportError, ExportReport

FORMATS: dict[str, Callable[..., ExportReport]] = {"deepseek": to_deepseek, "manyheads": save}
"""By name; each takes (model, folder, *, tokenizer=None) and options of its own."""

__all__ = ["FORMATS", "ExportError", "ExportReport", "new_folder", "save", "to_deepseek"]
