"""Each head reads a mix of the trunk's layers that it learns, and that may be sparse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from manyheads.multi.between import Between, Each, Share, Views, register_between


@register_between("lasso")
@dataclass(frozen=True, kw_only=True)
class Lasso(Between):
    """Head k reads G_k = Σ_m a[m, k] F_m, of M features of one shape, one a tap; the loss gets l1 · Σ |a|.

    Options: taps, in the order in which the trunk runs them. l1: λ. scale: `unit` reads a / ‖a‖₂, so that features
        cannot shrink by a while weights grow; `free` reads a itself; `softmax` is a softmax over layers, as ELMo's.
        start: `last` begins with the last layer alone, the plain model; `even` with all of them alike.

    Exact zeros come of `shrink` after the optimiser's step, with l1=0; the gradient of |a| alone only comes near.

    ASSUMED: the paper keeps columns at one scale without saying how; `unit` is the length of a column.

    Source: Doersch and Zisserman 2017, arXiv 1708.07860.
    """

    l1: float = 0.0
    scale: Literal["unit", "free", "softmax"] = "unit"
    start: Literal["last", "even"] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.l1 >= 0, f"l1={self.l1} is negative")
        self.ask(len(self.taps) > 1, f"taps={list(self.taps)}; a mix needs at least 2 submodules of the trunk")
        self.ask(
            self.scale != "softmax" or (self.l1 == 0 and self.start == "even"),
            "scale=softmax has no zeros and no single layer; it goes with l1=0 and start=even",
        )

    def build(self, widths: Sequence[int], names: Sequence[str]) -> LassoViews:
        return LassoViews(self, widths, names)


class Mix(nn.Module):
    """A head's column of a, `[M]`."""

    def __init__(self, options: Lasso, count: int) -> None:
        super().__init__()
        self.scale = options.scale
        even = torch.zeros(count) if options.scale == "softmax" else torch.full((count,), count**-0.5)
        self.alpha = nn.Parameter(even if options.start == "even" else torch.eye(count)[-1])

    def forward(self) -> Tensor:
        if self.scale == "softmax":
            return self.alpha.softmax(0)
        return self.alpha / self.alpha.norm() if self.scale == "unit" else self.alpha


class LassoViews(Views):
    def __init__(self, options: Lasso, widths: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        options.ask(len({*widths}) == 1, f"taps={list(options.taps)} are {list(widths)} wide; a mix is of equal ones")
        self.options, self.width, self.mixes = options, widths[0], Each()
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.mixes.put(name, Mix(self.options, len(self.options.taps)))

    def keep(self, names: Sequence[str]) -> None:
        self.mixes.keep(names)

    def mix(self, name: str) -> Tensor:
        """How a head weighs layers, `[M]`."""
        return self.mixes.of(name)()

    def forward(
        self, features: Sequence[Tensor], names: list[str], share: Share, mask: Tensor | None
    ) -> dict[str, Tensor]:
        shapes = [list(each.shape) for each in features]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"lasso: taps={list(self.options.taps)} give {shapes}; a mix is of features of one shape")
        shared = [share(each, names) for each in features]
        views = {}
        for name in names:
            parts = [weight * each[name] for weight, each in zip(self.mix(name), shared, strict=True)]
            views[name] = torch.stack(parts).sum(0)
        return views

    def penalty(self, shares: Mapping[str, float]) -> Tensor | float:
        if not self.options.l1:
            return 0.0
        return self.options.l1 * sum(self.mix(name).abs().sum() * share for name, share in shares.items())

    @torch.no_grad()
    def shrink(self, amount: float) -> None:
        """The proximal step of λ Σ |a|: |a| falls by amount = lr · λ, to 0 at most. Call it after the optimiser's step.

        Columns of unit length get it back; one that would be all zeros keeps its largest entry.
        """
        if self.options.scale == "softmax":
            raise ValueError("lasso: shrink makes zeros, which scale=softmax cannot have")
        for each in self.mixes.values():
            alpha = cast(Tensor, each.alpha)
            if self.options.scale == "unit":
                alpha /= alpha.norm()
            small = alpha.sign() * (alpha.abs() - amount).clamp(min=0)
            if self.options.scale == "unit":
                if not small.any():
                    best = alpha.abs().argmax()
                    small[best] = alpha[best].sign()
                small /= small.norm()
            alpha.copy_(small)
