"""Measures of what heads do to tokens: copying a needle while the model writes, turning a token into the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.core.cache import Cache
from manyheads.inspect.ablate import ablate
from manyheads.inspect.capture import watching
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import HeadTable
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
    first, last = needle
    if prompt.ndim != 2 or len(prompt) != 1 or not 0 <= first < last <= prompt.shape[1] or new_tokens < 1:
        raise ValueError(f"a needle {needle} in a prompt {[*prompt.shape]}; ids [1, T], 0 ≤ first < last ≤ T")
    some = [layer for layer in chosen(model, layers) if not layer.none]
    looked: dict[int, list[Tensor]] = {layer.number: [] for layer in some}

    def see(look: Look) -> None:
        row = look.axis.length - 1
        weights = next(iter(look.weights(rows=[row]))).weights[0, :, 0]
        best = weights.argmax(-1)
        times = look.mask.k.time[0].to(best.device)
        looked[look.layer].append(times[best].cpu())

    with torch.no_grad(), watching(some, see):
        written = _greedy(model, prompt, new_tokens)
    span = prompt[0, first:last].tolist()
    rows = {}
    for layer in some:
        steps = torch.stack(looked[layer.number][: len(written)])  # [steps, H]
        found = torch.zeros(steps.shape[1], last - first, dtype=torch.bool)
        for at, token in zip(steps, written, strict=True):
            for head, place in enumerate(at.tolist()):
                if first <= place < last and span[place - first] == token:
                    found[head, place - first] = True
        rows[layer.number] = found.double().mean(-1)
    recall = len(set(span) & set(written)) / len(set(span))
    return Retrieval(HeadTable("retrieval", rows), written, recall)


def _greedy(model: Any, prompt: Tensor, count: int) -> list[int]:
    if hasattr(model, "generate"):
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, num_beams=1
        )
        return ids[0, prompt.shape[1] :].tolist()
    cache, ids, written = Cache(), prompt, []
    for _ in range(count):
        ids = model(ids, cache=cache)[:, -1:].argmax(-1)
        written.append(int(ids))
    return written


def successor(
    model: nn.Module, lists: Sequence[Sequence[int]], layers: int | Iterable[int] | None = None, *, step: int = 1
) -> HeadTable:
    """S_h: the share of tokens t of ordered lists for which head h alone would write the next one, in [0, 1].

    ℓ_h(t) = the final norm of m_t W_OV, unembedded; it counts where its highest entry among the list's tokens is that
    of token t + step. m_t is what a token is after the first feed-forward without any attention; it is put before each
    layer, whose norm it goes through, as a sequence of its own, where each head can only look at it. Ties count as
    misses. step: 0 gives a copying score, -1 a predecessor score. No text is needed; chance is 1 / (tokens in a list).

    Args:
        lists: token ids, each list in its order (numbers, days, months, letters), one token an item.

    Source: Gould et al. 2023, arXiv 2312.09230.
    """
    if not lists or any(len(one) < 2 or len(set(one)) < len(one) for one in lists):
        raise ValueError("successor needs lists of two or more different token ids, in their order")
    some = chosen(model, layers)
    blocks, unembed = _blocks(model, some), unembedding(model)
    ids = torch.tensor([token for one in lists for token in one], device=next(model.parameters()).device)[:, None]
    early = _early(model, chosen(model, None), ids)
    wrote: dict[int, Tensor] = {}

    def see(look: Look) -> None:
        each = [unembed(c)[:, -1][:, ids[:, 0]] for _, c in look.contributions()]
        wrote[look.layer] = torch.stack(each, 1).cpu()  # [N, H, N]

    def give(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _with_input(args, kwargs, early)

    with torch.no_grad(), ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(give, with_kwargs=True).remove)
        stack.enter_context(watching(some, see))
        model(ids)
    rows = {}
    for layer in some:
        logits, right, at, pairs = wrote[layer.number], 0, 0, 0
        for one in lists:
            own = logits[at : at + len(one), :, at : at + len(one)]
            at += len(one)
            best = own.amax(-1, keepdim=True)
            alone = (own == best).sum(-1) == 1
            for place in range(len(one)):
                if 0 <= place + step < len(one):
                    right = right + ((own[place].argmax(-1) == place + step) & alone[place]).double()
                    pairs += 1
        rows[layer.number] = torch.as_tensor(right) / max(1, pairs)
    return HeadTable("successor" if step == 1 else f"step {step}", rows)


def _blocks(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Module]:
    """The blocks that the layers are in, which take the stream first."""
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for layer in layers:
        name = names.get(id(layer.module), "").rpartition(".")[0]
        block = model.get_submodule(name)
        if isinstance(block, nn.ModuleList) or block is model:
            raise ValueError(f"{layer.name}: the block around it is not known")
        found.append(block)
    return found


def _early(model: nn.Module, layers: Sequence[Layer], ids: Tensor) -> Tensor:
    """m_t `[N, 1, D]`: what enters the second block when the first one's heads add nothing."""
    seen: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    blocks = _blocks(model, layers)
    if len(blocks) < 2:
        raise ValueError("early states are those after the first feed-forward; this model has one layer")
    hook = blocks[1].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad(), ablate(model, {layers[0].number: None}):
            model(ids)
    finally:
        hook.remove()
    return seen[0]


def _with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[Any, Any]:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def unembedding(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The final norm and the head: from the stream to logits.

    Raises:
        ValueError: they are not known.
    """
    inner: Any = model
    while isinstance(getattr(inner, "model", None), nn.Module) or isinstance(getattr(inner, "decoder", None), Decoder):
        if isinstance(getattr(inner, "decoder", None), Decoder):
            inner = inner.decoder
            break
        inner = inner.model
    if isinstance(inner, Decoder):
        return lambda x: inner.head(inner.norm(x))
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
    return lambda x: head(norm(x))
