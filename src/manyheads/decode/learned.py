"""Drafters with weights: what they share of a model, how they are kept in a folder, and which model they belong to."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from manyheads.attention import Attention
from manyheads.core.check import check_whole
from manyheads.core.linear import linear
from manyheads.decode.drafter import Seen
from manyheads.decode.identity import Identity, check_model
from manyheads.decode.tree import Tree

WEIGHTS, DESCRIPTION = "heads.safetensors", "drafter.json"


class Words:
    """The model's own head, frozen, on the tokens that a drafter may say: all, or those of a list.

    A list of the tokens that texts are mostly made of makes drafts and training as much cheaper as it is shorter than
    the vocabulary; others are never drafted, and the text stays the model's own.
    Source of that: Zhao et al. 2025, arXiv 2502.14856.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor | None) -> None:
        head: Any = model.get_output_embeddings()
        self.vocab = model.config.get_text_config().vocab_size
        self._head, self.tokens = head, None
        if tokens is None:
            return
        whole = isinstance(tokens, Tensor) and tokens.ndim == 1 and len(tokens) > 0 and not tokens.is_floating_point()
        inside = whole and 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab
        if not inside or len(tokens.unique()) < len(tokens):
            raise ValueError(f"the tokens of a drafter are a list of unlike ones below {self.vocab}")
        self.tokens = tokens = tokens.long().to(head.weight.device)
        self._weight: Tensor = head.weight.detach()[tokens]
        self._bias: Tensor | None = None if head.bias is None else head.bias.detach()[tokens]

    def __len__(self) -> int:
        return self.vocab if self.tokens is None else len(self.tokens)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[…, len]` of what the head reads, `[…, D]`."""
        return self._head(hidden) if self.tokens is None else linear(hidden, self._weight, self._bias)

    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """What is copied of the head goes where the drafter goes."""
        if self.tokens is not None:
            self.tokens, self._weight = to(self.tokens), to(self._weight)
            self._bias = None if self._bias is None else to(self._bias)

    def said(self, index: Tensor) -> Tensor:
        """Tokens by their places among these."""
        return index if self.tokens is None else self.tokens[index]

    def places(self, tokens: Tensor) -> Tensor:
        """Places of tokens among these, -1 for others."""
        if self.tokens is None:
            return tokens
        place = torch.full((self.vocab,), -1, device=tokens.device)
        place[self.tokens.to(tokens.device)] = torch.arange(len(self.tokens), device=tokens.device)
        return place[tokens]


def attention_like(model: PreTrainedModel, spec: str) -> Attention:
    """A layer as wide as the model, with as many heads."""
    config = model.config.get_text_config()
    count = config.num_attention_heads
    return Attention(spec, config.hidden_size, count if isinstance(count, int) else count[-1])


class LearnedDrafter(nn.Module, ABC):
    """A drafter that is trained beside a frozen model, which is no submodule: its weights are not saved here.

    tokens: `[W]`, the tokens that it may say, None for all. width: choices at a depth of a tree, at most.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[LearnedDrafter]]] = {}
    odds: Tensor
    """No weight: it stays where it is, in float64."""

    def __init_subclass__(cls) -> None:
        LearnedDrafter.kinds[cls.kind] = cls

    def __init__(self, model: PreTrainedModel, width: int, tokens: Tensor | None) -> None:
        super().__init__()
        check_model(model)
        check_whole(width=width)
        self.words, self.dim = Words(model, tokens), model.config.get_text_config().hidden_size
        self.width = min(width, len(self.words))

    @property
    @abstractmethod
    def depth(self) -> int: ...

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What makes one of the same shape, beside the model and the tokens."""

    @abstractmethod
    def draft(self, seen: Seen, tree: Tree) -> Tensor: ...

    @abstractmethod
    def losses(self, hidden: Tensor, tokens: Tensor) -> Iterator[Tensor]:
        """What training makes small, in parts that need not exist together.

        hidden: `[B, T, D]`, what the language model head reads. tokens: `[B, T]`, what was chosen from it.
        """
        ...

    @abstractmethod
    def measure(self, hidden: Tensor, tokens: Tensor) -> None:
        """Set the odds from texts that it has not learnt, given as to `losses`."""

    def check(self, model: PreTrainedModel) -> None:
        """Raise a ValueError unless a model's sizes, dtype and device are those of the one that this was made for."""
        config, weight = model.config.get_text_config(), next(self.parameters())
        for what, own, other in (
            ("width", self.dim, config.hidden_size), ("vocabulary", self.words.vocab, config.vocab_size),
            ("dtype", weight.dtype, model.dtype), ("device", weight.device, model.device),
        ):  # fmt: skip
            if own != other:
                raise ValueError(f"the drafter is for a model of {what} {own}; that of this one is {other}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedDrafter:
        self.words.move(fn)
        return super()._apply(fn, recurse)

    def guess(self, depth: int) -> None:
        """Odds until they are measured."""
        self.odds = 0.4 ** torch.arange(1, depth + 1).double()[:, None] * 0.4 ** torch.arange(self.width).double()

    def hits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """float64 `[width]`: how often each choice of logits `[N, W]` is the token `[N]`."""
        best = self.words.said(logits.topk(self.width, -1).indices)
        return (best == tokens[:, None]).double().mean(0).cpu()

    def cross_entropy(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Of logits `[N, W]` and tokens `[N]`, mean over those that can be said."""
        wanted = self.words.places(tokens)
        total = F.cross_entropy(logits.float(), wanted, ignore_index=-1, reduction="sum")
        return total / (wanted >= 0).sum().clamp_min(1)

    def save(
        self, folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "", **notes: Any,
    ) -> None:  # fmt: skip
        """Write weights and description into an existing folder."""
        tensors = {key: value.detach().contiguous() for key, value in self.state_dict().items()}
        if self.words.tokens is not None:
            tensors["tokens"] = self.words.tokens
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        made_for = Identity.of(model, tokenizer, name).as_json()
        told = {"kind": self.kind, **self.options, "odds": self.odds.tolist(), "made_for": made_for, **notes}
        (folder / DESCRIPTION).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def load(
    folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = ""
) -> LearnedDrafter:
    """The drafter in a folder, for the model (and tokenizer) that it was made for.

    Raises:
        ValueError: it was made for another model or tokenizer (both are named), or a file is missing, damaged or not
            of the other.
    """
    folder = Path(folder)
    file, weights = folder / DESCRIPTION, folder / WEIGHTS
    for each in (file, weights):
        if not each.is_file():
            raise ValueError(f"{folder} holds no drafter: there is no {each.name}")
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        kind, odds = told.pop("kind"), torch.tensor(told.pop("odds"), dtype=torch.float64)
        made_for = Identity(**told.pop("made_for"))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} does not describe a drafter: {error!r}") from error
    known = sorted(LearnedDrafter.kinds)
    if kind not in known:
        raise ValueError(f"{file} describes a drafter of kind {kind!r}; known: {', '.join(known)}")
    made_for.check(Identity.of(model, tokenizer, name), folder)
    told.pop("training", None)
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights} cannot be read: {error}") from error
    try:
        made: Any = LearnedDrafter.kinds[kind]
        made = made(model, tokens=tensors.pop("tokens", None), **told)
        made.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{weights} does not hold the weights that {DESCRIPTION} speaks of") from error
    if odds.shape != made.odds.shape:
        raise ValueError(f"{file} gives odds of {[*odds.shape]} for {[*made.odds.shape]} depths and choices")
    made.odds = odds
    return made.eval()
