"""What a compared model takes: the bytes of its cache, the time of a training step, and of a decoded token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from manyheads.bench.design import VOCAB, Design
from manyheads.bench.timing import Timing, interleaved, settle
from manyheads.bench.train import DTYPES, Corpus, Trainer, Training
from manyheads.core.cache import Cache
from manyheads.core.linear import quicken
from manyheads.stack.decoder import Decoder

STEPS = 6
"""Training steps that are timed."""
TOKENS = 16
"""Decoded tokens that are timed, at most a quarter of the context."""


@torch.no_grad()
def measured_cache(design: Design, context: int, dtype: str = "float32") -> int:
    """Bytes of a cache that holds `context` tokens; any error of the model in doing so passes."""
    with torch.random.fork_rng(devices=[]):
        model, cache = _ready(design, dtype), Cache()
        model.hidden(torch.zeros(1, context, dtype=torch.long), cache=cache)
        return cache.bytes()


def step_times(
    designs: Mapping[str, Design], training: Training, corpus: Corpus, progress: Callable[[int, int], object]
) -> dict[str, Timing]:
    """Time of a training step, ms, side by side."""
    with torch.random.fork_rng(devices=[]):
        trainers = {name: Trainer(design, training, corpus, 0) for name, design in designs.items()}
        progress(0, 1)
        found = interleaved({name: trainer.step for name, trainer in trainers.items()}, STEPS, warmup=2)
        progress(1, 1)
    return found


def decode_times(
    designs: Mapping[str, Design], context: int, dtype: str, progress: Callable[[int, int], object]
) -> dict[str, Timing]:
    """Time of decoding one more token of one sequence, ms, side by side; the last one timed is token `context`."""
    with torch.random.fork_rng(devices=[]):
        count = max(1, min(TOKENS, context // 4))
        warmup = max(0, min(3, context - count - 1))
        progress(0, 1)
        steps = {name: decoding(_ready(design, dtype), context - count - warmup) for name, design in designs.items()}
        found = interleaved(steps, count, warmup=warmup)
        progress(1, 1)
    return found


@torch.no_grad()
def decoding(model: Decoder, context: int) -> Callable[[], object]:
    """A function that decodes one more token of a sequence after `context` tokens, each time."""
    settle()
    tokens = torch.randint(VOCAB, (1, context + 1), generator=torch.Generator().manual_seed(0))
    cache = Cache()
    if context:
        model.hidden(tokens[:, :context], cache=cache)
    newest = tokens[:, context:]

    @torch.no_grad()
    def step() -> object:
        return model(newest, cache=cache)

    return step


def _ready(design: Design, dtype: str) -> Decoder:
    model = design.build().to(DTYPES[dtype]).eval()
    quicken(model)
    return model
