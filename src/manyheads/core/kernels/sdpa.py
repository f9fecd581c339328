"""PyTorch's fused attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F

from manyheads.core.kernel import Call, Out, ScoreProgram, warn_once
from manyheads.core.kernels.common import as_asked, fused, refuse
from manyheads.core.kernels.tiled import TILE_BYTES


def sdpa(call: Call, program: Sequence[ScoreProgram] = (), *, need_lse: bool = False, dropout: float = 0.0) -> Out:
    refuse("sdpa", call, program, bias=True)
    if need_lse:
        raise ValueError("kernel 'sdpa' returns no log-sum-exp; use 'flash_cpu', 'grouped' or 'tiled'")
    q, k, v, mask, triangle = fused(call)
    if call.bias is not None and mask is not None and mask.nbytes > TILE_BYTES:
        warn_once("kernel 'sdpa' holds the score bias of all queries and keys at once; 'banded' bounds its memory")
    o = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, triangle, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return Out(as_asked(o, call.q)[..., : call.v.shape[-1]])
