"""What moves share: linear layers as matrices of rows, the bias as one more input channel; a layer to fill."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.convert.stats import AttentionStats
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

Layer = TypeVar("Layer", bound=Attention)


class Move(Protocol):
    """From a layer and what calibration text says of it, a layer of another spec."""

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        ...

    def __call__(self, attention: SeamAttention, stats: AttentionStats) -> SeamAttention: ...


def like(attention: Layer, spec: Spec, heads: int | None = None) -> Layer:
    """A layer of another spec, or of other heads, at the place of this one, in its dtype; weights are new."""
    heads = attention.heads if heads is None else heads
    new = type(attention)(spec, attention.dim, heads, site=attention.site, dropout=attention.dropout)
    return new.to(next(attention.parameters())).eval()


def between(spec: Spec) -> str | None:
    """A part between the projections and the scores (qk-norm), which keys and queries do not pass linearly."""
    return next((part.name for part in spec.parts if part.stage == "transform"), None)


def linear_rows(linear: nn.Linear) -> Tensor:
    """Weights and bias, float64 `[out, in + 1]`."""
    bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return torch.cat([linear.weight, bias[:, None]], 1).detach().double()


@torch.no_grad()
def set_rows(linear: nn.Linear, rows: Tensor) -> None:
    """The inverse of `linear_rows`; a layer without a bias ignores the last channel."""
    linear.weight.copy_(rows[:, : linear.in_features])
    if linear.bias is not None:
        linear.bias.copy_(rows[:, -1])


def regression(given: Tensor, wanted: Tensor, moment: Tensor) -> Tensor:
    """B `[…, v, d]` with wanted x ≈ B given x, rows `[…, v, D]` and `[…, d, D]` on inputs with this second moment."""
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.clamp_min(0).sqrt()
    sides = ((rows @ root).transpose(-1, -2).cpu() for rows in (given, wanted))  # which alone has this driver
    return torch.linalg.lstsq(*sides, driver="gelsd").solution.transpose(-1, -2).to(given.device)
