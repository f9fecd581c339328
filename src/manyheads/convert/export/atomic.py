"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_folder(path: str | Path, *, needed: int | None = None) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block ends well.

    Whatever goes wrong inside, an interrupt too, leaves nothing behind: neither the temporary folder nor parents that
    were made for it. The last step is a rename, so nobody ever sees a half-written `path`.

    Args:
        path: must not exist; missing parents are made.
        needed: bytes that will be written, where known; named when the disk is full.

    Raises:
        FileExistsError: `path` exists.
        OSError: the disk is full (`errno.ENOSPC`), in one sentence; other errors pass unchanged.
    """
    path = Path(path)
    _refuse_existing(path)
    made = _make_parents(path.parent)
    work = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        work.mkdir()
        yield work
        _refuse_existing(path)
        work.rename(path)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        full = disk_full(error)
        free = shutil.disk_usage(path.parent).free if full else 0
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if not full:
            raise
        wants = "" if needed is None else f" needs {needed:,} bytes,"
        sentence = f"the disk is full: writing {path}{wants} {free:,} bytes are free there; nothing of it is left"
        raise OSError(errno.ENOSPC, sentence) from error


def _refuse_existing(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists already; remove it or choose another folder")


def _make_parents(parent: Path) -> list[Path]:
    """Make what is missing of `parent`; the folders that were made, deepest first."""
    missing = [each for each in (parent, *parent.parents) if not each.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


def disk_full(error: BaseException) -> bool:
    """Whether the disk is full. safetensors wraps the system's error in one of its own, which keeps the text alone."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, Exception) and f"os error {errno.ENOSPC}" in str(error)
