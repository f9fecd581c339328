"""Which model and tokenizer a drafter belongs to, told by what they hold and not by what they are called."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 64
"""Numbers of each weight that are looked at, evenly over it."""


def check_model(model: Any) -> None:
    """Raise a TypeError unless it is a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise TypeError(f"decoding takes a model of transformers that manyheads.adopt returned, not a {kind}")


@dataclass(frozen=True)
class Identity:
    """model, tokenizer: names and sizes for people. weights, vocabulary: digests; None where there is no tokenizer."""

    model: str
    weights: str
    tokenizer: str | None
    vocabulary: str | None

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str = "") -> Identity:
        check_model(model)
        named = name or str(getattr(model.config, "name_or_path", "") or "") or type(model).__name__
        size = sum(parameter.numel() for parameter in model.parameters())
        words = None
        if tokenizer is not None:
            words = f"{getattr(tokenizer, 'name_or_path', '') or named} ({len(tokenizer):,} tokens)"
        config = model.config.get_text_config()
        sizes = f"{size:,} parameters, width {config.hidden_size}, {config.vocab_size:,} tokens"
        return cls(f"{named} ({sizes})", _weights(model), words, _vocabulary(tokenizer))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, other: Identity, where: Path) -> None:
        """Raise unless the other is what this names."""
        if self.weights != other.weights:
            raise ValueError(f"the drafter in {where} was made for the model {self.model}, not for {other.model}")
        if self.vocabulary and other.vocabulary and self.vocabulary != other.vocabulary:
            raise ValueError(
                f"the drafter in {where} was made for the tokenizer {self.tokenizer}, not for {other.tokenizer}"
            )


@torch.no_grad()
def _weights(model: PreTrainedModel) -> str:
    """Of samples in bfloat16, so that a model is the same in any dtype, and in any order of its weights."""
    each = []
    for parameter in model.parameters():
        flat = parameter.detach().reshape(-1)
        index = torch.linspace(0, len(flat) - 1, min(SAMPLES, len(flat)), dtype=torch.float64).round().long()
        kept = flat[index.to(flat.device)].bfloat16().view(torch.int16).cpu().numpy().tobytes()
        each.append(hashlib.sha256(str(sorted(parameter.shape)).encode() + kept).hexdigest())
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()


def _vocabulary(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    if tokenizer is None:
        return None
    words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(words.encode()).hexdigest()
