"""Self-attention relations: what a student of another width and another number of heads can still copy from a teacher.

Queries, keys and values of all heads side by side are cut anew into `heads` relation heads of width d, which is each
model's own:

    L = Σ over pairs of mean over relation heads and rows of KL(Rᵀ ‖ Rˢ),   R = softmax(A Bᵀ / √d) `[heads, T, T]`

Choice: of models with rotation queries and keys are taken before it (ASSUMED), so that relations have no positions.

Source: MiniLMv2 2021, arXiv 2012.15828.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from manyheads.core.check import OptionError, check_whole

PAIRS = ("qq", "kk", "vv")


class Projected(NamedTuple):
    """Queries, keys and values `[B, T, heads · width]` of all heads side by side, before transforms and rotation."""

    q: Tensor
    k: Tensor
    v: Tensor


def relation_loss(
    student: Projected, teacher: Projected, heads: int, *, pairs: Sequence[str] = PAIRS, valid: Tensor | None = None,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """L, the mean over sequences. Neither model's number of heads is `heads`; it divides the widths of both.

    valid: bool `[B, T]`, False on padding, which is neither a row nor a column. causal: relations look back only.
    """
    check_whole(heads=heads)
    for pair in pairs:
        if len(pair) != 2 or set(pair) - set("qkv"):
            raise OptionError(f"a pair is two of q, k and v, such as 'qk', not {pair!r}")
    if not pairs:
        raise OptionError("pairs are none; such as 'qk', at least one")
    if student.q.dim() != 3 or 0 in student.q.shape:
        raise ValueError(f"the student's q is [B, T, width], none of them 0, not {list(student.q.shape)}")
    b, t, _ = student.q.shape
    if valid is not None and valid.shape != (b, t):
        raise ValueError(f"valid is {list(valid.shape)}, not {[b, t]}")
    for name in sorted(set("".join(pairs))):
        for who, each in (("student", student), ("teacher", teacher)):
            found = getattr(each, name)
            if found.shape[:2] != (b, t) or found.shape[-1] % heads:
                raise ValueError(
                    f"the {who}'s {name} is {list(found.shape)}; [{b}, {t}, a multiple of {heads}] is needed"
                )
    valid = torch.ones(b, t, dtype=torch.bool, device=student.q.device) if valid is None else valid.bool()
    rows = valid.sum(-1).clamp_min(1)
    total = student.q.new_zeros(())
    for one, other in pairs:
        p, q = (_relation(getattr(x, one), getattr(x, other), heads, valid, causal) for x in (teacher, student))
        apart = (p.exp() * (p - q)).sum(-1).masked_fill(~valid[:, None], 0)  # [B, heads, T]
        total = total + (apart.sum((1, 2)) / (heads * rows)).mean()
    return total


def _relation(a: Tensor, b: Tensor, heads: int, valid: Tensor, causal: bool) -> Tensor:
    """Log-probabilities `[B, heads, T, T]`, in float32 at least."""
    a, b = (
        x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (a, b)
    )
    with torch.autocast(a.device.type, enabled=False):
        scores = a @ b.mT * a.shape[-1] ** -0.5
    seen = valid[:, None, None, :]
    if causal:
        seen = seen & torch.ones(scores.shape[-2:], dtype=torch.bool, device=a.device).tril()
    # Finite, so that nothing times what is hidden is zero.
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min / 4).log_softmax(-1)
