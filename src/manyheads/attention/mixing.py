"""Heads as sums of heads."""

from __future__ import annotations

from torch import Tensor


def mixed(x: Tensor, mixer: Tensor) -> Tensor:
    """Σ_m x[:, m] mixer[m, h]: `[B, m, S, d]` by `[m, h]` to `[B, h, S, d]`.

    One product a sequence: `matmul` would fold sequences into rows, which copies x before and the answer after.
    """
    return (mixer.T.expand(len(x), -1, -1) @ x.flatten(2)).unflatten(2, x.shape[2:])
