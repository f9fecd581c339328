"""What the kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.kernel import FEW_ROWS, Call, ScoreProgram


def refuse(
    kernel: str, call: Call, program: Sequence[ScoreProgram], *, dropout: float = 0.0, bias: bool = False
) -> None:
    """Say at once what a fused kernel cannot do."""
    reasons = [
        *(f"{p} works on the scores" for p in program),
        *(["a soft cap works on the scores"] if call.softcap is not None else []),
        *(["it takes no bias"] if call.bias is not None and not bias else []),
        *(["it has no dropout"] if dropout else []),
    ]
    if reasons:
        raise ValueError(f"kernel {kernel!r} cannot serve this call: {'; '.join(reasons)}; use 'tiled'")


def equal_widths(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one width: fused kernels are much faster so (zeros change no score, extra channels are cut)."""
    if call.values_in_keys:
        return call.q, call.k, call.k
    wide = max(call.q.shape[-1], call.v.shape[-1])

    def pad(t: Tensor) -> Tensor:
        return t if t.shape[-1] == wide else F.pad(t, (0, wide - t.shape[-1]))

    return pad(call.q), pad(call.k), pad(call.v)


def in_rows(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Queries `[B, H, T, E]` that share a key head as rows `[B, G, H/G·T, E]` of one head, whose keys are read once.

    So with their mask `[B or 1, H or 1, T, S]`, where that is small: one of many rows stays, and the queries apart. A
    single row of 16 bits is doubled: PyTorch's products of one row take over twice as long (measured on CPU).
    """
    groups, many = k.shape[1], q.shape[1] // k.shape[1]
    if many > 1 and (mask is None or many * q.shape[2] <= FEW_ROWS):
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(len(mask), groups, -1, mask.shape[-1])
        elif mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, many, 1)
        q = q.reshape(len(q), groups, -1, q.shape[-1])
    if q.shape[2] == 1 and q.element_size() == 2 and q.device.type == "cpu":
        q, mask = q.expand(-1, -1, 2, -1), mask if mask is None else mask.expand(-1, -1, 2, -1)
    return q, mask


def fused(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """What a fused kernel is given: q, k, v, what to add to the scores, and whether the triangle alone hides keys.

    What comes out is that of rows, for `as_asked`, and as wide as the widest of k and v.
    """
    q, k, v = equal_widths(call)
    if call.mask.is_causal and call.bias is None and q.shape[2] > 1:
        return q, k, v, None, True
    q, mask = in_rows(q, k, dense_mask(call))
    return q, k, v, mask, False


def as_asked(x: Tensor, q: Tensor) -> Tensor:
    """What rows of `in_rows(q, …)` give, `[B, G, rows, …]`, by head and query."""
    return x[:, :, : q.shape[1] // x.shape[1] * q.shape[2]].reshape(*q.shape[:3], *x.shape[3:])


def dense_mask(call: Call) -> Tensor | None:
    """What to add to the scores of every query and key, the bias and -inf where a key is hidden; None: nothing."""
    if call.bias is None:
        return None if call.mask.is_full else call.mask.additive(call.q.dtype)
    return call.bias(slice(None), slice(None)).to(call.q.dtype) + call.mask.additive(call.q.dtype)


def masked_softmax(scores: Tensor, visible: Tensor | None, *, sees_some: bool = False) -> Tensor:
    """Softmax over visible keys, in float32 or wider; zero rows where nothing is visible (sees_some: no such row)."""
    wide = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    if visible is None:
        return scores.softmax(-1, dtype=wide).to(scores.dtype)
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1, dtype=wide).to(scores.dtype)
    return weights if sees_some else weights.masked_fill(~visible, 0.0)


def masked_lse(scores: Tensor, visible: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """The log of the softmax's denominator, -inf where nothing is visible. weights: that softmax, where it is known."""
    wide = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    hidden = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    if weights is None or wide != scores.dtype or scores.requires_grad:
        return hidden.to(wide).logsumexp(-1)
    top = weights.amax(-1)  # exp(largest score - lse): two maxima cost less than another sum of powers
    lse = hidden.amax(-1) - top.log()
    return lse if visible is None else lse.masked_fill(top == 0, -torch.inf)
