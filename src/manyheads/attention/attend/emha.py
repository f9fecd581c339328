"""Enhanced multi-head attention: every query head meets every key head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Program, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class EMHA(Part):
    """Scores of every query head i with every key head j, brought back to one map a head by two small networks.

    S_ij = q_i k_jᵀ · scale `[B, H·G, T, S]`. Inner: the G maps of a query head become one, by a hidden layer of `inner`
    maps with a ReLU between. Cross: the H maps become H again, by `cross`·H hidden maps that see all heads. Softmax and
    values as usual. The layers are convolutions along the keys of one query row; what the mask hides is set to zero
    before each of them, so neither later tokens nor padding leak through a kernel or a bias.

    Options:
        inner, cross: hidden maps a head; cross=0 is the efficient form: the inner hidden maps go straight to the H maps
            through one pointwise layer (the known code has inner=2 there). inner_kernel, cross_kernel: keys that a
            convolution spans, odd.
        start: `identity` keeps S_ij of head i's own key head and starts as the base layer exactly, which takes two
            hidden maps for each kept one (relu(z) - relu(-z) = z).

    Choices: the sizes of the paper's tables are not public; the default is its pointwise form, and the authors' later
    code has inner=2H, inner_kernel=7, cross=8, cross_kernel=3. Grouped key heads give H·G maps. A score bias is added
    after the networks, a soft cap acts before them. The last layer has no bias, which softmax would cancel. A known
    port mixes no heads in the cross network and has no softmax; that is not followed.

    Source: EIT: Enhanced Interactive Transformer 2022, arXiv 2212.10197.
    """

    name: ClassVar[str] = "emha"
    stage: ClassVar = "attend"
    paper: ClassVar[str] = "arXiv 2212.10197"
    slot: ClassVar[str | None] = "head mix"
    examples: ClassVar = (
        {},
        {"inner": 2, "inner_kernel": 5, "cross": 2, "cross_kernel": 3, "start": "identity"},
        {"inner": 2, "cross": 0},
    )

    inner: int = 8
    cross: int = 4
    inner_kernel: int = 1
    cross_kernel: int = 1
    start: Literal["random", "identity"] = "random"

    def __post_init__(self) -> None:
        for name, width in (("inner_kernel", self.inner_kernel), ("cross_kernel", self.cross_kernel)):
            if width < 1 or width % 2 == 0:
                raise OptionError(f"emha: {name}={width} has no middle; use {max(width - 1, 1)} or {max(width + 1, 3)}")
        least = 2 if self.start == "identity" else 1
        if self.inner < least or (self.cross and self.cross < least):
            raise OptionError(
                f"emha: inner={self.inner} and cross={self.cross} hidden maps a head; start={self.start} takes at "
                f"least {least} (or cross=0)"
            )

    @property
    def needs(self) -> frozenset[str]:
        wide = max(self.inner_kernel, self.cross_kernel) > 1
        beside = {"token keys", "adjacent keys"} if wide else set()
        return frozenset({"head keys", "one map", "plain scores"} | beside)

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "plain scores"})

    @property
    def hint(self) -> dict[str, str]:
        return {"token keys": "emha(inner_kernel=1, cross_kernel=1)"}

    def build(self, before: Heads, after: Heads, site: Site) -> EMHAProgram:
        return EMHAProgram(self, before.q, before.kv)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        h, g = before.q, before.kv
        weights, biases = h * self.inner * g * self.inner_kernel, h * self.inner
        if self.cross:
            weights += h * self.inner * self.inner_kernel + 2 * self.cross * h * h * self.cross_kernel
            biases += h + self.cross * h
        else:
            weights += h * h * self.inner
        return Cost(weights + biases, pair_flops=2 * (weights + h * (g - 1) * before.qk_width))


class EMHAProgram(Program):
    def __init__(self, options: EMHA, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.maps = max(kv_heads + options.inner, options.inner + 1, 1 + options.cross)
        near, far, hidden = options.inner_kernel, options.cross_kernel, heads * options.inner
        self.inner_in = _conv(heads * kv_heads, hidden, near, heads)
        self.inner_out = self.cross_in = None
        if options.cross:
            self.inner_out = _conv(hidden, heads, near, heads)
            self.cross_in = _conv(heads, heads * options.cross, far)
            hidden = heads * options.cross
        self.cross_out = _conv(hidden, heads, far if options.cross else 1, bias=False)
        if options.start == "identity":
            self._start_as_identity(heads)

    @torch.no_grad()
    def _start_as_identity(self, heads: int) -> None:
        """Two hidden maps carry the map to keep; what else is hidden counts for nothing yet."""
        h = torch.arange(heads)
        _split(self.inner_in, h, h // (heads // self.kv_heads))
        if self.inner_out is not None and self.cross_in is not None:
            _join(self.inner_out, h, torch.zeros_like(h))
            _split(self.cross_in, h, h)
        _join(self.cross_out, h, h * (self.cross_out.in_channels // heads))

    def scores(self, q: Tensor, k: Tensor, scale: float, flow: Flow) -> Tensor:
        rows = (q * scale).flatten(1, 2)[:, None] @ k.transpose(-1, -2)  # broadcast over key heads, no key is copied
        return rows.unflatten(2, q.shape[1:3]).transpose(1, 2).flatten(1, 2)

    def before(self, scores: Tensor, visible: Tensor, rows: slice, flow: Flow) -> Tensor:
        x = _apply(self.inner_in, scores, visible).relu_()
        if self.inner_out is not None and self.cross_in is not None:
            x = _apply(self.inner_out, x, visible)
            x = _apply(self.cross_in, x, visible).relu_()
            visible = visible.any(1, keepdim=True)  # these hidden maps are of no single head
        return _apply(self.cross_out, x, visible)


def _conv(inputs: int, outputs: int, kernel: int, groups: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, (1, kernel), padding=(0, kernel // 2), groups=groups, bias=bias)


def _apply(conv: nn.Conv2d, maps: Tensor, visible: Tensor) -> Tensor:
    """A convolution that reads zero where the mask hides.

    maps `[B, H·m, t, S]`, m of them to a head, visible `[B or 1, H or 1, t, S]`. One key wide, it reads no other cell
    than its own, which the softmax hides.
    """
    if conv.kernel_size[1] == 1:
        return _pointwise(conv, maps)
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(maps.shape[1] // visible.shape[1], 1)
    return conv(maps.masked_fill(~visible, 0.0))


def _pointwise(conv: nn.Conv2d, maps: Tensor) -> Tensor:
    """A convolution one cell wide, as one product for each sequence and group (several times faster on a CPU)."""
    weight = conv.weight.flatten(1).unflatten(0, (conv.groups, -1)).repeat(len(maps), 1, 1)
    x = maps.unflatten(1, (conv.groups, -1)).flatten(0, 1).flatten(2)
    if conv.bias is None:
        y = weight @ x
    else:
        y = torch.baddbmm(conv.bias.view(conv.groups, -1, 1).repeat(len(maps), 1, 1), weight, x)
    return y.view(len(maps), -1, *maps.shape[2:])


def _split(conv: nn.Conv2d, h: Tensor, source: Tensor) -> None:
    """The first two hidden maps of head h become ± the input map `source[h]` (of its group)."""
    first, middle = h * (conv.out_channels // len(h)), conv.kernel_size[1] // 2
    assert conv.bias is not None
    for output, sign in ((first, 1.0), (first + 1, -1.0)):
        conv.weight[output], conv.bias[output] = 0.0, 0.0
        conv.weight[output, source, 0, middle] = sign


def _join(conv: nn.Conv2d, h: Tensor, first: Tensor) -> None:
    """Map h becomes the difference of the two hidden maps from `first[h]` on (of its group)."""
    for parameter in conv.parameters():
        parameter.zero_()
    for source, sign in ((first, 1.0), (first + 1, -1.0)):
        conv.weight[h, source, 0, conv.kernel_size[1] // 2] = sign
