"""How the losses of heads become one: a weighted sum, learned weights, or an aggregator of torchjd by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.core.part import OptionError
from manyheads.multi.head import Head


def processes() -> int:
    """How many train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


class Sum(nn.Module):
    """Σ_k weight_k L_k.

    A balance has two places: `combine`, where losses become one, and `views`, which hands features to heads.
    """

    name = "sum"

    def views(self, features: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The features as each of these heads gets them."""
        return dict.fromkeys(names, features)

    def combine(self, losses: Mapping[str, Tensor], heads: Mapping[str, Head], shares: Mapping[str, float]) -> Tensor:
        """One loss. shares: what part of a head's labels of the whole step is in this batch."""
        return torch.stack([loss * heads[name].weight for name, loss in losses.items()]).sum()


class Uncertainty(Sum):
    """Σ_k weight_k (t_k exp(-s_k) L_k + ½ s_k), s_k learned, t_k = ½ for a squared error and 1 otherwise.

    A head without labels adds nothing, its s_k neither. Refused for losses that may be negative (densities): they are
    likelihoods already, and the weight of one below zero would grow without end.

    Source: Kendall, Gal and Cipolla (arXiv 1705.07115).
    """

    name = "uncertainty"

    def __init__(self, heads: Mapping[str, Head]) -> None:
        super().__init__()
        for name, head in heads.items():
            if head.temper is None:
                raise OptionError(
                    f"head {name!r}: balance='uncertainty' needs losses from 0 on, {head.name} may go below"
                )
        self.places = {name: place for place, name in enumerate(heads)}
        self.log_variance = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in heads])

    def combine(self, losses: Mapping[str, Tensor], heads: Mapping[str, Head], shares: Mapping[str, float]) -> Tensor:
        terms = []
        for name, loss in losses.items():
            s, temper = self.log_variance[self.places[name]], heads[name].temper
            assert temper is not None
            terms.append(heads[name].weight * (temper * (-s).exp() * loss + 0.5 * s * shares[name]))
        return torch.stack(terms).sum()


class Aggregated(Sum):
    """What an aggregator says of the heads' gradients at the features that they share is what the trunk gets.

    The rows it sees are weight_k dL_k/dfeatures, of heads with labels in the batch, each flattened. Heads get their own
    gradients. Backward is the ordinary one, in `Trainer` or under a gradient scaler, without a pass for each head.
    Aggregators judge gradients of the trunk's parameters in their papers; features stand for these, as in MGDA-UB
    (arXiv 1810.04650). Each process would judge its own batch, so several are refused.
    """

    def __init__(self, name: str, aggregator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.aggregator = name, aggregator

    def views(self, features: Tensor, names: list[str]) -> dict[str, Tensor]:
        if len(names) < 2 or not features.requires_grad:
            return super().views(features, names)
        if processes() > 1:
            raise ValueError(f"balance={self.name!r} works in one process; over several take 'sum' or 'uncertainty'")
        return dict(zip(names, _Meet.apply(features, self.aggregator, len(names)), strict=True))  # type: ignore[arg-type]


class _Meet(torch.autograd.Function):
    """Several copies of x; their gradients meet in an aggregator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, aggregator: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, ...]:
        ctx.aggregator = aggregator
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        rows = torch.stack([each.flatten() for each in gradients])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        met = ctx.aggregator(rows).to(gradients[0].dtype)
        return met.view_as(gradients[0]), None, None


def make_balance(balance: str | Sum | Callable[[Tensor], Tensor], heads: Mapping[str, Head]) -> Sum:
    """`sum`, `uncertainty`, `averaged`, `balanced`, an aggregator of torchjd such as `UPGrad`, or a function.

    The function is of a matrix, a row a head.
    """
    if isinstance(balance, Sum):
        return balance
    if callable(balance):
        return Aggregated(type(balance).__name__, balance)
    if balance == "sum":
        return Sum()
    if balance == "uncertainty":
        return Uncertainty(heads)
    if balance in ("averaged", "balanced"):
        rates = import_module("manyheads.multi.rates")
        return rates.Averaged() if balance == "averaged" else rates.Balanced()
    try:
        library = import_module("torchjd.aggregation")
    except ImportError as error:
        raise ImportError(
            f"balance={balance!r} is none of sum, uncertainty, averaged, balanced; aggregators need torchjd: "
            "pip install 'manyheads[balance]'"
        ) from error
    kind = getattr(library, balance, None)
    base = getattr(library, "Aggregator", object)
    if not isinstance(kind, type) or not issubclass(kind, base) or kind is base:
        known = [name for name, each in vars(library).items() if isinstance(each, type) and issubclass(each, base)]
        raise OptionError(f"torchjd has no aggregator {balance!r}; it has {', '.join(sorted(known))}")
    try:
        return Aggregated(balance, kind())
    except TypeError as error:
        raise OptionError(f"{balance} of torchjd needs options ({error}): hand over one made by you") from None
