"""Gaussian adaptive attention: features weighed by a learned density of themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Site, Tokens
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class GAAM(Part):
    """x ← x ∘ w on each token; w is a density of its standardised features, slice by slice: no queries, no keys.

    The D features are cut into `heads` slices in a row, D // heads wide, the last with the rest. In a slice of mean m
    and variance s² (unbiased, plus 1e-8):
    scalar (the authors' code): f_g = N((x - m - δ_g) / s; 0, c_g²) for g of `gaussians`, w = Π f_g, then divided by
    its sum over the slice; δ, c `[heads, gaussians]`. A product of Gaussians is one Gaussian, and computed as such.
    per_feature (the paper): w = exp(-(x - m - δ)² / (2 ξ (s² + 1e-5))), s² biased; δ, ξ for each feature.

    Options: heads (default those of the layer). gaussians (default 5, or 1 for per_feature, which has no more).
    normalise: to sum one over a slice; the paper does not. combine: `product`, or `mixture`, the mean of the
    Gaussians. start: c = √2, ξ = 2, or `random`, c = exp(N(0, 1)). on: the layer's input, or its output.

    Choices: code and paper disagree as above, and the code's form is the default. What is trained is log c and log ξ,
    so that spreads stay positive; its start is `fixed`, as the paper's, where the code draws it. Statistics are over
    features only: over time they would know the future. Padding passes unchanged.

    Source: Ioannides et al. 2024, arXiv 2401.11143.
    """

    name: ClassVar[str] = "gaam"
    stage: ClassVar = "tokens"
    paper: ClassVar[str] = "arXiv 2401.11143"
    examples: ClassVar = (
        {},
        {"params": "per_feature", "normalise": False, "on": "output"},
        {"combine": "mixture", "heads": 5, "gaussians": 2},
    )

    heads: int | None = None
    gaussians: int | None = None
    params: Literal["scalar", "per_feature"] = "scalar"
    normalise: bool = True
    combine: Literal["product", "mixture"] = "product"
    start: Literal["fixed", "random"] = "fixed"
    on: Literal["input", "output"] = "input"

    def shape(self, heads: Heads) -> tuple[int, int]:
        """Slices, and Gaussians in each."""
        gaussians = (5 if self.params == "scalar" else 1) if self.gaussians is None else self.gaussians
        return heads.q if self.heads is None else self.heads, gaussians

    def layout(self, heads: Heads, site: Site) -> Heads:
        slices, gaussians = self.shape(heads)
        if slices < 1 or heads.dim // slices < 2:
            raise OptionError(
                f"gaam: heads={slices} slices of dim={heads.dim} features; a slice has 2 or more, so heads may be "
                f"1 to {heads.dim // 2}"
            )
        if gaussians < 1 or (self.params == "per_feature" and (gaussians > 1 or self.combine == "mixture")):
            raise OptionError(
                f"gaam(params={self.params}): gaussians={gaussians}, combine={self.combine}; "
                + ("at least 1" if self.params == "scalar" else "it has one, and nothing to combine")
            )
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> GAAMTokens:
        return GAAMTokens(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        slices, gaussians = self.shape(before)
        return Cost(2 * (slices * gaussians if self.params == "scalar" else before.dim))


class GAAMTokens(Tokens):
    def __init__(self, options: GAAM, heads: Heads) -> None:
        super().__init__()
        self.options = options
        slices, gaussians = options.shape(heads)
        width = heads.dim // slices
        self.widths = [width] * (slices - 1) + [heads.dim - width * (slices - 1)]
        scalar = options.params == "scalar"
        shape = (slices, gaussians) if scalar else (heads.dim,)
        self.offset = nn.Parameter(torch.zeros(shape))
        fixed = torch.full(shape, math.log(2) / 2 if scalar else math.log(2))
        random = torch.randn(shape) * (1 if scalar else 2)  # ξ is a variance
        self.log_spread = nn.Parameter(random if options.start == "random" else fixed)

    def enter(self, x: Tensor, axis: Axis, flow: Flow) -> tuple[Tensor, Axis]:
        return (self._weigh(x, axis) if self.options.on == "input" else x), axis

    def leave(self, y: Tensor, flow: Flow) -> Tensor:
        return self._weigh(y, flow.q[: y.shape[1]]) if self.options.on == "output" else y

    def _weigh(self, x: Tensor, axis: Axis) -> Tensor:
        y = (x * self.weights(x)).to(x.dtype)
        return y if axis.valid is None else torch.where(axis.valid[..., None], y, x)

    def weights(self, x: Tensor) -> Tensor:
        """w `[…, D]` of features `[…, D]`, in float32 or wider."""
        parts = x.to(torch.promote_types(x.dtype, torch.float32)).split(self.widths, -1)
        if self.options.params == "scalar":
            logs = [self._scalar(*each) for each in zip(parts, self.offset, self.log_spread, strict=True)]
        else:
            by_slice = (parameter.split(self.widths) for parameter in (self.offset, self.log_spread))
            logs = [self._per_feature(*each) for each in zip(parts, *by_slice, strict=True)]
        return torch.cat([log.softmax(-1) if self.options.normalise else log.exp() for log in logs], -1)

    def _scalar(self, x: Tensor, offset: Tensor, log_spread: Tensor) -> Tensor:
        """log w of one slice; a product's Gaussians as the one that they make."""
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        variance, distance = variance + 1e-8, x - mean
        precision, height = (-2 * log_spread).exp(), -log_spread - math.log(2 * math.pi) / 2
        if self.options.combine == "mixture":
            squares = (distance[..., None] - offset).square() * precision
            return (height - squares / (2 * variance[..., None])).logsumexp(-1) - math.log(len(offset))
        total = precision.sum()
        centre = (precision * offset).sum() / total
        apart = (precision * (offset - centre).square()).sum()
        return height.sum() - (total * (distance - centre).square() + apart) / (2 * variance)

    def _per_feature(self, x: Tensor, offset: Tensor, log_spread: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return -(x - mean - offset).square() / (2 * log_spread.exp() * (variance + 1e-8 + 1e-5))


def importance_factor(weights: Tensor) -> Tensor:
    """How much each feature counts, from the mean of its weights over a data set: rescaled to [0, 1], constant to 0."""
    low, high = weights.min(), weights.max()
    return (weights - low) / (high - low).clamp_min(torch.finfo(weights.dtype).tiny)
