"""Time, bytes and memory, measured: decoding steps, alternatives side by side, a cache's storage, peak memory.

Times are in milliseconds and carry every sample, so that a ratio can be taken round by round.
"""

import inspect
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from manyheads.convert.verify import cached

_ROWS = 2048  # tokens in one prefill call
_MB = 2**20


@dataclass(frozen=True)
class Timing:
    """Durations in ms, in the order measured."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles: half of the samples lie between them."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high

    def ratio(self, other: "Timing") -> float:
        """How many times faster this is than `other`: the median over rounds, for timings of one `interleaved` run."""
        return median(b / a for a, b in zip(self.samples, other.samples, strict=True))

    def __str__(self) -> str:
        low, high = self.spread
        return f"{self.median:.3g} ms ({low:.3g} to {high:.3g})"


def interleaved(fns: Mapping[str, Callable[[], object]], rounds: int, *, warmup: int = 1) -> dict[str, Timing]:
    """Time alternatives side by side: each once a round, the order rotated by one every round.

    A machine that slows down, or a neighbour, then hits all of them alike, and ratios stay fair.
    """
    if not fns or rounds < 1:
        raise ValueError(f"nothing to time: {len(fns)} functions, {rounds} rounds")
    names = list(fns)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            elapsed = _time(fns[name])
            if turn >= 0:
                samples[name].append(elapsed)
    return {name: Timing(tuple(samples[name])) for name in names}


def decoder(
    model: PreTrainedModel,
    context: int,
    batch: int = 1,
    cache_factory: Callable[[], Any] | None = None,
) -> Callable[[], None]:
    """A function that decodes one more token a sequence, after `context` tokens are in the cache.

    The context is random tokens, the same at each call. Without a `cache_factory` the model makes its own cache; one
    sequence is then prefilled and its cache repeated `batch` times, where the cache can do that.

    Raises:
        ValueError: a context or batch below 1, or a model that returns no cache.
    """
    if context < 1 or batch < 1:
        raise ValueError(f"context and batch must be at least 1, not {context} and {batch}")
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (1, context + 1), generator=generator).to(model.device)
    # Else a prefill spends memory on a vocabulary of logits for each token.
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    @torch.no_grad()
    def fill(rows: int) -> Any:
        cache = cache_factory() if cache_factory else None
        for part in tokens[:, :context].expand(rows, -1).split(max(1, _ROWS // rows), dim=1):
            _, cache = cached(model, part, cache, **options)
        return cache

    settle()
    cache = fill(1 if cache_factory is None else batch)
    if cache_factory is None and batch > 1 and not _repeat(cache, batch):
        cache = fill(batch)
    newest = tokens[:, context:].expand(batch, -1)

    @torch.no_grad()
    def step() -> None:
        cached(model, newest, cache, **options)

    return step


def settle() -> None:
    """Bring the allocator to one state: a growing cache then takes the time it takes, whatever the process did before.

    glibc keeps freed blocks as large as the largest it has seen freed, up to 32 MB. A cache that grows by copying asks
    for a little more each step, so that every page would fault anew, or not.
    """
    torch.empty(31 * _MB, dtype=torch.uint8)


def decode_ms(
    model: PreTrainedModel,
    context: int,
    batch: int = 1,
    steps: int = 16,
    warmup: int = 3,
    cache_factory: Callable[[], Any] | None = None,
) -> Timing:
    """Time of one decoding step, ms a sample, with `context` tokens in the cache (see `decoder`).

    To compare models, give their `decoder`s to `interleaved` instead.
    """
    return interleaved({"step": decoder(model, context, batch, cache_factory)}, steps, warmup=warmup)["step"]


def _repeat(cache: Any, batch: int) -> bool:
    before = kv_bytes(cache)
    try:
        cache.batch_repeat_interleave(batch)
    except (AttributeError, NotImplementedError):
        return False
    return kv_bytes(cache) >= batch * before > 0


def kv_bytes(cache: Any) -> int:
    """Bytes that a cache holds: its own `bytes()` where it has one, else the storage of every tensor of its layers.

    Storage counts whole and once: a view of a larger buffer costs the buffer, and two views of one cost it once.
    """
    if hasattr(cache, "bytes"):
        return cache.bytes()
    storages = (tensor.untyped_storage() for layer in cache.layers for tensor in _tensors(vars(layer).values()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kv_bytes_per_token(cache: Any, tokens: int) -> float:
    """`kv_bytes` over the number of cached tokens, counted over all sequences of the batch."""
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, not {tokens}")
    return kv_bytes(cache) / tokens


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.ndim > 1:  # counters are not cache
                yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, MB (2**20 bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return max(PeakMemory.earlier, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / _MB)


def kept_for_backward(run: Callable[[], object], but: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages that what `run` returns keeps for its gradients, those of `but` (weights) apart."""
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = run()
    apart = {t.untyped_storage().data_ptr() for t in but}
    size = sum(size for at, size in kept.items() if at not in apart)
    del result  # which held the storages, so that none of them took another's place
    return size


class PeakMemory:
    """`with PeakMemory() as peak: ...` measures the largest resident memory inside the block, MB (2**20 bytes).

    The kernel keeps a process's peak, and Linux lets a process reset it. Where a reset is refused, a thread samples
    every 5 ms and may miss a shorter peak. Blocks may nest; the memory is the whole process's, not one thread's.

    Attributes:
        mb: the peak, known when the block ends.
        start_mb: what was resident when it began.
    """

    earlier: ClassVar[float] = 0.0  # the process's peak before the last reset
    _open: ClassVar[list["PeakMemory"]] = []

    def __init__(self) -> None:
        self.mb = self.start_mb = 0.0
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    @property
    def added_mb(self) -> float:
        """The peak above what was resident when the block began."""
        return self.mb - self.start_mb

    def __enter__(self) -> "PeakMemory":
        self.mb = self.start_mb = _status("VmRSS")
        peak, peak_since_reset = peak_rss_mb(), _status("VmHWM")
        if _reset_peak():
            PeakMemory.earlier = peak
            for outer in self._open:
                outer.mb = max(outer.mb, peak_since_reset)
        else:
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        self._open.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.remove(self)
        if self._sampler is None:
            self.mb = max(self.mb, _status("VmHWM"))
        else:
            self._ended.set()
            self._sampler.join()

    def _sample(self) -> None:
        while True:
            self.mb = max(self.mb, _status("VmRSS"))
            if self._ended.wait(0.005):
                return


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _status("VmHWM") < 1.02 * _status("VmRSS") + 8  # some sandboxes take the write and do nothing


def _status(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, MB; the peak for both where the system has no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_rss_mb()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), 0.0)


@dataclass(frozen=True)
class Machine:
    """What this machine reaches at its best, for saying how near a step is to it.

    Attributes:
        read: GB/s (1e9 bytes) read from memory.
        matmul: GFLOP/s of a large matrix product, a multiply and an add counted as two.
    """

    read: float
    matmul: float

    def floor_ms(self, bytes: float, flops: float = 0.0) -> float:
        """The least time, ms, for reading `bytes` and computing `flops`, one hidden behind the other (roofline)."""
        return max(bytes / self.read, flops / self.matmul) / 1e6


def bandwidth(
    *, megabytes: int = 256, size: int = 2048, rounds: int = 5, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Machine:
    """Measure the memory's read rate and the matrix product's rate, the best of `rounds`.

    Args:
        megabytes: read once each round; well above the processor's caches.
        size: side of the square matrices.
        dtype: of the matrices; reading is of float32.
        device: where to measure.
    """
    data = torch.ones(megabytes * _MB // 4, device=device)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(matrix)
    best = {
        name: min(timing.samples) / 1e3
        for name, timing in interleaved(
            {"read": lambda: torch.sum(data), "matmul": lambda: torch.mm(matrix, matrix, out=out)}, rounds
        ).items()
    }
    return Machine(megabytes * _MB / best["read"] / 1e9, 2 * size**3 / best["matmul"] / 1e9)


def machine() -> str:
    """What this runs on, in one line."""
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _time(fn: Callable[[], object]) -> float:
    _synchronise()
    start = time.perf_counter()
    fn()
    _synchronise()
    return (time.perf_counter() - start) * 1e3


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
