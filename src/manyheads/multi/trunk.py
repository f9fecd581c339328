"""Pretrained trunks by name."""

from __future__ import annotations

from importlib import import_module

from torch import nn
from transformers import AutoModel

from manyheads.convert.source import load_source


def load_trunk(name: str) -> nn.Module:
    """A pretrained model without its own head, in evaluation mode.

    Args:
        name: a hub name, a folder, a GGUF file or `smollm2`, for transformers' `AutoModel`; or `timm:NAME`, which gives
            rows `[B, num_features]` of images.

    Raises:
        SourceError: the files are missing or corrupt, or the hub does not answer.
        ImportError: timm, or the package of `smollm2`, is not installed; it names the extra.
    """
    if name.startswith("timm:"):
        try:
            timm = import_module("timm")
        except ImportError as error:
            raise ImportError(f"{name} needs timm: pip install 'manyheads[timm]'") from error
        return timm.create_model(name.removeprefix("timm:"), pretrained=True, num_classes=0).eval()
    return load_source(name, auto=AutoModel, spare=("pooler.",)).model.base_model
