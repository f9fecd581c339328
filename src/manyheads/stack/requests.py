"""Many prompts answered together: what they begin with is read once, kept once, and attended to by all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from manyheads.core.prefix import PrefixCache, PrefixTree
from manyheads.stack.pretrained import ManyheadsForCausalLM

BLOCK = 2048
"""Tokens, of all sequences together, that one pass reads of the prompts."""


@dataclass(frozen=True)
class Answers:
    """What `answer` wrote, in the order of the prompts, and what it kept.

    tokens: the new ones, the token that ends a text included. stored, total: tokens of the prompts whose rows were
    kept, and of all prompts. bytes, apart_bytes: of the cache once the prompts were read, and of a cache for each
    prompt alone.
    """

    tokens: list[list[int]]
    stored: int
    total: int
    bytes: int
    apart_bytes: int


@torch.no_grad()
def answer(
    model: ManyheadsForCausalLM, prompts: Sequence[Sequence[int]], *, tokens: int = 64, chunk: int = 64,
    sample: bool = False, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0,
) -> Answers:  # fmt: skip
    """Continue prompts of token ids, each as it would be alone.

    Args:
        tokens: at most so many new ones for each; a text that ends earlier leaves the batch, and its rows are freed.
        chunk: prompts share what they begin with in chunks of so many tokens.
        sample: draw tokens; prompt i draws as if it were alone with the seed `seed + i`.

    Raises:
        ValueError: a prompt is empty, has tokens that the model does not know, or is longer than the model's
            positions; or the model's sequences cannot share rows.
    """
    check(model, prompts)
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; at least 1")
    tree, order = PrefixTree(chunk), []
    for index, prompt in enumerate(prompts):
        order.insert(tree.add(prompt[:-1]), index)  # a prompt's last token is its own: what follows depends on it
    cache = PrefixCache.of(tree, lambda ids, cache: _read_run(model, ids, cache))
    logits = _read_rest(
        model, [prompts[index][count:] for index, count in zip(order, tree.shared(), strict=True)], cache
    )
    stored, total = tree.unique + len(prompts), tree.total + len(prompts)
    figures = stored, total, cache.bytes(), cache.apart_bytes()
    choose = _sampler(len(prompts), temperature, top_p, seed) if sample else lambda logits, order: logits.argmax(-1)
    stop = _stop(model)
    written: list[list[int]] = [[] for _ in prompts]
    for step in range(tokens):
        new = choose(logits, order)
        for index, token in zip(order, new.tolist(), strict=True):
            written[index].append(token)
        going = [place for place, index in enumerate(order) if written[index][-1] not in stop]
        if not going or step + 1 == tokens:
            break
        if len(going) < len(order):
            cache.keep(going)
            new, order = new[going], [order[place] for place in going]
        logits = _read(model, new[:, None], cache)
    return Answers(written, *figures)


def check(model: ManyheadsForCausalLM, prompts: Sequence[Sequence[int]]) -> None:
    """Raise where `answer` would fail, before any work."""
    if not prompts:
        raise ValueError("there are no prompts")
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty")
        if limit is not None and len(prompt) > limit:
            raise ValueError(f"prompt {number} has {len(prompt)} tokens; the model was made for {limit} positions")
        if (largest := max(prompt)) >= config.vocab_size:
            raise ValueError(
                f"token {largest} of prompt {number} is outside the model's vocabulary of {config.vocab_size}"
            )
    for layer in model.attentions:
        if layer.whole is not None:
            raise ValueError(f"prompts cannot share rows at layer {layer.site.layer} ({layer.spec}), for {layer.whole}")


def _read(model: ManyheadsForCausalLM, ids: Tensor, cache: PrefixCache) -> Tensor:
    """Logits after the last of these tokens, `[B, V]`."""
    axis = cache.coming(ids.shape[1], cache.length(), None, ids.device)
    run = cast(Callable[..., Any], model)
    return (
        run(ids, position_ids=axis.position.expand(len(ids), -1), cache=cache, logits_to_keep=1).logits[:, -1].float()
    )


def _read_run(model: ManyheadsForCausalLM, ids: Sequence[int], cache: PrefixCache) -> None:
    for block in torch.tensor(ids, device=model.device)[None].split(BLOCK, 1):
        _read(model, block, cache)


def _read_rest(model: ManyheadsForCausalLM, rests: Sequence[Sequence[int]], cache: PrefixCache) -> Tensor:
    """Read each sequence's own tokens, padded on the left."""
    longest = max(map(len, rests))
    ids = torch.tensor([[0] * (longest - len(rest)) + list(rest) for rest in rests], device=model.device)
    logits, left = None, longest
    for block in ids.split(max(1, BLOCK // len(rests)), 1):
        left -= block.shape[1]
        cache.expect([min(max(len(rest) - left, 0), block.shape[1]) for rest in rests])
        logits = _read(model, block, cache)
    assert logits is not None
    return logits


def _sampler(count: int, temperature: float, top_p: float, seed: int) -> Callable[[Tensor, Sequence[int]], Tensor]:
    draws = [torch.Generator().manual_seed(seed + index) for index in range(count)]
    warp = [TemperatureLogitsWarper(temperature), *([TopPLogitsWarper(top_p)] if top_p < 1 else [])]

    def choose(logits: Tensor, order: Sequence[int]) -> Tensor:
        for change in warp:
            logits = change(cast(Any, None), cast(Any, logits))
        weights = logits.softmax(-1).cpu()
        drawn = [torch.multinomial(row, 1, generator=draws[index]) for row, index in zip(weights, order, strict=True)]
        return torch.cat(drawn).to(logits.device)

    return choose


def _stop(model: ManyheadsForCausalLM) -> set[int]:
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else {*ends}
