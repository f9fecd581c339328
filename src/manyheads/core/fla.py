"""The kernels of the package flash-linear-attention, where it is installed and the tensors are on a GPU.

They take rows `[B, T, H, …]` with as many key heads as query heads, log decays and a scale, and return the last state
`[B, H, K, V]` beside the outputs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

SHORT = 64
"""Tokens of a pass below which its kernels have little to do in parallel."""

FAINTEST = -100.0
"""The log of a decay that leaves nothing in float32: the kernels subtract sums of logs, which must be finite."""


HALF = (torch.float16, torch.bfloat16)
"""What the kernels of the delta rule take."""

SINGLE = (*HALF, torch.float32)
"""What the kernels of decayed sums take."""


def why_not(like: Tensor, dtype: torch.dtype, tokens: int, takes: tuple[torch.dtype, ...]) -> str | None:
    """Why its kernels, which take some dtypes, do not run on tokens of a dtype on the device of a tensor."""
    if not takes:
        return "it has no kernel for this scan"
    if not on_gpu(like):
        return "it runs on a GPU"
    if dtype not in takes:
        return f"it does not take {dtype}"
    if tokens < SHORT:
        return f"{tokens} tokens, fewer than {SHORT}"
    return None if installed() else "the package flash-linear-attention is not installed"


def on_gpu(t: Tensor) -> bool:
    return t.device.type in ("cuda", "xpu")


@cache
def installed() -> bool:
    return find_spec("fla") is not None


def decayed_sum(q: Tensor, k: Tensor, v: Tensor, fades: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`scan.decayed_sum` in the dtype of v; fades `[B or 1, G, T, 1 or K]` are logs."""
    if fades.shape[-1] == 1:
        return _run("simple_gla", q, k, v, state, g=fades[..., 0])
    return _run("gla", q, k, v, state, g=fades)


def delta_sum(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fades: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`scan.delta_sum` in the dtype of v; β and fades `[B or 1, G, T, 1]`."""
    if fades is None:
        return _run("delta_rule", q, k, v, state, beta=beta[..., 0])
    return _run("gated_delta_rule", q, k, v, state, beta=beta[..., 0], g=fades[..., 0])


def _run(op: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor, **numbers: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, each = len(q), q.shape[1], q.shape[1] // k.shape[1]

    def rows(t: Tensor, dtype: torch.dtype) -> Tensor:
        t = t.expand(batch, *t.shape[1:]).repeat_interleave(heads // t.shape[1], 1)
        return t.transpose(1, 2).to(dtype).contiguous()

    arguments: dict[str, Any] = {name: rows(t, v.dtype) for name, t in (("q", q), ("k", k), ("v", v))}
    arguments |= {name: rows(t.clamp_min(FAINTEST), torch.float32) for name, t in numbers.items()}
    kernel = getattr(import_module(f"fla.ops.{op}"), f"chunk_{op}")
    start = state.float().repeat_interleave(each, 1).contiguous()
    o, last = kernel(**arguments, scale=1.0, initial_state=start, output_final_state=True)
    return o.transpose(1, 2), last[:, ::each]
