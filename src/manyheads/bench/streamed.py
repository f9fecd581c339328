"""Figures of models that are never in memory as a whole: their layers are read from disk, one at a time.

What is measured is what a pass over the layers says: quality, and the cache, whose bytes and whose decoding each layer
answers for by itself. Nothing is timed, and no text is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.bench.figures import CACHED, LARGEST_DIFFERENCE, CheckError, said, told
from manyheads.bench.timing import PeakMemory
from manyheads.convert.account import has_run, shell_of
from manyheads.convert.devices import DeviceMap
from manyheads.convert.plan import Goal
from manyheads.convert.shrink import Damage
from manyheads.convert.stream import Layers, OnDisk, attention_of, batches, run
from manyheads.convert.verify import Quality, Reference, quality
from manyheads.core.cache import Cache
from manyheads.core.flow import Links
from manyheads.stack.seam import SeamAttention

Progress = Callable[[str, int, int], object]
UNSEEN = "Nothing is generated from a model that is read layer by layer."


@torch.no_grad()
def measure_streamed(
    source: OnDisk, folders: Mapping[Goal, Path], damages: Sequence[Sequence[Damage]], evaluation: Tensor,
    second_text: Tensor | None, clock: Progress,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of the source and of each candidate, as `figures.measure_all` makes them."""
    shell = shell_of(source)
    texts = [evaluation] if second_text is None else [evaluation, second_text]
    reference: list[Reference] = []

    def row(name: str, layers: OnDisk) -> dict[str, Any]:
        with PeakMemory() as peak:
            hidden, floats = through(layers, texts, lambda *step: clock(f"measure {name}", *step))
            models = [has_run(shell, *each) for each in zip(texts, hidden, strict=True)]
            if not reference:
                reference.append(Reference(models[0], evaluation))
            found: Quality = quality(models[0], evaluation, reference[0])
        specs = layers.config.specs
        return {
            "name": name, "spec": said(specs, layers.config.kv_source), "specs": specs,
            "kv_floats_per_token_layer": floats / len(specs), "kv_bytes_per_token": floats * source.dtype.itemsize,
            "perplexity": found.perplexity, "kl": found.kl, "top1": found.top1,
            "perplexity_second": None if second_text is None else quality(models[1], second_text).perplexity,
            "decode_ms": {}, "peak_mb": peak.added_mb, "sample": UNSEEN,
        }  # fmt: skip

    rows = [row("source", source)]
    for (goal, folder), damage in zip(folders.items(), damages, strict=True):
        candidate = OnDisk(folder, devices=DeviceMap(source.devices))
        rows.append(row(goal.name, candidate) | told(goal, damage, candidate.config))
    return rows


def through(
    layers: Layers, texts: Sequence[Tensor], progress: Callable[[int, int], object] = lambda done, total: None
) -> tuple[list[Tensor], float]:
    """The last hidden states `[N, T, D]` of each text's windows `[N, T]`, and the numbers cached for a token.

    Raises:
        CheckError: a layer caches other bytes than its spec says, or decodes something else than the full pass.
    """
    config, floats = layers.config, 0.0
    hidden = [layers.embed(tokens) for tokens in texts]
    links = [[Links() for _ in batches(each)] for each in hidden]
    owners = {owner for owner in config.kv_source if owner is not None}
    for index in range(len(config.specs)):
        with layers.open(index) as layer:
            for n, each in enumerate(hidden):
                seen = run(layer, config, each, record=n == 0, links=links[n])
                if n == 0 and config.kv_source[index] is None:
                    floats += cached_floats(attention_of(layer, config), seen.x[:1, :CACHED])
                hidden[n] = seen.after
                for link in links[n]:
                    link.rows = {owner: rows for owner, rows in link.rows.items() if owner in owners}
        progress(index + 1, len(config.specs))
    return hidden, floats


def cached_floats(attention: SeamAttention, x: Tensor) -> float:
    """Numbers cached for a token of x `[1, T, D]`, measured; x decoded in steps is what a full pass makes of it."""
    cache, count, layer = Cache(), x.shape[1], attention.site.layer
    where = torch.arange(count, device=x.device)[None]
    full = attention(x, position_ids=where)[0]
    steps = [attention(x[:, t : t + 1], position_ids=where[:, t : t + 1], cache=cache)[0] for t in range(count)]
    apart = (torch.cat(steps, 1) - full).abs().max().item()
    if not apart <= LARGEST_DIFFERENCE * max(1.0, full.abs().max().item()):
        raise CheckError(f"layer {layer} decodes with its cache {apart:.2g} apart from the full pass")
    cost = attention.spec.cost(attention.dim, attention.heads, attention.site)
    stated, stored = cost.cache_bytes(count, x.element_size()), cache.bytes()
    if stored != stated:
        raise CheckError(f"layer {layer} caches {stored:,} bytes of {count} tokens, where its spec says {stated:,}")
    return float(cost.cache_floats)
