"""Fused CPU attention that also returns a log-sum-exp with a gradient.

PyTorch's CPU flash operator returns the log-sum-exp but no gradient for it. Its backward computes
dP = dO Vᵀ - rowsum(dO ∘ O): a value channel of ones whose saved output is zero adds d lse to dP, which is exactly the
missing term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import equal_widths, refuse

_PAD = 8  # the operator wants widths in steps of a vector register


class _FlashWithLse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, triangle: bool
    ) -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, triangle, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, o, lse, mask)
        ctx.call = (scale, triangle)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        do, dlse = grads
        q, k, v, o, lse, mask = ctx.saved_tensors
        scale, triangle = ctx.call
        v = F.pad(F.pad(v, (0, 1), value=1.0), (0, _PAD - 1))
        do = F.pad(torch.cat([do, dlse[..., None].to(do.dtype)], -1), (0, _PAD - 1))
        q, k, o = (F.pad(t, (0, _PAD)) for t in (q, k, o))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do.contiguous(), q, k, v, o, lse, 0.0, triangle, attn_mask=mask, scale=scale
        )
        return dq[..., :-_PAD], dk[..., :-_PAD], dv[..., :-_PAD], None, None, None


def flash_cpu(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = True, dropout: float = 0.0) -> Out:
    refuse("flash_cpu", call, program, dropout=dropout)
    if call.q.device.type != "cpu":
        raise ValueError(f"kernel 'flash_cpu' runs on the CPU; the call is on {call.q.device}")
    q, k, v = equal_widths(call)
    triangle = call.mask.is_causal and q.shape[2] > 1
    mask = seen = None
    if not triangle and not call.mask.is_full:
        mask = call.mask.additive(q.dtype).expand(q.shape[0], q.shape[1], -1, -1)
        seen = mask.isfinite().any(-1)
    o, lse = _FlashWithLse.apply(q, k, v, mask, call.scale, triangle)
    o = o[..., : call.v.shape[-1]]
    if seen is not None:
        o, lse = o.masked_fill(~seen[..., None], 0.0), lse.masked_fill(~seen, -torch.inf)
    return Out(o, lse)
