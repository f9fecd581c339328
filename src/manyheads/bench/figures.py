"""What a shrunk model is, caches, predicts and takes: the rows of figures of the main job."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manyheads.bench.timing import PeakMemory, Timing, decoder, interleaved, kv_bytes
from manyheads.convert.plan import Goal
from manyheads.convert.shrink import Damage
from manyheads.convert.source import load_source
from manyheads.convert.verify import Reference, cached, decode_equals_forward, greedy, quality
from manyheads.stack.pretrained import ManyheadsConfig, ManyheadsForCausalLM

Progress = Callable[[str, int, int], object]
CONTEXTS = (128, 2048)
SAMPLE = 48
"""Tokens that each model writes after the prompt."""
LARGEST_DIFFERENCE = 1e-3
"""Of logits, between a cached pass and a full one, float32."""
ROUNDS = 16
CACHED = 64
"""Tokens that the cache is measured with."""


class CheckError(ValueError):
    """A model that does not do what its spec says: its cache has another size, or decodes something else."""


def measure_all(
    source: ManyheadsForCausalLM, folders: Mapping[Goal, Path], damages: Sequence[Sequence[Damage]],
    tokenizer: PreTrainedTokenizerBase, evaluation: Tensor, second_text: Tensor | None, prompt: str,
    contexts: Sequence[int], clock: Progress,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of the source and of each candidate, as read back from its folder."""

    def row(name: str, model: ManyheadsForCausalLM, reference: Reference | None = None) -> dict[str, Any]:
        measured = examine(model, evaluation, reference, lambda *step: clock(f"measure {name}", *step))
        second = None if second_text is None else quality(model, second_text).perplexity
        difference = decode_equals_forward(model, evaluation[:1, :48])
        if not difference <= LARGEST_DIFFERENCE:
            raise CheckError(f"{name}: decoding with the cache differs from the full pass by {difference:.2g} (logits)")
        sample = greedy(model, tokenizer, prompt, SAMPLE)
        peak = peak_mb(model, max(contexts, default=CONTEXTS[0]))
        return {
            "name": name,
            **measured,
            "perplexity_second": second,
            "decode_ms": {},
            "peak_mb": peak,
            "sample": sample,
        }

    rows = [row("source", source) | {"kl": 0.0, "top1": 1.0}]
    reference = Reference(source, evaluation)
    beside: dict[int, list[float]] = {context: [] for context in contexts}
    for (goal, folder), damage in zip(folders.items(), damages, strict=True):
        candidate = load_source(folder).model
        assert isinstance(candidate, ManyheadsForCausalLM)
        made = row(goal.name, candidate, reference)
        for done, context in enumerate(contexts, 1):
            steps = {"source": decoder(source, context), "candidate": decoder(candidate, context)}
            timed = interleaved(steps, ROUNDS, warmup=2)
            beside[context] += timed["source"].samples
            made["decode_ms"][str(context)] = timed["candidate"].median
            clock(f"time {goal.name}", done, len(contexts))
        rows.append(made | told(goal, damage, cast(ManyheadsConfig, candidate.config)))
        del candidate
        gc.collect()
    rows[0]["decode_ms"] = {str(context): Timing(tuple(samples)).median for context, samples in beside.items()}
    return rows


def told(goal: Goal, damage: Sequence[Damage], config: ManyheadsConfig) -> dict[str, Any]:
    """What a conversion says of itself; of a plan, what it was chosen from and why."""
    plan = config.notes.get("plan")
    return {
        "damage": [entry.fitted for entry in damage], "damage_healed": [entry.healed for entry in damage],
        "plan": goal.to == "auto" and len(set(config.specs)) > 1,
        "planned": plan and {"method": plan["method"] or "mixed", "tried": plan["tried"], "reasons": plan["reasons"]},
        "distil": config.notes.get("healed"),
    }  # fmt: skip


def said(specs: Sequence[str], kv_source: Sequence[int | None] = ()) -> str:
    """All layers' specs in a line, each once, and who reads whose rows."""
    read = [f"{layer} reads {at}" for layer, at in enumerate(kv_source) if at is not None]
    each = "; ".join(spec if n == len(specs) else f"{n} × {spec}" for spec, n in Counter(specs).items())
    return each + (f" (layer {', '.join(read)})" if read else "")


def examine(
    model: PreTrainedModel,
    tokens: Tensor,
    reference: Reference | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """What a model is, caches and predicts: spec, cache figures, perplexity, and KL and top-1 against a reference.

    A model that is not ours has its class in place of the spec.
    """
    ours = isinstance(model, ManyheadsForCausalLM)
    specs = [str(spec) for spec in model.specs] if ours else [type(model).__name__]
    floats, size = cache_figures(model)
    found = quality(model, tokens, reference, progress=progress)
    return {
        "spec": said(specs, model.config.kv_source if ours else ()),
        "specs": specs if ours else [], "kv_floats_per_token_layer": floats, "kv_bytes_per_token": size,
        "perplexity": found.perplexity, "kl": found.kl, "top1": found.top1,
    }  # fmt: skip


@torch.no_grad()
def cache_figures(model: PreTrainedModel) -> tuple[float, float]:
    """Numbers cached a token and layer, and bytes a token over all layers, measured from storage.

    Raises:
        CheckError: what is stored is not what the specs say.
    """
    config = model.config.get_text_config()
    count = min(CACHED, getattr(config, "max_position_embeddings", CACHED))
    _, cache = cached(model, torch.arange(count)[None] % config.vocab_size)
    stored, size = kv_bytes(cache), model.dtype.itemsize
    if not isinstance(model, ManyheadsForCausalLM):
        return stored / count / size / config.num_hidden_layers, stored / count
    costs = [layer.spec.cost(layer.dim, layer.heads, layer.site) for layer in model.attentions]
    stated = sum(cost.cache_bytes(count, size) for cost in costs)
    if stored != stated:
        raise CheckError(f"the cache of {count} tokens holds {stored:,} bytes, where its specs say {stated:,}")
    return float(sum(cost.cache_floats for cost in costs)) / len(costs), stored / count


def peak_mb(model: PreTrainedModel, context: int) -> float:
    """MB of the model's weights, and of what reading `context` tokens and decoding one more adds at its peak.

    Other models in the process, and the process itself, do not count.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc keeps freed blocks; they would hide what the model needs
        ctypes.CDLL(None).malloc_trim(0)
    weights = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in model.parameters()}
    with PeakMemory() as peak:
        decoder(model, context)()
    return sum(weights.values()) / 2**20 + peak.added_mb
