"""What reads a column of free text, or of pictures, as features: hashed words, a pretrained encoder, pixels."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.multi.model import pooled

LONGEST = 512
"""Tokens that an encoder reads of a cell, at most."""


def row_of(row: int) -> str:
    """How errors speak of a row, from 0."""
    return f"row {row + 1} below the names"


@dataclass(frozen=True)
class Words:
    """Words hashed into `width` numbers, each with a sign of its own: Σ ± (1 + ln count), scaled to length 1.

    Words are runs of letters and digits in lower case. A gap is zeros. Nothing is learned, so no word is unknown.

    Source: Weinberger et al., Feature Hashing (arXiv 0902.2206).
    """

    name: str
    width: int = 256

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"column {self.name!r}: words in {self.width} numbers; at least 1")

    def features(self, cells: Sequence[str | None]) -> Tensor:
        rows = torch.zeros(len(cells), self.width)
        for row, cell in enumerate(cells):
            for word, count in Counter(re.findall(r"\w+", (cell or "").lower())).items():
                code = crc32(word.encode())  # the same in every process, unlike hash()
                rows[row, (code >> 1) % self.width] += (1 if code & 1 else -1) * (1 + math.log(count))
        return F.normalize(rows)


@dataclass(frozen=True)
class Encoded:
    """The mean of what an encoder of Hugging Face gives for a cell's tokens, centred and scaled over its channels.

    The encoder is not trained, and not saved: a folder or a name of the hub that must be there again to predict.
    A gap is zeros.
    """

    name: str
    encoder: str
    width: int

    @classmethod
    def of(cls, name: str, encoder: str) -> Encoded:
        return cls(name, encoder, _encoder(encoder)[1].config.hidden_size)

    @torch.no_grad()
    def features(self, cells: Sequence[str | None], batch: int = 32) -> Tensor:
        tokenizer, model = _encoder(self.encoder)
        if model.config.hidden_size != self.width:
            raise ValueError(
                f"column {self.name!r}: {self.encoder} is {model.config.hidden_size} wide, where it was {self.width}"
            )
        rows = torch.zeros(len(cells), self.width)
        known = [row for row, cell in enumerate(cells) if cell is not None]
        longest = min(LONGEST, getattr(model.config, "max_position_embeddings", LONGEST), tokenizer.model_max_length)
        for at in range(0, len(known), batch):
            some = known[at : at + batch]
            read = tokenizer(
                [cells[row] for row in some], padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
            asked = {key: read[key] for key in ("input_ids", "attention_mask")}
            made = pooled(model(**asked).last_hidden_state.float(), "mean", read["attention_mask"].bool())
            rows[some] = F.layer_norm(made, (self.width,))
        return rows


@lru_cache(maxsize=1)
def _encoder(name: str) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"encoder {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(getattr(model.config, "hidden_size", None), int):
        raise ValueError(f"encoder {name!r} is a {type(model).__name__}, which says no hidden_size")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ValueError(f"encoder {name!r} has no padding token, and no end of text to take for it")
    return tokenizer, model.eval()


@dataclass(frozen=True)
class Picture:
    """The pixels of a file, made `size` by `size` large: red, green and blue from -1 to 1. A gap is zeros."""

    name: str
    size: int = 16

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"column {self.name!r}: pictures of {self.size} pixels a side; at least 1")

    @property
    def width(self) -> int:
        return 3 * self.size**2

    def features(self, cells: Sequence[str | None]) -> Tensor:
        try:
            image = import_module("PIL.Image")
        except ImportError as error:
            raise ImportError("pictures are read by Pillow: pip install 'manyheads[images]'") from error
        rows = torch.zeros(len(cells), self.width)
        for row, cell in enumerate(cells):
            if cell is None:
                continue
            try:
                with image.open(cell) as picture:
                    small = picture.convert("RGB").resize((self.size, self.size), image.Resampling.BILINEAR)
            except OSError as error:
                why = "no such file" if isinstance(error, FileNotFoundError) else "no picture that can be read"
                raise ValueError(f"column {self.name!r}, {row_of(row)}: {cell}: {why}") from error
            rows[row] = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).float() / 127.5 - 1
        return rows


def located(cells: dict[str, list[str | None]], names: Sequence[str], folder: str | Path) -> dict[str, Any]:
    """The table with the paths of these columns taken from a folder."""
    found = {name: [cell and str(Path(folder) / cell) for cell in cells[name]] for name in names if name in cells}
    return cells | found
