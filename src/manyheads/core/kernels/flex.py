"""FlexAttention: block-sparse masks without a dense mask in memory. Forward only on the CPU; chosen by name.

It also runs a score program that is a sum of softmaxes with changed scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from manyheads.core.kernel import Call, Out, ScoreProgram, merge
from manyheads.core.kernels.common import refuse


def flex(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    terms = program[0].terms if len(program) == 1 else ()
    refuse("flex", call, () if terms else program, dropout=dropout)
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v))
    if call.q.device.type == "cpu" and tracked:
        raise ValueError("kernel 'flex' has no backward on the CPU; use 'sdpa'")
    (batch, heads, t, _), s = call.q.shape, call.k.shape[2]
    seen = call.mask.tile().expand(batch, heads, t, s)

    def may_attend(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[b, h, i, j]

    blocks = create_block_mask(may_attend, batch, heads, t, s, device=str(call.q.device))

    def solve(change: Callable[[Tensor], Tensor] | None, need_lse: bool) -> Out:
        result = flex_attention(
            call.q, call.k, call.v, None if change is None else lambda score, *place: change(score), blocks, call.scale,
            enable_gqa=True, return_lse=need_lse,
        )  # fmt: skip
        o, lse = result if isinstance(result, tuple) else (result, None)
        assert isinstance(o, Tensor)
        empty = ~seen.any(-1)
        if isinstance(lse, Tensor):
            empty = empty | lse.isneginf()
            lse = lse.masked_fill(empty, -torch.inf)
        return Out(o.masked_fill(empty[..., None], 0.0), lse)

    if not terms:
        return solve(None, need_lse)
    outs = [(term.sign, solve(term.change, True)) for term in terms]
    return merge([Out(sign * out.o, out.lse) for sign, out in outs])
