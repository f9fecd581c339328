"""Text to train on that is never whole in memory: files read where a step asks for them, data sets as they stream in.

The protocol is that of `manyheads.convert.text`: of files the first 80 % of the characters are trained on and the last
20 % evaluate; of a data set the first documents evaluate. What a training itself holds out, to know when to stop, is
cut off the training side.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from manyheads.convert.text import PLENTY, checked_blocks, windows
from manyheads.convert.training import step_seed

HELD = 8192
"""Held-out tokens that a training's loss is measured on, at most."""
HELD_SHARE = 0.1
"""Of the training side of a text."""
PREFIX = "datasets:"
_JOINT = b"\n\n"
_BLOCK = 1 << 20  # bytes between places whose character count is known


class TrainingText(Protocol):
    """Windows of tokens to train on, and windows that are held out."""

    digest: str
    """Of all that the windows follow from."""

    def held(self, length: int) -> Tensor:
        """Windows `[N, length]` that no step sees.

        Raises:
            ValueError: the text is too short.
        """
        ...

    def batch(self, seed: int, step: int, count: int, length: int, mine: slice) -> Tensor:
        """Rows `mine` of the step's `count` windows `[count, length]`. Steps are asked for in order."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the next step's windows."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


# --- bytes of files


@dataclass(frozen=True)
class _Piece:
    """A file without its byte-order mark, or bytes in memory."""

    of: Path | bytes
    skip: int
    size: int

    def read(self, start: int, count: int) -> bytes:
        if isinstance(self.of, bytes):
            return self.of[start : start + count]
        with self.of.open("rb") as stream:
            stream.seek(self.skip + start)
            return stream.read(count)


class Text:
    """UTF-8 text of one or several files, joined by blank lines, of which nothing but an index is in memory.

    Made by `Text.of`; every byte has been read once by then, so that what is no text is refused at once.
    """

    def __init__(
        self, pieces: Sequence[_Piece], marks: Sequence[tuple[int, int]], digest: str, start: int, stop: int
    ) -> None:
        self.pieces, self.marks, self.digest, self.start, self.stop = pieces, marks, digest, start, stop
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + piece.size + len(_JOINT))

    @classmethod
    def of(cls, *sources: Path | str) -> Text:
        """Files (a Path each), or texts themselves (a str each).

        Raises:
            ValueError: no source, or one that is empty or not UTF-8 text. OSError: one that cannot be opened.
        """
        if not sources:
            raise ValueError("no text given")
        digest, pieces, marks = hashlib.sha256(), [], [(0, 0)]
        at = characters = 0
        for source in sources:
            if pieces:
                at, characters = at + len(_JOINT), characters + len(_JOINT)
                digest.update(_JOINT)
            begun = at
            for block in [source] if isinstance(source, str) else checked_blocks(source, _BLOCK):
                data = block.encode()
                digest.update(data)
                at, characters = at + len(data), characters + len(block)
                marks.append((at, characters))
            if isinstance(source, str):
                if not source.strip():
                    raise ValueError("the text is empty")
                pieces.append(_Piece(source.encode(), 0, at - begun))
            else:
                pieces.append(_Piece(source, source.stat().st_size - (at - begun), at - begun))
        return cls(pieces, marks, digest.hexdigest()[:16], 0, at)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def split(self, share: float) -> tuple[Text, Text]:
        """Cut once, at a share of the characters."""
        first, last = self._characters(self.start), self._characters(self.stop)
        cut = self._byte(first + int((last - first) * share))
        parts = ((self.start, cut), (cut, self.stop))
        return tuple(Text(self.pieces, self.marks, f"{self.digest}[{a}:{b}]", a, b) for a, b in parts)  # type: ignore

    def read(self, start: int, count: int) -> bytes:
        """At most `count` bytes from byte `start` of this text on."""
        start, count = self.start + start, min(count, self.size - start)
        found, index = bytearray(), bisect_right(self.starts, start) - 1
        while len(found) < count:
            at, piece = start + len(found) - self.starts[index], self.pieces[index]
            data = piece.read(at, min(count - len(found), piece.size - at)) if at < piece.size else b""
            if not data and at < piece.size:
                raise ValueError(f"{piece.of} has become shorter since it was opened")
            found += data or _JOINT[at - piece.size :]
            index += start + len(found) >= self.starts[index + 1]
        return bytes(found[:count])

    def head(self, characters: int) -> str:
        """So many characters from the start on (or all there are)."""
        return self.read(0, 4 * characters).decode(errors="ignore")[:characters]

    def _characters(self, at: int) -> int:
        """How many characters come before a byte of the whole."""
        byte, characters = self.marks[bisect_right(self.marks, at, key=lambda mark: mark[0]) - 1]
        return characters + len(self._whole(byte, at - byte).decode(errors="ignore"))

    def _byte(self, characters: int) -> int:
        byte, before = self.marks[bisect_right(self.marks, characters, key=lambda mark: mark[1]) - 1]
        rest = self._whole(byte, 4 * (characters - before)).decode(errors="ignore")
        return byte + len(rest[: characters - before].encode())

    def _whole(self, start: int, count: int) -> bytes:
        whole = Text(self.pieces, self.marks, "", 0, self.starts[-1] - len(_JOINT))
        return whole.read(start, count)


class FileWindows:
    """Windows from anywhere in a text: which, follows from the seed and the number of the step alone.

    The text is a ring: what begins near its end goes on at its start.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
        self.tokenizer = tokenizer
        self.text, self.apart = text.split(1 - HELD_SHARE)
        self.digest = text.digest

    def held(self, length: int) -> Tensor:
        need = PLENTY * HELD
        if self.apart.size <= need:
            text = self.apart.head(need)
            found = len(self._tokens(text))
            if found < length:
                raise ValueError(
                    f"the held-out tenth of the text has {found} tokens, and a window has {length}; a longer text or "
                    "shorter windows are needed"
                )
            return windows(self.tokenizer, text, count=min(found, HELD) // length, length=length, spread=True)
        starts = torch.linspace(0, self.apart.size - PLENTY * length, max(1, HELD // length)).long().tolist()
        return torch.stack([self._window(self.apart, start, length) for start in starts])

    def batch(self, seed: int, step: int, count: int, length: int, mine: slice) -> Tensor:
        generator = torch.Generator().manual_seed(step_seed(seed, step))
        starts = torch.randint(self.text.size, (count,), generator=generator).tolist()
        return torch.stack([self._window(self.text, start, length) for start in starts[mine]])

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids  # type: ignore[return-value]

    def _window(self, text: Text, start: int, length: int) -> Tensor:
        """The first tokens of a word near byte `start` and what follows."""
        need = 8 * length
        while True:
            data = text.read(start, need)
            while len(data) < need:
                data += _JOINT + text.read(0, need - len(data) - len(_JOINT))
            decoded = data.decode(errors="ignore")
            word = next((at for at, sign in enumerate(decoded[:64]) if sign.isspace()), 0)
            tokens = self._tokens(decoded[word:])
            if len(tokens) >= length + 8:  # the cut shows in the last tokens
                return torch.tensor(tokens[:length])
            if need > 64 * PLENTY * length:
                raise ValueError(f"{need} bytes of the text make {len(tokens)} tokens only")
            need *= 2


# --- documents of a data set


class StreamWindows:
    """Windows of documents that stream in, end to end in their order, from the start again after the last.

    Args:
        open: documents from a number on.
        digest: says which documents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, open: Callable[[int], Iterator[str]], digest: str) -> None:
        self.tokenizer, self.open, self.digest = tokenizer, open, digest
        self.first = self.next = 0
        self.left: list[int] = []
        self.stream: Iterator[str] | None = None
        self.kept: dict[int, Tensor] = {}

    def reserve(self, count: int, length: int) -> Tensor:
        """Windows `[count, length]` of the next documents, which no step sees."""
        assert self.stream is None or self.next == self.first, "windows are reserved before the first step"
        rows = self._take(count * length).view(count, length)
        self.first, self.left = self.next, []
        return rows

    def held(self, length: int) -> Tensor:
        if length not in self.kept:
            self.kept[length] = self.reserve(max(1, HELD // length), length)
        return self.kept[length]

    def batch(self, seed: int, step: int, count: int, length: int, mine: slice) -> Tensor:
        return self._take(count * length).view(count, length)[mine]

    def state(self) -> dict[str, Any]:
        return {"document": self.next, "left": list(self.left)}

    def restore(self, state: dict[str, Any]) -> None:
        self.next, self.left, self.stream = state["document"], list(state["left"]), None

    def _take(self, count: int) -> Tensor:
        begun = -1  # tokens there were when the documents last started anew
        while len(self.left) < count:
            if self.stream is None:
                self.stream = self.open(self.next)
            text = next(self.stream, None)
            if text is not None:
                self.left += self.tokenizer(text + "\n\n", add_special_tokens=False, verbose=False).input_ids
                self.next += 1
                continue
            if len(self.left) == begun:
                raise ValueError(f"{self.digest}: {self.next} documents, and {self.first} of them are held out already")
            begun, self.next, self.stream = len(self.left), self.first, None
        taken, self.left = self.left[:count], self.left[count:]
        return torch.tensor(taken)


def documents(name: str) -> Callable[[int], Iterator[str]]:
    """The documents of the data set `owner/name` or `owner/name:config` of the hub, split `train`, from a number on.

    A document is what its field `text` holds, or its first field with text.

    Raises:
        ImportError: the package `datasets` is not installed. ValueError: the data set cannot be opened or has no text.
    """
    try:
        from datasets import load_dataset  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{PREFIX}{name} is read by datasets; pip install 'manyheads[datasets]'") from error
    path, _, config = name.partition(":")
    try:
        data = load_dataset(path, config or None, split="train", streaming=True)
        first = next(iter(data), {})
    except Exception as error:  # of the hub, of the network, of the files: each has its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{PREFIX}{name} cannot be opened: {reason}") from error
    fields = [field for field, value in first.items() if isinstance(value, str)]
    if not fields:
        raise ValueError(f"{PREFIX}{name} has no field of text; it has {', '.join(first) or 'no rows'}")
    field = "text" if "text" in fields else fields[0]
    return lambda number: (row[field] for row in data.skip(number))


# --- what a user names


def find_files(sources: Sequence[str | Path]) -> list[Path]:
    """Files, and those of folders at any depth in the order of their names; what is hidden is left out.

    Raises:
        ValueError: a folder without files. OSError: a name that is not there.
    """
    files: list[Path] = []
    for source in sources:
        path = Path(source).expanduser()
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not inside:
            raise ValueError(f"{path} holds no files")
        files += inside
    return files


def is_dataset(sources: Sequence[str | Path]) -> bool:
    """Whether the sources are a data set.

    Raises:
        ValueError: a data set among others.
    """
    named = [source for source in sources if str(source).startswith(PREFIX)]
    if named and len(sources) > 1:
        raise ValueError(f"{named[0]} is given among {len(sources)} texts; a data set stands alone")
    return bool(named)
