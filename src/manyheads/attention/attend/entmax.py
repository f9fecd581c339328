"""α-entmax in place of softmax: weights that can be exactly zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Piece, Program, Site
from manyheads.core.registry import register

LEAST = 1.01
"""α nearer to one loses the accuracy of p^(2-α) and of 1/(α-1)²."""

HIDDEN = -1e9
"""Far below any score, and finite: the sort for α = 1.5 sums squares."""


@register
@dataclass(frozen=True)
class Entmax(Part):
    """p_j = [(α-1) z_j - τ]₊^(1/(α-1)) over the visible keys of a query, τ the one number for which Σ p_j = 1.

    α = 1 is softmax, α = 2 the Euclidean projection of z onto the simplex (sparsemax). By default each head learns its
    own α_h = 1 + σ(a_h), a_h ~ N(0, 1), kept at 1.01 or more. τ is found by bisection, for a fixed 1.5 or 2 by sorting;
    gradients in z and α are those of the solution, not of the search. Half-precision scores are taken to float32.

    Options: alpha, one fixed α in [1, 2] for all heads, without parameters; 1 runs the softmax kernels.

    Choices: one α for all positions of a head, and the floor of 1.01, follow public copies of the authors' module; some
    of these copy α into a parameter of its own, which cuts it off from a_h. A query that sees nothing gives zero.

    Needs the `entmax` package (`pip install 'manyheads[entmax]'`).

    Source: Correia et al. 2019, arXiv 1909.00015; the mapping: Peters et al. 2019, arXiv 1905.05702.
    """

    name: ClassVar[str] = "entmax"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 1909.00015"
    slot: ClassVar[str | None] = "normalise"
    examples: ClassVar = ({}, {"alpha": 1.5}, {"alpha": 1.25})

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and self.alpha != 1 and not LEAST <= self.alpha <= 2:
            raise OptionError(f"entmax: alpha={self.alpha}; it may be 1, or from {LEAST} to 2")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.alpha == 1 else frozenset({"one map"})

    @property
    def breaks(self) -> frozenset[str]:
        if self.alpha == 1:
            return frozenset()
        return frozenset({"softmax"} | ({"alike heads"} if self.alpha is None else set()))

    @property
    def hint(self) -> dict[str, str]:
        return {"one map": "entmax as the first attend part"}

    def build(self, before: Heads, after: Heads, site: Site) -> Piece:
        return Piece() if self.alpha == 1 else EntmaxProgram(self.alpha, before.q)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(before.q if self.alpha is None else 0)


class EntmaxProgram(Program):
    def __init__(self, alpha: float | None, heads: int) -> None:
        super().__init__()
        self.fixed = alpha
        self.logits = nn.Parameter(torch.randn(heads)) if alpha is None else None
        self.search, self.sort = _solvers(alpha)

    def alpha(self) -> Tensor | float:
        """α of each head `[H, 1, 1]`, or the fixed one."""
        if self.logits is None:
            assert self.fixed is not None
            return self.fixed
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        return (1 + self.logits.to(wide).sigmoid()).clamp_min(LEAST)[:, None, None]

    def normalise(self, scores: Tensor, visible: Tensor, flow: Flow) -> Tensor:
        z = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, HIDDEN)
        if self.sort is None:
            weights = self.search(z, self.alpha(), n_iter=50 if z.dtype == torch.float64 else 30)
        else:
            weights = self.sort(z, dim=-1)
        return weights.masked_fill(~visible, 0.0).to(scores.dtype)


def _solvers(alpha: float | None) -> tuple[Callable[..., Tensor], Callable[..., Tensor] | None]:
    """The bisection for any α, and the exact sort where this α has one."""
    try:
        from entmax import entmax15, entmax_bisect, sparsemax
    except ImportError as error:
        raise ImportError("the part 'entmax' needs a package: pip install 'manyheads[entmax]'") from error
    exact = {1.5: entmax15, 2.0: sparsemax}.get(alpha or 0.0)
    for solver in (entmax_bisect, exact):  # torch.compile cannot read into them, and need not
        if solver is not None:
            torch.compiler.allow_in_graph(solver)
    return entmax_bisect, exact
