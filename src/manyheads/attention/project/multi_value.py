"""Many value heads for a few pairs of query and key heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manyheads.attention.grouped import Biases, GQAProject, grouped_cost
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MultiValue(Part):
    """G query and key heads of width N, H value heads of width P = expand·D/H: value head h reads with the pair h·G/H.

    q = x W_Q, k = x W_K `[B, G, T, N]`; v = x W_V `[B, G, T, (H/G)·P]`, the value heads of a pair side by side;
    y = concat(o) W_O from H outputs of width P. It is the other way round than `gqa`, for scans: a state of N·P numbers
    for each of H heads costs no more queries and keys. In the terms of state spaces q is C, k is B and v is x.

    Options: groups G. key_dim N. expand: width of all values together over D. scale (default N^-1/2).

    Source: Dao and Gu 2024, arXiv 2405.21060 (multi-input SSM).
    """

    name: ClassVar[str] = "multi_value"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2405.21060"
    examples: ClassVar = ({"key_dim": 6}, {"groups": 2, "key_dim": 4, "expand": 1, "scale": 1.0})

    groups: int = 1
    key_dim: int = 128
    expand: int = 2
    scale: float | None = None

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys", "several keys"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        h, channels = heads.q, self.expand * heads.dim
        if self.groups < 1 or h % self.groups:
            fits = [each for each in range(1, h + 1) if h % each == 0]
            raise OptionError(f"multi_value: groups={self.groups} of {h} value heads; groups may be {fits}")
        if self.key_dim < 1 or self.expand < 1:
            raise OptionError(f"multi_value: key_dim={self.key_dim}, expand={self.expand}; at least 1")
        if channels % h:
            raise OptionError(
                f"multi_value: {channels} channels (expand={self.expand} times dim={heads.dim}) are no multiple of {h} "
                f"heads; a dim such as {heads.dim // h * h or h} fits"
            )
        g, values, width = self.groups, h // self.groups, channels // h
        scale = self.key_dim**-0.5 if self.scale is None else self.scale
        return Heads(
            heads.dim, g, g, self.key_dim, values * width, h, width, scale, slice(0, self.key_dim), values=values
        )

    def build(self, before: Heads, after: Heads, site: Site) -> MultiValueProject:
        return MultiValueProject(after, site, "none")

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return grouped_cost(after, site, "none")


class MultiValueProject(GQAProject):
    def __init__(self, heads: Heads, site: Site, bias: Biases) -> None:
        super().__init__(heads, site, bias)
        self.out_width = heads.out_width

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        """The value heads that lie side by side, each for itself."""
        return o.unflatten(-1, (-1, self.out_width)).transpose(2, 3).flatten(1, 2)
