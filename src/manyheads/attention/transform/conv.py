"""A causal depthwise convolution over tokens behind each projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from manyheads.attention.convolution import Depthwise, lag_state, lagged
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Site, Transform
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class Conv(Part):
    """u'_t = a(b + Σ_s f_s ∘ u_{t-s}), s < taps, on the channels of each head; filters of their own for q, k and v.

    u `[B, heads, T, d]` is a projection of x, zero before the first token of a document. What is cached are convolved
    keys and values, and for a sequence the newest taps - 1 rows of each projection, so that decoding equals the full
    pass (in the authors' segments with memory, the first queries of a segment do not see the projections before it).

    Options: taps. per_head: filters for each head, as in Primer's multi-d-head attention (`conv(per_head=true)` and no
    rotation is that layer); shared by the heads otherwise, as in the code of RCMHA. activation a (`none`, `silu`) and
    bias b: DeltaNet's short convolution is `conv(taps=4, per_head=true, activation=silu, bias=false)`.

    Choices: the paper's abstract convolves the input embedding; its code, and this, the projections. A layer that
    reads another's rows convolves its queries.

    Source: RCMHA 2023, arXiv 2308.03429; per head: So et al. 2021, arXiv 2109.08668.
    """

    name: ClassVar[str] = "conv"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2308.03429"
    slot: ClassVar[str | None] = "conv"
    examples: ClassVar = ({}, {"taps": 4, "per_head": True, "activation": "silu", "bias": False})

    taps: int = 3
    per_head: bool = False
    activation: Literal["none", "silu"] = "none"
    bias: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "cached heads", "paired heads"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"token keys", "several keys"})

    @property
    def hint(self) -> dict[str, str]:
        return {"cached heads": "gqa, or mfa(key_reuse=false), and transforms that act at read behind conv"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.taps < 1:
            raise OptionError(f"conv: taps={self.taps}; at least 1, the token itself")
        return heads

    def rows(self, heads: Heads, site: Site) -> dict[str, tuple[int, int]]:
        """Heads and width of what is convolved."""
        all_rows = {"q": (heads.q, heads.qk_width), "k": (heads.kv, heads.qk_width), "v": (heads.kv, heads.v_width)}
        return all_rows if site.kv_source is None else {"q": all_rows["q"]}

    def build(self, before: Heads, after: Heads, site: Site) -> ConvTransform:
        return ConvTransform(self, self.rows(before, site))

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        rows = self.rows(before, site).values()
        filters = sum((heads if self.per_head else 1) * width for heads, width in rows)
        numbers = sum(heads * width for heads, width in rows)
        return Cost(
            (self.taps + self.bias) * filters,
            state_floats=(self.taps - 1) * numbers,
            token_flops=2 * self.taps * numbers,
        )


class ConvTransform(Transform):
    def __init__(self, options: Conv, rows: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.lags, self.silu = options.taps - 1, options.activation == "silu"
        self.states = {}
        for name, (heads, width) in rows.items():
            self.add_module(name, Depthwise(options.taps, heads if options.per_head else 1, width, options.bias))
            self.states |= lag_state(f"conv.{name}", heads, width, self.lags)

    def on_q(self, q: Tensor, flow: Flow) -> Tensor:
        return self._convolve("q", q, flow.q, flow)

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return self._convolve("k", k, flow.new, flow)

    def on_v(self, v: Tensor, flow: Flow) -> Tensor:
        return self._convolve("v", v, flow.new, flow)

    def _convolve(self, name: str, x: Tensor, axis: Axis, flow: Flow) -> Tensor:
        y = self.get_submodule(name)(lagged(x, axis, flow, f"conv.{name}", self.lags))
        return F.silu(y) if self.silu else y
