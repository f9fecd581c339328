"""Safetensors files written one after the other, so that no more than one of them is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 * 10**9


def write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, limit: int = SHARD_BYTES) -> int:
    """Write named tensors as they come, in files of about `limit` bytes with an index; returns the bytes of all.

    One file is called `model.safetensors`, several are numbered as transformers expects.
    """
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        save_file(held, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()
        size = 0

    for name, tensor in tensors:
        grown = tensor.numel() * tensor.element_size()
        if held and size + grown > limit:
            flush()
        held[name] = tensor.contiguous()
        size, total = size + grown, total + grown
    flush()
    _name(files, folder, total)
    return total


def _name(files: list[list[str]], folder: Path, total: int) -> None:
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for index, names in enumerate(files):
        final = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"{index}.safetensors").rename(folder / final)
        where |= dict.fromkeys(names, final)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2), "utf-8")
