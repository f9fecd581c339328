"""What moves share: linear layers as matrices of rows, the bias as one more input channel; a layer to fill."""

import torch
from torch import Tensor, nn

from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention


def like(attention: SeamAttention, spec: Spec) -> SeamAttention:
    """A layer of another spec at the place of this one, in its dtype; weights are new."""
    new = SeamAttention(spec, attention.dim, attention.heads, site=attention.site, dropout=attention.dropout)
    return new.to(next(attention.parameters()).dtype).eval()


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
