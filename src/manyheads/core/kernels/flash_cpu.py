"""Fused CPU attention that also returns a log-sum-exp with a gradient, and has one for a bias.

PyTorch's CPU flash operator returns the log-sum-exp but no gradient for it. Its backward reads O for one thing only,
dP = dO Vᵀ - rowsum(dO ∘ O): with O - dO · dlse / |dO|² in its place dlse is added to dP, which is exactly the missing
term. A bias needs the gradient of every score; where it wants one the backward pass is written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import as_asked, fused, refuse

LEAST = 2.0**-50
"""Each channel of an output's gradient where that is zero, to make room for the gradient of a log-sum-exp."""
LOG2E = math.log2(math.e)


class _Flash(torch.autograd.Function):
    """o and lse (0 where a query sees nothing) of q, k, v and an additive mask `[B or 1, H or 1, T, S]`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, triangle: bool
    ) -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, triangle, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, mask, o, lse)
        ctx.call = (scale, triangle)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, mask, o, lse = ctx.saved_tensors
        (scale, triangle), dtype = ctx.call, q.dtype
        do = torch.zeros_like(o) if do is None else do
        if ctx.needs_input_grad[3]:
            return *_written_out(do, dlse, q, k, v, mask, o, lse, scale), None, None
        if dlse is not None:
            q, k, v, mask = (x if x is None else x.to(lse.dtype) for x in (q, k, v, mask))
            do, o = _with_lse(do.to(lse.dtype), dlse, o.to(lse.dtype))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, triangle, attn_mask=mask, scale=scale
        )
        return *(grad.to(dtype) for grad in grads), None, None, None


def _with_lse(do: Tensor, dlse: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """dO and what stands for O; where only dlse is not zero dO gets a little of its own, too little to tell."""
    size, dlse = (do * do).sum(-1, keepdim=True), dlse[..., None]
    tiny = size < LEAST**2
    none = tiny & (dlse != 0)
    do = torch.addcmul(none.to(do.dtype) * LEAST, do, (~none).to(do.dtype))
    size = size.masked_fill(tiny, LEAST**2 * do.shape[-1])
    return do, torch.addcmul(o, do, dlse / size, value=-1)


def _written_out(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and mask, the weights made anew: P = exp(S - lse), dS = P ∘ (dP - rowsum(dO ∘ O)).

    Powers are of 2, which PyTorch computes in vectors; those of e are many times slower where they come near zero.
    """
    shape, flat = (*q.shape[:3], k.shape[2]), k.shape[0] * k.shape[1]
    shift = (do * o).sum(-1, dtype=lse.dtype)
    shift = shift if dlse is None else shift - dlse
    # the queries that share a key head are rows of one matrix
    rows, drows, keys, values = (x.to(lse.dtype).reshape(flat, -1, x.shape[-1]) for x in (q, do, k, v))
    weights = (rows @ (keys * (scale * LOG2E)).mT).view(shape).add_(mask * LOG2E).sub_(lse[..., None] * LOG2E).exp2_()
    dscores = (drows @ values.mT).view(shape).sub_(shift[..., None]).mul_(weights)
    dmask = dscores.sum_to_size(mask.shape).to(mask.dtype)
    weights, dscores = (x.view(flat, -1, shape[-1]) for x in (weights, dscores))
    grads = zip((dscores @ keys * scale, dscores.mT @ rows * scale, weights.mT @ drows), (q, k, v), strict=True)
    return *(grad.view(x.shape).to(x.dtype) for grad, x in grads), dmask


def flash_cpu(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = True, dropout: float = 0.0) -> Out:
    refuse("flash_cpu", call, program, dropout=dropout, bias=True)
    if call.q.device.type != "cpu":
        raise ValueError(f"kernel 'flash_cpu' runs on the CPU; the call is on {call.q.device}")
    *qkv, mask, triangle = fused(call)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in qkv)
    o, lse = _Flash.apply(q, k, v, mask, call.scale, triangle)
    o = as_asked(o, call.q)[..., : call.v.shape[-1]]
    if not need_lse:
        return Out(o)
    if mask is not None:
        lse = lse.masked_fill(mask.detach().amax(-1) == -torch.inf, -torch.inf)
    return Out(o, as_asked(lse, call.q))
