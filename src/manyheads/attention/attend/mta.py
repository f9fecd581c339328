"""Multi-token attention: scores and weights convolved over neighbouring queries and keys, and mixed over heads."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Program, Site
from manyheads.core.registry import register

Steps = Literal["both", "scores", "weights", "none"]


@register
@dataclass(frozen=True)
class MTA(Part):
    """S₁[h, i, j] = Σ_a Σ_b w_h[a, b] S[h, i - (c_q - 1) + a, j - (c_k - 1)/2 + b], S₂[g] = Σ_h M[g, h] S₁[h],
    A = softmax(S₂), and the same of A with weights of its own.

    Each head's kernel w `[c_q, c_k]` looks back over c_q queries and to both sides over c_k keys. Hidden cells of S and
    of A count as zero, before the convolution and, for A, after it, so nothing comes from the future. M `[H, H]`; after
    the softmax heads are mixed in blocks of c_h. Kernels and mixes start as identities, where the layer is plain
    attention. Each pass leaves its last c_q - 1 rows of S and A to the next one: 2 (c_q - 1) H numbers a key.

    Options: queries c_q. keys c_k (odd). conv, mix: which steps have them; the authors convolve in every fourth layer
    and mix in all. block: c_h, by default all heads. Their layers also have `head_norm` and `head_gate` behind:
    the preset `mta_gated` is all three.

    Choices: query i takes from an earlier query's cell only where it sees that key itself. Under the causal mask this
    asks nothing more; it keeps packed documents apart, where the authors cut the map, and windows strict. A score bias
    is added after the first mix; grouped key heads are repeated over their query heads first.

    Source: Golovneva et al. 2025, arXiv 2504.00927.
    """

    name: ClassVar[str] = "mta"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2504.00927"
    slot: ClassVar[str | None] = "head mix"
    examples: ClassVar = ({}, {"queries": 2, "keys": 9, "conv": "scores", "mix": "none"}, {"keys": 3, "block": 2})

    queries: int = 6
    keys: int = 11
    conv: Steps = "both"
    mix: Steps = "both"
    block: int | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"one map", "token keys", "adjacent keys"} if self.conv != "none" else {"one map"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"softmax", "one map"})

    @property
    def hint(self) -> dict[str, str]:
        return {"token keys": "mta(conv=none)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.queries < 1 or self.keys < 1 or self.keys % 2 == 0:
            raise OptionError(f"mta: queries={self.queries} and keys={self.keys}; at least 1, and keys odd")
        if self.block is not None and (self.block < 1 or heads.q % self.block):
            fits = [size for size in range(1, heads.q + 1) if heads.q % size == 0]
            raise OptionError(f"mta: {heads.q} heads do not fall into blocks of {self.block}; block may be {fits}")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> MTAProgram:
        return MTAProgram(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        h, convolved = before.q, len(_steps(self.conv))
        mixes = h * sum({"scores": h, "weights": self.block or h}[step] for step in _steps(self.mix))
        kernels, kept = convolved * h * self.queries * self.keys, Fraction(convolved * (self.queries - 1) * h)
        return Cost(kernels + mixes, kept, pair_flops=2 * (kernels + mixes), windows=windows(after.keep, kept))


class MTAProgram(Program):
    def __init__(self, options: MTA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.back, self.keep, self.cross = options.queries - 1, heads.keep or 0, site.cross  # keep 0: all
        self.kernels, self.mixes = nn.ParameterDict(), nn.ParameterDict()
        for step in _steps(options.conv):
            kernel = torch.zeros(heads.q, options.queries, options.keys)
            kernel[:, -1, options.keys // 2] = 1.0
            self.kernels[step] = kernel
            if self.back:
                self.states = {**self.states, f"mta {step}": State((heads.q, self.back, -1))}  # as many as keys
        for step in _steps(options.mix):
            block = options.block or heads.q if step == "weights" else heads.q
            self.mixes[step] = torch.eye(block).repeat(heads.q // block, 1, 1)
        self.halo = self.back * len(self.kernels)

    def before(self, scores: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        if "scores" in self.kernels:
            scores = self._convolve(scores, "scores", visible, rows, flow)
        return self._mix(scores, "scores")

    def after(self, weights: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        if "weights" in self.kernels:
            weights = self._convolve(weights, "weights", visible, rows, flow).masked_fill(~visible, 0.0)
        return self._mix(weights, "weights")

    def _convolve(self, x: Tensor, step: str, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        kernel, name, t = self.kernels[step], f"mta {step}", x.shape[2]
        x = x.masked_fill(~visible, 0.0)
        if self.back:
            past = x.new_zeros(*x.shape[:2], self.back, x.shape[3])
            if rows.start == 0 and name in flow.state:
                assert flow.rows is not None
                old, new = flow.state[name], 0 if self.cross else flow.new.length
                first = flow.rows.axis.length - new - old.shape[3]  # what those rows saw, among the keys within reach
                past = F.pad(old, (first, x.shape[3] - first - old.shape[3]))
            x = torch.cat([past, x], 2)
            if rows.stop == flow.q.length:
                flow.new_state[name] = x[:, :, -self.back :, -self.keep :].clone()
        if t == 1:  # every tap asks what one query sees
            return _depthwise(x.masked_fill(~visible, 0.0), kernel)
        total = torch.zeros_like(x[:, :, :t])
        for tap, weights in enumerate(kernel.split(1, 1)):
            seen = x[:, :, tap : tap + t].masked_fill(~visible, 0.0)
            total = total + _depthwise(seen, weights)
        return total

    def _mix(self, x: Tensor, step: str) -> Tensor:
        if step not in self.mixes:
            return x
        mix = self.mixes[step]
        return (mix @ x.unflatten(1, (len(mix), -1)).flatten(3)).unflatten(3, x.shape[2:]).flatten(1, 2)


def _depthwise(x: Tensor, kernel: Tensor) -> Tensor:
    """`[B, H, t + rows - 1, S]` by `[H, rows, keys]` to `[B, H, t, S]`."""
    return F.conv2d(x, kernel[:, None], padding=(0, kernel.shape[2] // 2), groups=len(kernel))


def _steps(which: Steps) -> tuple[str, ...]:
    return {"both": ("scores", "weights"), "none": ()}.get(which, (which,))
