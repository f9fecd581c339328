"""The loss of a student beside its teacher.

Logits over a vocabulary exist in blocks of positions only: the gradient of the last hidden states is computed block by
block in the forward pass.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from manyheads.convert.relations import Projected, listening
from manyheads.convert.verify import Predictions
from manyheads.core.flow import Links
from manyheads.stack.pretrained import ManyheadsForCausalLM

if TYPE_CHECKING:
    from manyheads.convert.distil import Distil

BLOCK = 256
"""Predictions whose logits exist at once."""


class Losses(NamedTuple):
    """Of some windows: what is trained, and its cross-entropy and KL, means over their predicted tokens."""

    loss: Tensor
    ce: Tensor
    kl: Tensor


class Beside(nn.Module):
    """A student beside its teacher: token windows `[B, T]` to `Losses`."""

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, options: Distil) -> None:
        super().__init__()
        self.student, self.options = student, options
        self._teacher = (teacher,)  # no submodule: it is neither wrapped nor sharded nor saved with the student
        self._no_split_modules = student._no_split_modules  # where accelerate shards

    def forward(self, tokens: Tensor) -> Losses:
        options, (teacher,) = self.options, self._teacher
        heard: list[list[Projected]] = []
        extra: list[Tensor] = []
        with ExitStack() as stack:
            if options.relations is not None and self.training:
                layers = options.relations.layers(self.student, teacher)
                heard = [stack.enter_context(listening(layer)) for layer in layers]
            with torch.no_grad():
                theirs = Predictions(teacher, tokens)
            links = Links()
            known = {"links": links} if isinstance(self.student, ManyheadsForCausalLM) else {}
            ours = Predictions(self.student, tokens, **known)
        loss, ce, kl = _predicted(ours, theirs, tokens, options)
        if heard:
            assert options.relations is not None
            extra.append(options.relations.weight * options.relations(heard[0][0], heard[1][0]))
        if links.aux and self.training:
            extra.append(self.student.config.aux_weight * torch.stack(list(links.aux.values())).mean())
        return Losses(sum(extra, loss), ce, kl)


def _predicted(ours: Predictions, theirs: Predictions, tokens: Tensor, options: Distil) -> Losses:
    if ours.hidden is None or ours.head is None:
        blocks = [_block(ours.logits(*cut), theirs, tokens, cut, options) for cut in _cuts(tokens)]
        loss, ce, kl = (torch.stack(sums).sum() for sums in zip(*blocks, strict=True))
        return Losses(loss, ce.detach(), kl.detach())
    weights = [weight for weight in ours.head.parameters() if weight.requires_grad]
    asked = (ours, theirs, tokens, options, torch.is_grad_enabled())
    return Losses(*_InBlocks.apply(asked, ours.hidden, *weights))  # type: ignore[misc]


class _InBlocks(torch.autograd.Function):
    """The loss from the last hidden states; their gradient is taken while a block's logits exist."""

    @staticmethod
    def forward(ctx: Any, asked: tuple[Any, ...], hidden: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ours, theirs, tokens, options, learning = asked
        gradients = [torch.zeros_like(each) for each in (hidden, *weights)] if learning else []
        sums = torch.zeros(3, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for start, stop in _cuts(tokens):
            with torch.set_grad_enabled(learning):
                part = hidden[:, start:stop].detach().requires_grad_(learning)
                block = _block(ours.apply(part), theirs, tokens, (start, stop), options)
            if learning:
                found = torch.autograd.grad(block[0], (part, *weights))
                gradients[0][:, start:stop] = found[0]
                for total, each in zip(gradients[1:], found[1:], strict=True):
                    total += each
            sums += torch.stack(block).detach()
        ctx.save_for_backward(*gradients)
        loss, ce, kl = sums.clone().unbind()
        ctx.mark_non_differentiable(ce, kl)
        return loss.clone(), ce, kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(grad.to(each.dtype) * each for each in ctx.saved_tensors)


def _cuts(tokens: Tensor) -> list[tuple[int, int]]:
    """Blocks of positions whose next tokens are predicted."""
    width, last = max(1, BLOCK // len(tokens)), tokens.shape[1] - 1
    return [(start, min(start + width, last)) for start in range(0, last, width)]


def _block(
    logits: Tensor, theirs: Predictions, tokens: Tensor, cut: tuple[int, int], options: Distil
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of the loss, of its cross-entropy and of its KL."""
    start, stop = cut
    q = logits.log_softmax(-1)
    ce = -q.gather(-1, tokens[:, start + 1 : stop + 1, None]).sum()
    p, t = theirs.logits(start, stop).detach().to(q.dtype), options.temperature
    if t != 1:
        p, q = p / t, (logits / t).log_softmax(-1)
    p = p.log_softmax(-1)
    kl = t * t * (p.exp() * (p - q)).sum()
    ce, kl = (each / tokens[:, 1:].numel() for each in (ce, kl))
    return options.ce * ce + options.kl * kl, ce, kl
