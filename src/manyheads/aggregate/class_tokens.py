"""A learned token inside the stack in place of pooling behind it; a second one that learns from a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Pooled
from manyheads.core.check import check_whole, is_number


class ClassTokens(nn.Module):
    """[x; cls] or [x; cls; dist] through an encoder: out `[B, 1 or 2, D]`, its states at the learned tokens.

    x `[B, N, D]`, mask bool `[B, N]`. The encoder is any module of (x, mask=) that gives `[B, N, D]` and sees both
    sides or, with the tokens behind, only the past. In training each row draws one of `vectors` learned class tokens;
    in evaluation it is their mean (ASSUMED: the two versions of the source say "Bayesian" and "sampling"). Positions,
    if the encoder has any, are its own business (ASSUMED none on the tokens). A row without tokens gives what the class
    token is by itself.

    Args:
        vectors: R. distil: a second token. first: the tokens come before x; refused where the encoder then cannot show
            them x, as a causal one. apart: nobody but itself sees the second token, so that nothing of it is in the
            first (the encoder takes a mask `[B, 1, T, T]`); otherwise both see both.

    Source: class and distillation tokens for speaker verification (arXiv 2111.03842).
    """

    def __init__(
        self, encoder: nn.Module, width: int, *, vectors: int = 1, distil: bool = False, first: bool = False,
        apart: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_whole(width=width, vectors=vectors)
        if apart and not distil:
            raise ValueError("apart keeps the second token from being seen; distil=True makes one")
        self.encoder, self.width, self.first, self.apart = encoder, width, first, apart
        self.vectors = nn.Parameter(0.02 * torch.randn(vectors, width))
        self.distil = nn.Parameter(0.02 * torch.randn(1, width)) if distil else None
        if not self._sees():
            hint = "; behind x (first=False) they see the past" if first else ""
            raise ValueError(f"the encoder shows the class token nothing of the others, as it is causal{hint}")

    @torch.no_grad()
    def _sees(self) -> bool:
        """Whether the class token's state depends on x."""
        parameter = next(self.encoder.parameters(), self.vectors)
        training, tokens = self.training, torch.zeros(2, 3, self.width)
        tokens[1] = torch.linspace(-1, 1, 3 * self.width).view(3, self.width).sin()
        self.eval().to(parameter.device, parameter.dtype)
        out = self(tokens.to(parameter)).out[:, 0]
        self.train(training)
        return not torch.equal(out[0], out[1])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Pooled:
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(f"class tokens: x is [rows, tokens, {self.width}], not {list(x.shape)}")
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"class tokens: mask is bool {list(x.shape[:2])}, not {mask.dtype} {list(mask.shape)}")
        rows = len(x)
        if self.training:
            own = self.vectors[torch.randint(len(self.vectors), (rows,), device=x.device)][:, None]
        else:
            own = self.vectors.mean(0).expand(rows, 1, -1)
        learned = own if self.distil is None else torch.cat([own, self.distil.expand(rows, 1, -1)], 1)
        many = learned.shape[1]
        mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        x = torch.where(mask[..., None], x, 0.0)
        parts = [(x, mask), (learned, mask.new_ones(rows, many))]
        tokens, seen = (torch.cat(each, 1) for each in zip(*(parts[::-1] if self.first else parts), strict=True))
        if self.apart:
            place = torch.arange(tokens.shape[1], device=x.device) == (1 if self.first else tokens.shape[1] - 1)
            seen = (seen[:, None] & (~place | place[:, None]))[:, None]
        out = self.encoder(tokens, mask=seen)
        return Pooled(out[:, :many] if self.first else out[:, -many:])


class Memory(nn.Module):
    """f(x Kᵀ) V with learned keys and values `[slots, D]`, in place of a feed-forward; f softmax, or relu.

    Source: arXiv 2111.03842 (its memory layers; form ASSUMED).
    """

    def __init__(self, width: int, slots: int, *, relu: bool = False) -> None:
        super().__init__()
        check_whole(width=width, slots=slots)
        self.keys, self.values = (nn.Parameter(torch.randn(slots, width) / width**0.5) for _ in range(2))
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        found = x @ self.keys.T
        return (found.relu() if self.relu else found.softmax(-1)) @ self.values


def distil_loss(
    logits: Tensor, labels: Tensor, student: Tensor, teacher: Tensor, weight: float = 1.0, temperature: float = 1.0
) -> Tensor:
    """CE(labels, logits of the class token) + weight · KL(softmax(teacher/T) ‖ softmax(student/T)), means over rows.

    logits, student, teacher: `[B, C]`; the teacher gets no gradient. weight and T are ASSUMED 1.

    Source: arXiv 2111.03842.
    """
    if not logits.shape == student.shape == teacher.shape:
        raise ValueError(f"logits are alike, not {', '.join(str(list(t.shape)) for t in (logits, student, teacher))}")
    if not is_number(temperature) or temperature <= 0:
        raise ValueError(f"temperature={temperature}; a number above 0")
    ours, theirs = ((each / temperature).log_softmax(-1) for each in (student, teacher.detach()))
    return F.cross_entropy(logits, labels) + weight * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
