"""What calibration text says of every layer of a source, measured once and kept in a folder, one file a layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyheads.convert.adopt import family_of
from manyheads.convert.devices import CPU
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.probe import Answered, Importance, Lookups, retrieval_importance
from manyheads.convert.ranks import ALONE, Ranks, wait_for
from manyheads.convert.resume import whole_file, write_text
from manyheads.convert.stats import AttentionStats, measure, power, sensitivity
from manyheads.convert.stream import InMemory, Layers, attention_of, run

Progress = Callable[[str, int, int], object]
SURVEYED = 4096
"""Calibration tokens that the survey looks at (each window costs a full attention map a head and layer)."""
FELT = 6144
"""Calibration tokens whose gradients say how the loss feels each layer's output."""


class Calibration(NamedTuple):
    """Calibration windows: tokens and positions `[N, T]`, and whether matrix products may be in half precision."""

    tokens: Tensor
    positions: Tensor
    bfloat16: bool = False

    def some(self, tokens: int) -> Tensor:
        """Indices of windows with about so many tokens in all, evenly spread."""
        count = min(max(1, tokens // self.tokens.shape[1]), len(self.tokens))
        return torch.linspace(0, len(self.tokens) - 1, count).round().long()


def stretched(count: int, length: int, limit: int, seed: int = 0) -> Tensor:
    """Positions `[count, length]`; half of the windows get two jumps each, uniform in size, and end below `limit`."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length).repeat(count, 1)
    if limit <= length + 2:
        return positions
    for row, jumps in zip(positions, torch.rand(count, generator=generator) < 0.5, strict=True):
        if not jumps:
            continue
        for cut in torch.randint(length // 16, length, (2,), generator=generator).tolist():
            row[cut:] += int(torch.randint((limit - length) // 2, (), generator=generator))
    return positions


def survey(layers: Layers, text: Calibration, folder: Path, progress: Progress, ranks: Ranks = ALONE) -> None:
    """Measure every layer on the source's hidden states; one file a layer, kept for the conversions.

    Several processes measure every n-th layer each, and wait for the files of the others.
    """
    count = len(layers.config.specs)
    files = [folder / f"{index}.safetensors" for index in range(count)]
    if all(file.exists() for file in files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    metrics = _felt(layers, text)
    hidden = layers.embed(text.tokens)
    some = text.some(SURVEYED)
    mine = ranks.share(range(count))
    for index in range(count):
        with layers.open(index) as layer:
            seen = run(layer, layers.config, hidden, text.positions, record=index in mine, bfloat16=text.bfloat16)
            hidden = seen.after
            progress("calibrate", index + 1, count)
            if index not in mine:
                continue
            attention = attention_of(layer, layers.config)
            felt = None if metrics is None else metrics[index].to(hidden.device)
            root = torch.eye(hidden.shape[-1], device=hidden.device) if felt is None else power(felt, 0.5).float()
            stats = measure(attention, seen.x[some], root, text.positions[some])
            tensors = dict(stats._asdict())
            if felt is not None:
                tensors["felt"] = felt
            if "rope" in str(attention.spec):
                tensors["damage"] = gauge(attention, stats).damage
        save({name: t.contiguous() for name, t in tensors.items()}, files[index])
    wait_for(files)


def _felt(layers: Layers, text: Calibration) -> list[Tensor] | None:
    """The loss's metric at each layer's output; needs the whole model, so a model read layer by layer goes without."""
    if not isinstance(layers, InMemory):
        return None
    assert layers.config.base is not None
    after = family_of(layers.config.base).after_attention
    places = [layers.model.model.get_submodule(after.format(i)) for i in range(len(layers.config.specs))]
    some = text.some(FELT)
    batch = max(1, 1024 // text.tokens.shape[1])
    return sensitivity(
        layers.model, text.tokens[some], places, text.positions[some], batch=batch, bfloat16=text.bfloat16
    )


def surveyed(folder: Path, index: int, device: torch.device = CPU) -> tuple[AttentionStats, Tensor | None]:
    """What the survey knows of a layer, on a device: its statistics, and the loss's metric at its output."""
    read = load_file(folder / f"{index}.safetensors")
    file = {name: tensor.to(device) for name, tensor in read.items()}
    return AttentionStats(*(file[name] for name in AttentionStats._fields)), file.get("felt")


def look_up(layers: InMemory, tokens: Tensor, pairs: int, folder: Path, seed: int, progress: Progress) -> None:
    """Measure what each head is worth to look-ups among tokens of the text; a file beside those of the layers."""
    file = folder / f"lookups-{pairs}.json"
    if not file.exists():
        limit = getattr(layers.config.base, "max_position_embeddings", None) or 2 * pairs + 1
        lookups = Lookups.draw(tokens, min(pairs, len(tokens.unique()) // 2, (limit - 1) // 2), seed=seed)
        found = retrieval_importance(layers.model, lookups, lambda *step: progress("probe", *step))
        write_text(json.dumps(asdict(found)), file)


def looked_up(folder: Path, pairs: int) -> Importance:
    """What `look_up` has found."""
    found = json.loads((folder / f"lookups-{pairs}.json").read_text())
    return Importance(Answered(*found["whole"]), found["accuracy"], found["log_probability"])


def turning_damage(folder: Path, count: int) -> Tensor:
    """What stopping each rotary component would cost, summed over layers: all layers keep the same ones."""
    damages = [_damage_of(folder / f"{index}.safetensors") for index in range(count)]
    known = [damage for damage in damages if damage is not None]
    return torch.stack(known).sum(0) if known else torch.zeros(0)


def _damage_of(file: Path) -> Tensor | None:
    """A copy: a tensor of a file keeps all of it mapped."""
    damage = load_file(file).get("damage")
    return None if damage is None else damage.clone()


def save(tensors: dict[str, Tensor], file: Path) -> None:
    """Whole or not at all."""
    with whole_file(file) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
