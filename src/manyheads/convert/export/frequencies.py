"""A list of rotary frequencies as a stock rope config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyheads.core.position import inverse_frequencies

_CLOSE = 5e-7  # relative, a few roundings of float32: what two ways of computing one table differ by


def rope_config(theta: Tensor, base: float, longest: int) -> dict[str, Any]:
    """rope_theta and rope_scaling that make the stock class turn pair p by theta[p] radians a position.

    A geometric table is a default one, of the source's base or of another (pairs 0 … 3 of a table for 64 channels are
    the table for 8 channels of base^(1/8)). Any other list goes through `longrope`, whose factors divide the default
    table pair by pair: the same ones for short and long inputs, and no change of magnitude.
    """
    width = 2 * len(theta)
    bases = [base]
    if width > 2 and theta[-1] < theta[0]:
        bases.append((theta[0] / theta[-1]).double().item() ** (width / (width - 2)))
    for each in bases:
        if torch.allclose(inverse_frequencies(width, each), theta, rtol=_CLOSE, atol=0):
            return {"rope_theta": each, "rope_scaling": None}
    factors = (inverse_frequencies(width, base).double() / theta.double()).tolist()
    scaling = {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": longest,
    }
    return {"rope_theta": base, "rope_scaling": scaling}
