"""The proof of an export: its own class reads it back and says what the model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from manyheads.convert.export.report import ExportError
from manyheads.convert.quiet import quiet

LARGEST_DIFFERENCE = 1e-3
"""Of logits, where the model and the file are float32."""
LARGEST_KL = 0.03
"""Nats, where either is bfloat16: rounding alone costs up to 0.006 there, a wrong recipe 0.08 and more."""


class Agreement(NamedTuple):
    """difference: largest |Δ logit|. kl: mean KL(model || file), nats."""

    difference: float
    kl: float


@torch.no_grad()
def compare_reloaded(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> Agreement:
    """Load `folder` through the Auto classes and compare it with `model` on random tokens.

    Raises:
        ExportError: tensors are missing or left over, or the logits differ by more than rounding.
    """
    with quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    reloaded, info = loaded
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ExportError(f"{type(reloaded).__name__} and the file disagree about the tensors {', '.join(wrong[:4])}")
    return compare_models(model, reloaded.to(model.device), "the file reads back as another model")


@torch.no_grad()
def compare_models(model: PreTrainedModel, other: PreTrainedModel, failed: str) -> Agreement:
    """Compare two models on random tokens.

    Raises:
        ExportError: `failed` and the figures, where the logits differ by more than rounding.
    """
    tokens = _tokens(model)
    ours, theirs = _logits(model, tokens), _logits(other, tokens)
    p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
    found = Agreement((ours - theirs).abs().max().item(), (p.exp() * (p - q)).sum(-1).mean().item())
    exact = model.dtype == other.dtype == torch.float32
    # The comparison is written so that NaN fails it.
    if not (found.difference <= LARGEST_DIFFERENCE if exact else found.kl <= LARGEST_KL):
        limit = f"|Δ logit| ≤ {LARGEST_DIFFERENCE}" if exact else f"KL ≤ {LARGEST_KL}"
        raise ExportError(
            f"{failed}: |Δ logit| {found.difference:.2g}, KL {found.kl:.2g} nats, where {limit} was asked for"
        )
    return found


def _tokens(model: PreTrainedModel) -> Tensor:
    config = model.config.get_text_config()
    length = min(64, getattr(config, "max_position_embeddings", 64))
    draw = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (2, length), generator=draw).to(model.device)


def _logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    training = model.training
    model.eval()
    try:
        return model(tokens, use_cache=False).logits.double()
    finally:
        model.train(training)
