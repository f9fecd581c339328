"""Measures of what heads do to tokens: copying a needle while the model writes, turning a token into the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cache import Cache
from manyheads.inspect.ablate import ablate
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import HeadTable
from manyheads.inspect.stream import blocks_of, inner_of, stream_in, with_stream
from manyheads.stack.decoder import Decoder


@dataclass(frozen=True)
class Retrieval:
    """scores: R_h by head. written: the ids that the model wrote. recall: the share of the needle's ids among them."""

    scores: HeadTable
    written: list[int]
    recall: float


def retrieval(
    model: nn.Module, prompt: Tensor, needle: tuple[int, int], new_tokens: int = 32,
    layers: int | Iterable[int] | None = None,
) -> Retrieval:  # fmt: skip
    """R_h: how much of a needle a head copied, while the model wrote greedily after a prompt that holds it.

    A step counts for a head whose highest weight lies on a needle token that is the one written: R_h = the number of
    needle tokens counted so, over the needle's length, in [0, 1]. A head with 0.1 or more in the mean of many prompts
    is a retrieval head. Read `recall` first: where the model did not find the needle (≤ 0.5), R says nothing.

    Args:
        prompt: ids `[1, T]`. needle: its first place in the prompt, and the place after its last.

    Source: Wu et al. 2024, arXiv 2404.15574. (There a token counts each time it is copied; here once, so that R ≤ 1.)
    """
    copied = copies(model, prompt, [needle], new_tokens, layers)
    rows = {layer: row[0] for layer, row in copied.scores.items()}
    return Retrieval(HeadTable("retrieval", rows), copied.written[0], float(copied.recall[0]))


@dataclass(frozen=True)
class Copies:
    """scores: R `[N, H]` of each prompt by layer. written: ids by prompt. recall: float64 `[N]`."""

    scores: dict[int, Tensor]
    written: list[list[int]]
    recall: Tensor


def copies(
    model: nn.Module, prompts: Tensor, needles: Sequence[tuple[int, int]], new_tokens: int = 32,
    layers: int | Iterable[int] | None = None,
) -> Copies:  # fmt: skip
    """`retrieval` of prompts of one length `[N, T]`, each with a needle of its own, in one batch."""
    fits = prompts.ndim == 2 and len(prompts) == len(needles) and new_tokens > 0
    wrong = [(first, last) for first, last in needles if not 0 <= first < last <= prompts.shape[-1]]
    if not fits or wrong:
        said = wrong[0] if wrong else f"s {[*needles]}"
        raise ValueError(f"a needle {said} in a prompt {[*prompts.shape]}; ids [N, T], N needles, 0 ≤ first < last ≤ T")
    some = [layer for layer in chosen(model, layers) if not layer.none]
    looked: dict[int, list[Tensor]] = {layer.number: [] for layer in some}

    def see(look: Look) -> None:
        row = look.axis.length - 1
        best = next(iter(look.weights(rows=[row]))).weights[:, :, 0].argmax(-1)  # [N, H]
        times = look.mask.k.time.to(best.device)
        looked[look.layer].append(times.expand(len(best), -1).gather(1, best).cpu())

    with torch.no_grad(), watching(some, see):
        written = greedy(model, prompts, new_tokens)
    spans = [prompts[at, first:last].tolist() for at, (first, last) in enumerate(needles)]
    scores = {}
    for layer in some:
        found = [torch.zeros(layer.heads, last - first, dtype=torch.bool) for first, last in needles]
        for step, places in enumerate(looked[layer.number][: written.shape[1]]):
            for at, (first, last) in enumerate(needles):
                for head, place in enumerate(places[at].tolist()):
                    if first <= place < last and spans[at][place - first] == int(written[at, step]):
                        found[at][head, place - first] = True
        scores[layer.number] = torch.stack([each.double().mean(-1) for each in found])
    texts = written.tolist()
    return Copies(scores, texts, recall(texts, spans))


def recall(written: Sequence[Sequence[int]], spans: Sequence[Sequence[int]]) -> Tensor:
    """The share of each needle's different ids among those that were written, float64 `[N]`."""
    each = [len(set(span) & set(text)) / len(set(span)) for text, span in zip(written, spans, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


def greedy(model: Any, prompts: Tensor, count: int) -> Tensor:
    """The likeliest next token, `count` times over: ids `[N, count]` at most."""
    if hasattr(model, "generate"):
        config = getattr(model, "generation_config", None)
        end = getattr(config, "eos_token_id", None)
        fill = getattr(config, "pad_token_id", None)
        fill = fill if fill is not None else end[0] if isinstance(end, list) else end
        more = {} if fill is None else {"pad_token_id": fill}
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count, do_sample=False, num_beams=1, **more
        )
        return ids[:, prompts.shape[1] :]
    cache, ids, written = Cache(), prompts, []
    for _ in range(count):
        ids = model(ids, cache=cache)[:, -1:].argmax(-1)
        written.append(ids)
    return torch.cat(written, 1)


Among = Literal["list", "lists", "vocab"]


def successor(
    model: nn.Module, lists: Sequence[Sequence[int]], layers: int | Iterable[int] | None = None, *, step: int = 1,
    among: Among = "list", ends: bool = False,
) -> HeadTable:  # fmt: skip
    """S_h: the share of tokens t of ordered lists for which head h alone would write the next one, in [0, 1].

    ℓ_h(t) = the final norm of m_t W_OV, unembedded; it counts where its highest entry among the list's tokens is that
    of token t + step. m_t is what a token is after the first feed-forward without any attention; it is put before each
    layer, whose norm it goes through, as a sequence of its own, where each head can only look at it. Ties count as
    misses. step: 0 gives a copying score, -1 a predecessor score. No text is needed; chance is 1 / (tokens in a list).

    Args:
        lists: token ids, each list in its order, one token an item; see `ordinals`.
        among: which tokens the right one has to beat: those of its list, of all lists, or all that there are.
        ends: of lists that go round (days, months), the pairs of their ends alone (Sunday and Monday), which are left
            out otherwise.

    Source: Gould et al. 2023, arXiv 2312.09230. (Which tokens the right one is held against is not public: the list's.)
    """
    if not lists or any(len(one) < 2 or len(set(one)) < len(one) for one in lists):
        raise ValueError("successor needs lists of two or more different token ids, in their order")
    if among not in get_args(Among):
        raise ValueError(f"among={among!r}; the right token is held against those of its list, lists, or the vocab")
    some = chosen(model, layers)
    blocks, (norm, head) = blocks_of(model, some), final_of(model)
    flat = torch.tensor([token for one in lists for token in one], device=next(model.parameters()).device)
    early = _early(model, chosen(model, None), flat[:, None])
    starts = [sum(len(one) for one in lists[:at]) for at in range(len(lists))]
    pairs = [
        (at + place, at + (place + step) % len(one), number)
        for number, (at, one) in enumerate(zip(starts, lists, strict=True)) for place in range(len(one))
        if (0 <= place + step < len(one)) is not ends
    ]  # fmt: skip
    own = torch.tensor([number for number, one in enumerate(lists) for _ in one], device=flat.device)
    here, there, of = torch.tensor(pairs, device=flat.device).reshape(-1, 3).T
    rivals = flat != flat[there][:, None]
    if among == "list":
        rivals &= own == of[:, None]
    rows: dict[int, Tensor] = {}

    def see(look: Look) -> None:
        hits = []
        for _, c in look.contributions():
            last = norm(c)[here, -1]
            if among == "vocab":
                logits = head(last)
                right = logits.gather(1, flat[there][:, None])[:, 0]
                best = logits.scatter(1, flat[there][:, None], -torch.inf).amax(-1)
            else:  # [pairs, tokens of the lists]
                weight = head.weight if isinstance(head, nn.Linear) and head.bias is None else None
                logits = F.linear(last, weight[flat]) if weight is not None else head(last)[:, flat]
                right = logits.gather(1, there[:, None])[:, 0]
                best = logits.masked_fill(~rivals, -torch.inf).amax(-1)
            hits.append((right > best).double().mean().cpu())
        rows[look.layer] = torch.stack(hits)

    def give(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return with_stream(args, kwargs, early)

    with torch.no_grad(), ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(give, with_kwargs=True).remove)
        stack.enter_context(watching(some, see))
        model(flat[:, None])
    return HeadTable("successor" if step == 1 else f"step {step}", {layer.number: rows[layer.number] for layer in some})


def _early(model: nn.Module, layers: Sequence[Layer], ids: Tensor) -> Tensor:
    """m_t `[N, 1, D]`: what enters the second block when the first one's heads add nothing."""
    seen: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(stream_in(args, kwargs))

    blocks = blocks_of(model, layers)
    if len(blocks) < 2:
        raise ValueError("early states are those after the first feed-forward; this model has one layer")
    hook = blocks[1].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad(), ablate(model, {layers[0].number: None}):
            model(ids)
    finally:
        hook.remove()
    return seen[0]


def unembedding(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The final norm and the head: from the stream to logits.

    Raises:
        ValueError: they are not known.
    """
    norm, head = final_of(model)
    return lambda x: head(norm(x))


def final_of(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The final norm, and the head.

    Raises:
        ValueError: they are not known.
    """
    inner = inner_of(model)
    if isinstance(inner, Decoder):
        return inner.norm, inner.head
    outer: Any = model
    head = outer.get_output_embeddings() if hasattr(outer, "get_output_embeddings") else None
    base = getattr(outer, getattr(outer, "base_model_prefix", "") or "", inner)
    places = (inner, base, getattr(inner, "transformer", None), getattr(inner, "decoder", None))
    names = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
    norm = next(
        (n for place in places for name in names if isinstance(n := getattr(place, name, None), nn.Module)), None
    )
    if head is None or norm is None:
        raise ValueError(f"the final norm and head of a {type(model).__name__} are not known")
    return norm, head
