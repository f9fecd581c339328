"""How close a model is to its source: perplexity, KL, top-1 agreement, and cached decoding against the full pass.

Logits over a whole vocabulary are large (2,048 tokens of 49,152 words: 400 MB), so they exist in small blocks only.
A model runs up to its output head; the hidden states (4.7 MB) stay, and the head is applied a block at a time.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutputWithPast

from manyheads.convert.quiet import quiet
from manyheads.convert.text import max_positions

_ROWS = 256  # positions whose logits exist at once
Progress = Callable[[int, int], object]  # (windows done, windows in all)


@dataclass(frozen=True)
class Quality:
    """Measures over the predicted tokens of all windows (each window's first token is given, not predicted).

    Attributes:
        perplexity: exp(nll).
        nll: mean of -ln p(next token), nats.
        kl: mean of KL(source || model) over the vocabulary, nats; NaN without a source.
        top1: share of positions whose most likely token is the source's; NaN without a source.
        tokens: predicted tokens.
    """

    perplexity: float
    nll: float
    kl: float
    top1: float
    tokens: int


class Predictions:
    """One pass of a model over `tokens` [B, T], giving the logits of any block of positions.

    Attributes:
        head: what turns hidden states into logits; None where the model has none of its own.
        hidden: its inputs `[B, T, D]`; None where the model changes logits after the head in a way of its own.
        full: all logits, in that case.
    """

    def __init__(self, model: PreTrainedModel, tokens: Int64[Tensor, "B T"], **options: Any) -> None:
        self.head: torch.nn.Module | None = model.get_output_embeddings()
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.hidden: Tensor | None = None
        self.full: Tensor | None = None
        tokens = tokens.to(model.device)

        def keep(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self.hidden = args[0]
            return (args[0][:, -1:], *args[1:])

        handle = self.head.register_forward_pre_hook(keep) if self.head is not None else None
        try:
            last = model(tokens, use_cache=False, **options).logits[:, -1:]
        finally:
            if handle is not None:
                handle.remove()
        if self.hidden is not None and self.hidden.shape[:2] == tokens.shape:
            ours, theirs = self.logits(tokens.shape[1] - 1, tokens.shape[1]), last
            if torch.allclose(ours, theirs.to(ours.dtype), rtol=1e-3, atol=1e-3, equal_nan=True):
                return
        # The model changes its logits after the head in a way of its own: take them whole.
        self.hidden, self.full = None, model(tokens, use_cache=False, **options).logits

    def logits(self, start: int, stop: int) -> Float[Tensor, "B block V"]:
        if self.full is not None:
            return self.full[:, start:stop].to(torch.promote_types(self.full.dtype, torch.float32))
        assert self.hidden is not None
        return self.apply(self.hidden[:, start:stop])

    def apply(self, hidden: Float[Tensor, "B block D"]) -> Float[Tensor, "B block V"]:
        """The head, and what is known of what comes after it."""
        assert self.head is not None
        logits = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Reference:
    """A source model's predictions on some windows, computed once and held as its last hidden states.

    Several candidates are then compared with it at the price of the output head alone, and exactly: no
    log-probabilities are stored, rounded or truncated. Memory: windows × length × hidden size.
    """

    @torch.no_grad()
    def __init__(
        self, model: PreTrainedModel, windows: Int64[Tensor, "windows length"], *, progress: Progress | None = None
    ) -> None:
        _check(model, windows)
        self.model, self.windows = model, windows
        self._passes: list[Predictions] = []
        for done, window in enumerate(windows, 1):
            made = Predictions(model, window[None])
            if made.full is not None:
                break  # where only whole logits are right, they are too large to hold: run again when asked
            self._passes.append(made)
            if progress is not None:
                progress(done, len(windows))

    def __call__(self, window: int) -> Predictions:
        return self._passes[window] if self._passes else Predictions(self.model, self.windows[window][None])


@torch.no_grad()
def quality(
    model: PreTrainedModel,
    windows: Int64[Tensor, "windows length"],
    reference: Reference | None = None,
    *,
    batch: int = 1,
    progress: Progress | None = None,
) -> Quality:
    """Perplexity on `windows`, and with a reference how far the predictions moved.

    Args:
        model: in evaluation mode.
        windows: token ids; every window is a sequence of its own.
        reference: the source model's predictions on the same windows.
        batch: windows in one pass; more is faster on an accelerator and takes more memory.
        progress: called with (windows done, windows in all).

    Raises:
        ValueError: windows longer than the model's positions, other windows or another vocabulary than the reference's.
        FloatingPointError: logits that are not finite, naming the window and the position.
    """
    _check(model, windows)
    if reference is not None and not torch.equal(reference.windows, windows):
        raise ValueError("the reference was made from other windows")
    count, length = windows.shape
    rows = max(1, _ROWS // batch)
    nll = kl = top1 = 0.0
    for first in range(0, count, batch):
        tokens = windows[first : first + batch]
        ours = Predictions(model, tokens)
        theirs = [reference(first + row) for row in range(len(tokens))] if reference else []
        for start in range(0, length - 1, rows):
            stop = min(start + rows, length - 1)
            q = ours.logits(start, stop).log_softmax(-1)
            loss = -q.gather(-1, tokens[:, start + 1 : stop + 1, None].to(q.device)).squeeze(-1)
            _check_finite(loss, first, start)
            nll += loss.double().sum().item()
            for row, source in enumerate(theirs):
                p = source.logits(start, stop)[0].to(q.device)
                if p.shape[-1] != q.shape[-1]:
                    raise ValueError(f"the reference predicts {p.shape[-1]} tokens, the model {q.shape[-1]}")
                p = p.log_softmax(-1)
                top1 += (p.argmax(-1) == q[row].argmax(-1)).sum().item()
                divergence = p.exp().mul_(p.sub_(q[row])).sum(-1)
                _check_finite(divergence[None], first + row, start)
                kl += divergence.double().sum().item()
        if progress is not None:
            progress(min(first + batch, count), count)
    total = count * (length - 1)
    if reference is None:
        kl = top1 = math.nan
    return Quality(math.exp(nll / total), nll / total, kl / total, top1 / total, total)


def compare(
    source: PreTrainedModel, model: PreTrainedModel, windows: Int64[Tensor, "windows length"], **options: Any
) -> Quality:
    """`quality` against a source model; make a `Reference` once where several models share a source."""
    return quality(model, windows, Reference(source, windows), **options)


@torch.no_grad()
def decode_equals_forward(model: PreTrainedModel, tokens: Int64[Tensor, "B T"], *, block: int = 1) -> float:
    """Largest |Δ logit| between one full pass and a cached pass in blocks of `block` tokens.

    The cache is the one that the model makes itself when it is given none.

    Raises:
        ValueError: the model returns no cache.
        FloatingPointError: logits that are not finite.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    _check(model, tokens)
    tokens = tokens.to(model.device)
    full = model(tokens, use_cache=False).logits.float()
    _check_finite(full.sum(-1), 0, 0)
    cache, worst = None, 0.0
    for start in range(0, tokens.shape[1], block):
        logits, cache = cached(model, tokens[:, start : start + block], cache)
        delta = (logits.float() - full[:, start : start + block]).abs().amax(-1)
        _check_finite(delta, 0, start)
        worst = max(worst, delta.max().item())
    return worst


def cached(
    model: PreTrainedModel, tokens: Int64[Tensor, "B T"], cache: Any = None, **options: Any
) -> tuple[Tensor, Any]:
    """One call that reads and extends a cache, or starts the model's own: (logits, cache).

    Raises:
        ValueError: the model returns no cache.
    """
    out = model(tokens, **{_cache_name(type(model)): cache}, use_cache=True, **options)
    if (cache := getattr(out, _FIELD, None)) is None:
        raise ValueError(f"{type(model).__name__} returns no cache")
    return out.logits, cache


# Transformers renamed `past_key_values` to `cache`; both names are right somewhere in the versions that are supported.
_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@lru_cache
def _cache_name(kind: type[PreTrainedModel]) -> str:
    known = inspect.signature(kind.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), _FIELD)


@torch.no_grad()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int = 64) -> str:
    """What the model writes after `prompt`, at most `tokens` tokens, always the most likely one."""
    # The checkpoint's own sampling options are unused here, and warned about unless cleared.
    sampling: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "top_k"))
    generate: Any = model.generate
    with quiet():  # longer than the model's positions is fine
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        ids = generate(
            inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def _check(model: PreTrainedModel, windows: Tensor) -> None:
    if windows.ndim != 2 or windows.shape[1] < 2 or not len(windows):
        raise ValueError(f"windows must be [count, length >= 2], not {list(windows.shape)}")
    config, limit = model.config.get_text_config(), max_positions(model.config)
    if limit is not None and windows.shape[1] > limit:
        raise ValueError(f"windows of {windows.shape[1]} tokens are longer than the model's {limit} positions")
    if (largest := int(windows.max())) >= config.vocab_size:
        raise ValueError(f"token {largest} is outside the model's vocabulary of {config.vocab_size}")


def _check_finite(values: Float[Tensor, "B block"], window: int, position: int) -> None:
    if not values.isfinite().all():
        row, column = (~values.isfinite()).nonzero()[0].tolist()
        raise FloatingPointError(
            f"the logits are not finite (NaN or infinite) in window {window + row} at position {position + column}"
        )
