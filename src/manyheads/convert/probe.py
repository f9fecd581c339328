"""Which heads retrieve from the context: how much of a synthetic look-up a model loses without each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.core.flow import Flow
from manyheads.core.tap import Tap
from manyheads.stack.pretrained import ManyheadsForCausalLM

PAIRS, PROMPTS = 32, 32
ROWS = 4096
"""Tokens of prompts that go through a model together."""


class Lookups(NamedTuple):
    """Prompts `[N, T]` of pairs and then the key of one of them, and the value that comes next, `[N]`."""

    prompts: Tensor
    answers: Tensor

    @classmethod
    def draw(
        cls, vocabulary: Tensor, pairs: int = PAIRS, prompts: int = PROMPTS, *, seed: int = 0,
        colon: Sequence[int] = (), end: Sequence[int] = (),
    ) -> Lookups:  # fmt: skip
        """Random keys and values, one token each, all of a prompt different.

        Args:
            vocabulary: token ids to draw from; at least two a pair.
            colon, end: ids that stand between a key and its value, and behind a value.

        Raises:
            ValueError: too few tokens for so many pairs.
        """
        check_whole(pairs=pairs, prompts=prompts)
        words = vocabulary.flatten().unique()
        if len(words) < 2 * pairs:
            raise ValueError(
                f"{pairs} pairs take {2 * pairs} different tokens; there are {len(words)}, enough for {len(words) // 2}"
            )
        generator = torch.Generator().manual_seed(seed)
        rows, answers = [], []
        for _ in range(prompts):
            keys, values = words[torch.randperm(len(words), generator=generator)[: 2 * pairs]].view(2, -1).tolist()
            asked = int(torch.randint(pairs, (), generator=generator))
            told = [id for k, v in zip(keys, values, strict=True) for id in (k, *colon, v, *end)]
            rows.append([*told, keys[asked], *colon])
            answers.append(values[asked])
        return cls(torch.tensor(rows), torch.tensor(answers))


class Answered(NamedTuple):
    """The share of values that were the model's likeliest token, and the mean log-probability of all of them."""

    accuracy: float
    log_probability: float


@dataclass(frozen=True, eq=False)
class Importance:
    """What a model answers as it is, and how much less without each head, `[layer][head]`; see `retrieval_importance`.

    accuracy: a₀ - a_lh. log_probability: the same difference of the values' log-probability, which orders heads of
    equal accuracy.
    """

    whole: Answered
    accuracy: list[list[float]]
    log_probability: list[list[float]]

    def ranking(self) -> list[tuple[int, int]]:
        """(layer, head), the most important first."""
        every = [(layer, head) for layer, row in enumerate(self.accuracy) for head in range(len(row))]
        return sorted(every, key=lambda at: (-self.accuracy[at[0]][at[1]], -self.log_probability[at[0]][at[1]], at))


@torch.no_grad()
def answered(model: ManyheadsForCausalLM, lookups: Lookups) -> Answered:
    """How a model does on look-ups."""
    rows = max(1, ROWS // lookups.prompts.shape[1])
    right = said = 0.0
    for prompts, answers in zip(lookups.prompts.split(rows), lookups.answers.split(rows), strict=True):
        out: Any = model(prompts.to(model.device), use_cache=False, logits_to_keep=1)
        log = out.logits[:, -1].to(torch.promote_types(out.logits.dtype, torch.float32)).log_softmax(-1).cpu()
        right += (log.argmax(-1) == answers).sum().item()
        said += log.gather(1, answers[:, None]).double().sum().item()
    return Answered(right / len(lookups.answers), said / len(lookups.answers))


def retrieval_importance(
    model: ManyheadsForCausalLM,
    lookups: Lookups,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Importance:
    """s_lh = a₀ - a_lh: exact matches lost when head h of layer l puts out zero. One run a head, no gradients.

    Choices: heads are set to zero, not to their mean; look-ups are pairs of random tokens. Multi-hop retrieval may need
    heads that these do not find, as the authors say. Accuracy takes few values, so the log-probability of the values
    breaks ties, which the paper does not say.

    Source: arXiv 2602.11374.
    """
    whole = answered(model, lookups)
    layers, done = model.attentions, 0
    total = sum(layer.layout.out for layer in layers)
    without: list[list[Answered]] = []
    for layer in layers:
        without.append([])
        for head in range(layer.layout.out):
            with _silent(layer, head):
                without[-1].append(answered(model, lookups))
            done += 1
            progress(done, total)
    return Importance(
        whole,
        [[whole.accuracy - each.accuracy for each in row] for row in without],
        [[whole.log_probability - each.log_probability for each in row] for row in without],
    )


class _Silent(Tap):
    def __init__(self, head: int) -> None:
        self.head = head

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        o = o.clone()
        o[:, self.head] = 0
        return o


@contextmanager
def _silent(layer: Attention, head: int) -> Iterator[None]:
    before = layer.taps
    layer.taps = (*before, _Silent(head))
    try:
        yield
    finally:
        layer.taps = before


def keep_heads(
    ranking: Sequence[tuple[int, int]], heads: Sequence[int], groups: Sequence[int], budget: float, *,
    most: int | None = None,
) -> list[tuple[int, ...]]:  # fmt: skip
    """The heads that stay, by layer: from the most important on, as long as the key heads that they read fit a budget.

    A query head whose key head is kept for another costs no more rows. One whose key head does not fit is passed over.

    Args:
        ranking: (layer, head). heads, groups: query heads and key heads of each layer.
        budget: key heads in all layers. most: query heads in all layers.
    """
    kept: list[list[int]] = [[] for _ in heads]
    cached: set[tuple[int, int]] = set()
    for layer, head in ranking:
        if most is not None and sum(map(len, kept)) == most:
            break
        group = layer, head * groups[layer] // heads[layer]
        if group in cached or len(cached) + 1 <= budget:
            cached.add(group)
            kept[layer].append(head)
    return [tuple(sorted(each)) for each in kept]
