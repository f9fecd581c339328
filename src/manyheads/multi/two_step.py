"""A step whose loss is that of each head after a step of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from manyheads.core.check import OptionError
from manyheads.multi.model import MultiHead


def two_step(
    model: MultiHead, x: Tensor, targets: Mapping[str, Any], lr: float, *, inner: float = 0.8, second: bool = False,
    **more: Any,
) -> Tensor:  # fmt: skip
    """L = Σ_k weight_k L_k(outer rows; θ - lr ∇L_k(inner rows; θ)); call backward on it.

    Heads without a label in both parts take no part. A pass over the inner rows a head, so it is for tens of heads, not
    hundreds. No parameter is written to, and statistics (BN) see both parts.

    Args:
        x: rows `[B, …]`; targets: by target key, each with a row a sample. inner: the part of rows, the first ones,
            that the inner step sees. second: gradients pass through the inner step; the authors' code does not.
        more: of the model's forward, the same for both parts.

    Source: arXiv 2106.10595 (MMoEEx), after MAML.
    """
    cut = round(len(x) * inner)
    if not 0 < cut < len(x):
        raise OptionError(f"inner={inner} of {len(x)} rows leaves {cut} and {len(x) - cut}; both parts need one")
    if not lr >= 0:
        raise OptionError(f"lr={lr} is no number from 0 on")
    first, last = ({key: part(each) for key, each in targets.items() if each is not None}
                   for part in (lambda each: each[:cut], lambda each: each[cut:]))  # fmt: skip
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    total = torch.zeros((), device=x.device)
    for name, head in model.heads.items():
        key = model.target(name)
        if key not in first:
            continue
        alone = dict(heads=[name], **more)
        before = model(x[:cut], targets={key: first[key]}, **alone).losses
        if name not in before:
            continue
        slopes = torch.autograd.grad(before[name], [*parameters.values()], create_graph=second, allow_unused=True)
        moved = {
            at: each if slope is None else each - lr * slope
            for (at, each), slope in zip(parameters.items(), slopes, strict=True)
        }
        after = functional_call(model, moved, (x[cut:],), dict(targets={key: last[key]}, **alone)).losses
        if name in after:
            total = total + head.weight * after[name]
    return total
