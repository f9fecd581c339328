"""Text for calibration and evaluation: what every Python carries, or the user's own files, cut into token windows.

The protocol: the first 80 % of the characters calibrate, the last 20 % evaluate, and neither sees the other.
"""

import ast
import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# Libraries about mail, the web, drawing, logs and numbers: far from the language reference of `default_text`.
_SECOND = """
    turtle logging logging.handlers email.message email.header email.charset email.policy smtplib imaplib ftplib
    http.client http.cookiejar http.server urllib.request urllib.parse socketserver ssl ipaddress configparser
    optparse shutil tarfile zipfile tempfile difflib textwrap statistics fractions random xml.sax.handler threading
"""
PLENTY = 16
"""Characters a token; text has about four, so this many always hold enough tokens."""


def default_text() -> str:
    """The topics of Python's own `help()`: 0.46 million characters of technical prose, in sorted key order.

    The text differs a little between versions of Python, and with it every figure measured on it.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def second_text() -> str:
    """Prose unrelated to `default_text`, to see whether a conversion fits its calibration text only.

    The prose paragraphs in the docstrings of thirty modules of the standard library: mail, web, drawing, statistics.
    """
    return "\n\n".join(dict.fromkeys(chain.from_iterable(map(_paragraphs, _SECOND.split()))))


def _paragraphs(module: str) -> Iterator[str]:
    """The prose in a module's docstrings, read from its source; nothing where an installation carries none."""
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec and spec.loader else None  # pyright: ignore
    for node in ast.walk(ast.parse(source or "")):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                text = " ".join(paragraph.split())
                letters = sum(character.isalpha() or character in " ,.'" for character in text)
                if len(text) >= 120 and letters > 0.94 * len(text) and ">>>" not in text:
                    yield text


def read_text(files: Sequence[Path]) -> str:
    """The files' text, UTF-8, joined by a blank line in the order given.

    Raises:
        ValueError: no file, an empty one, or one that is not UTF-8 text (naming the file and the byte).
        OSError: a file that cannot be opened.
    """
    if not files:
        raise ValueError("no text files given")
    return "\n\n".join(map(_read, files))


def _read(file: Path) -> str:
    return "".join(checked_blocks(file))


def checked_blocks(file: Path, size: int = 1 << 20) -> Iterator[str]:
    """A file's text, UTF-8 without a byte-order mark, block by block.

    Raises:
        ValueError: where it is no text, naming the file and the byte, or is empty. OSError: it cannot be opened.
    """
    decoder, at, blank = codecs.getincrementaldecoder("utf-8-sig")(), 0, True
    with Path(file).open("rb") as stream:
        data = b" "
        while data:
            data = stream.read(size)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                offset = at + len(data) - len(error.object) + error.start
                raise ValueError(
                    f"{file} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset}"
                ) from error
            if (zero := data.find(0)) >= 0:
                raise ValueError(f"{file} is not text: a zero byte at offset {at + zero}")
            at += len(data)
            blank = blank and not text.strip()
            yield text
    if blank:
        raise ValueError(f"{file} holds no text")


def split(text: str, share: float = 0.8) -> tuple[str, str]:
    """Cut once: the first `share` of the characters for calibration, the rest for evaluation."""
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, not {share}")
    cut = int(len(text) * share)
    return text[:cut], text[cut:]


def windows(
    tokenizer: PreTrainedTokenizerBase, text: str, *, count: int, length: int, spread: bool = False
) -> Int64[Tensor, "count length"]:
    """The first `count` windows of `length` tokens, back to back, without special tokens.

    spread: of all windows of the text take `count` that lie evenly over it.

    Raises:
        ValueError: the text has too few tokens; the message says how many, and what would fit.
    """
    if count < 1 or length < 2:
        raise ValueError(f"windows need count >= 1 and length >= 2, not {count} and {length}")
    needed = count * length
    options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}  # longer than the model's context is fine
    tokens = tokenizer(text if spread else text[: PLENTY * needed], **options).input_ids
    if not spread and len(tokens) < 2 * needed and len(text) > PLENTY * needed:  # the cut might show in the last tokens
        tokens = tokenizer(text, **options).input_ids
    if len(tokens) < needed:
        fits = [f"{len(tokens) // length} windows of {length}"] if len(tokens) >= length else []
        fits += [f"{count} windows of {len(tokens) // count}"] if len(tokens) >= 2 * count else []
        raise ValueError(
            f"the text has {len(tokens)} tokens, and {count} windows of {length} need {needed}; "
            + (f"{' or '.join(fits)} would fit" if fits else "a longer text is needed")
        )
    cut = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return cut[torch.linspace(0, len(cut) - 1, count).round().long()] if spread else cut[:count]


def max_positions(config: PreTrainedConfig) -> int | None:
    """How long a text a model has positions for; None where nothing says so."""
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    return next((count for count in named if isinstance(count, int)), None)


def fitting(cut: tuple[int, int], limit: int | None, notes: list[str]) -> tuple[int, int]:
    """(Windows, tokens in each) no longer than the model's positions; a note says so where they are cut."""
    count, length = cut
    if limit is None or length <= limit:
        return cut
    said = f"windows of {length} tokens are longer than the model's {limit} positions; cut to {limit}"
    if said not in notes:
        notes.append(said)
    return count, limit


@dataclass(frozen=True)
class Texts:
    """Token windows that never overlap.

    Attributes:
        calibration: `[16, 1024]` by default, evenly over its side of the text.
        evaluation: `[5, 2048]` by default, the first of its side.
    """

    calibration: Int64[Tensor, "windows length"]
    evaluation: Int64[Tensor, "windows length"]

    @classmethod
    def from_text(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        *,
        calibration_windows: int = 16,
        calibration_length: int = 1024,
        evaluation_windows: int = 5,
        evaluation_length: int = 2048,
        share: float = 0.8,
    ) -> "Texts":
        """Split the text and cut both sides into windows.

        Raises:
            ValueError: one side is too short; nothing is ever reduced silently.
        """
        sides = zip(
            ("calibration", "evaluation"),
            split(text, share),
            ((calibration_windows, calibration_length), (evaluation_windows, evaluation_length)),
            strict=True,
        )
        cut = {}
        for side, part, (count, length) in sides:
            try:
                cut[side] = windows(tokenizer, part, count=count, length=length, spread=side == "calibration")
            except ValueError as error:
                raise ValueError(f"{side}: {error}") from error
        return cls(**cut)
