"""Jobs that work in `<out>.partial` until everything is finished, and what an error leaves there."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyheads.convert.export.atomic import disk_full


def partial_folder(out: Path) -> Path:
    """Where a job works until it is finished."""
    return out.parent / f"{out.name}.partial"


def check_folders(out: Path, work: Path, resume: bool) -> None:
    """Raises a FileExistsError for an `out` that exists, and for an unfinished job that is not to be gone on with."""
    if out.exists() or out.is_symlink():
        raise FileExistsError(f"{out} exists already; remove it or choose another folder with --out")
    if work.exists() and not resume:
        raise FileExistsError(
            f"{work} holds an unfinished job; go on with it (--resume), or remove it to start from the beginning"
        )


@contextmanager
def kept(work: Path) -> Iterator[None]:
    """Whatever goes wrong inside leaves `work` only where a resumed job finds something finished in it."""
    made = [parent for parent in work.parents if not parent.exists()]
    try:
        yield
    except BaseException as error:
        kept = any(work.rglob("*.safetensors"))
        if not kept:
            shutil.rmtree(work, ignore_errors=True)
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
        if not disk_full(error):
            raise
        left = "what is finished stays there: make room and go on with --resume" if kept else "nothing of it is left"
        near = next(parent for parent in (work, *work.absolute().parents) if parent.exists())
        free = shutil.disk_usage(near).free
        sentence = f"the disk is full: writing {work}, {free:,} bytes are free; {left}"
        raise OSError(errno.ENOSPC, sentence) from error


def finish(work: Path, out: Path) -> None:
    """The folder takes its name.

    Raises:
        FileExistsError: `out` has appeared since the job began.
    """
    if out.exists():
        raise FileExistsError(f"{out} has appeared meanwhile; what was made is complete in {work}")
    work.rename(out)
