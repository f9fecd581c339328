"""FlexAttention: block-sparse masks without a dense mask in memory. Forward only on the CPU; chosen by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from manyheads.core.kernel import Call, Out, ScoreProgram
from manyheads.core.kernels.common import refuse


def flex(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    refuse("flex", call, program, dropout=dropout)
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    if call.q.device.type == "cpu" and tracked:
        raise ValueError("kernel 'flex' has no backward on the CPU; use 'sdpa'")
    (batch, heads, t, _), s = call.q.shape, call.k.shape[2]
    seen = call.mask.tile().expand(batch, heads, t, s)

    def may_attend(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[b, h, i, j]

    blocks = create_block_mask(may_attend, batch, heads, t, s, device=str(call.q.device))
    result = flex_attention(
        call.q, call.k, call.v, block_mask=blocks, scale=call.scale, enable_gqa=True, return_lse=need_lse
    )
    o, lse = result if isinstance(result, tuple) else (result, None)
    empty = ~seen.any(-1)
    assert isinstance(o, Tensor)
    if isinstance(lse, Tensor):
        lse = lse.masked_fill(empty, -torch.inf)
    return Out(o.masked_fill(empty[..., None], 0.0), lse)
