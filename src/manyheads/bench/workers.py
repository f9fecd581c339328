"""Runs of `compare` side by side: in this process, or in several of its own."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyheads.bench.design import Design
from manyheads.bench.train import Corpus, Training, train

Progress = Callable[[str, int, int], object]
_PATIENCE = 0.2  # seconds between looks at what others do


class WorkerError(OSError):
    """A process that trained ended without a word."""


@dataclass(frozen=True)
class Task:
    """A run to make, and the file that it leaves."""

    name: str
    design: Design
    seed: int
    file: Path


def run_all(
    tasks: Sequence[Task], training: Training, corpus: Corpus, jobs: int, threads: int, progress: Progress
) -> None:
    """Make all runs, `jobs` at a time, each with so many threads."""
    if jobs == 1 or len(tasks) < 2:
        with threads_of(threads):
            for task in tasks:
                _run(task, training, corpus, progress)
    else:
        _side_by_side(tasks, training, corpus, min(jobs, len(tasks)), threads, progress)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """So many threads, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(task: Task, training: Training, corpus: Corpus, progress: Progress) -> None:
    train(task.design, task.seed, training, corpus, task.file, lambda done, total: progress(task.name, done, total))


def _side_by_side(
    tasks: Sequence[Task], training: Training, corpus: Corpus, jobs: int, threads: int, progress: Progress
) -> None:
    """New processes take tasks from one queue and tell what they do in another; whatever ends this ends them."""
    context = multiprocessing.get_context("spawn")
    given, todo, told = (context.Queue() for _ in range(3))  # text as an argument would hold up the start of the next
    workers = [context.Process(target=_work, args=(given, todo, told), daemon=True) for _ in range(jobs)]
    for _ in workers:
        given.put((training, corpus, threads))
    for task in [*tasks, *[None] * jobs]:
        todo.put(task)
    left = len(tasks)
    try:
        with _deaf_children():
            for worker in workers:
                worker.start()
        while left:
            try:
                name, done, total = told.get(timeout=_PATIENCE)
            except queue.Empty:
                _check(workers)
                continue
            if isinstance(done, BaseException):
                raise done
            if done is None:
                left -= 1
            else:
                progress(name, done, total)
        for worker in workers:
            worker.join()
    finally:
        for each in (given, todo):
            each.cancel_join_thread()  # else this process would wait at its end for ended ones to read on
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            if worker.pid is not None:
                worker.join()


def _check(workers: Sequence[Any]) -> None:
    if wrong := [worker.exitcode for worker in workers if worker.exitcode]:
        raise WorkerError(
            f"a training process ended with exit code {wrong[0]} (out of memory?); finished steps are kept"
        )


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which a terminal sends to all: their parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(given: Any, todo: Any, told: Any) -> None:
    with suppress(KeyboardInterrupt):
        training, corpus, threads = given.get()
        torch.set_num_threads(threads)
        while (task := todo.get()) is not None:
            try:
                _run(task, training, corpus, lambda *step: told.put(step))
                told.put((task.name, None, None))
            except Exception as error:
                told.put((task.name, _plain(error), None))
                return


def _plain(error: Exception) -> Exception:
    """As an error that another process can raise."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    kind = type(error) if type(error) in (ValueError, MemoryError) else RuntimeError
    return kind(str(error) if kind is type(error) else f"{type(error).__name__}: {error}")
