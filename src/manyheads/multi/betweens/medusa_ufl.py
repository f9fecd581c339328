"""Each head reads the trunk through attention masks of its own, at several scales that it weighs by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.multi.between import Between, Each, Share, Views, as_map, from_map, norm_of, register_between


@register_between("medusa-ufl")
@dataclass(frozen=True, kw_only=True)
class MedusaUFL(Between):
    """Head t reads relu(BN(conv(Σ_s a_{t,s} ∘ U_{t,s}))), of features F_s `[B, C_s, h_s, w_s]`, s = 1..S, one a tap.

        P_{t,s} = sigmoid(conv(F_s)) ∘ conv'(F_s)              [B, C, h_s, w_s], without biases
        U_{t,s} = P_{t,s} at the finest scale, bilinear        [B, C, h, w]
        a_t     = softmax over s of conv1x1(concat_s U_{t,s})  [B, S, h, w]

    Heads share the trunk alone, so one may be added to a trunk that is frozen, and no other changes. With kernel=1 it
    reads tokens `[B, T, D]` too (scales are depths then) and rows; the head's own linear layer is the last 1x1.

    Options: taps, fine scales or coarse in any order; width C (default: the last tap's); kernel; scale_norm: `softmax`,
        or `sigmoid`, where scales do not compete; start: a bias of the masks' logits, 2.0 begins with masks near 0.88;
        none is the authors' line's. norm: BN, or none.

    ASSUMED: the paper's abstract names both attentions; their form here is that of the spatial attention usual in this
    line of work, and weights of scales a place.

    Source: Spencer, Bowden and Hadfield 2022, arXiv 2204.05698.
    """

    width: int | None = None
    kernel: int = 3
    scale_norm: Literal["softmax", "sigmoid"] = "softmax"
    start: float | None = None
    norm: Literal["batch", "none"] = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.width is None or self.width > 0, f"width={self.width}; at least 1")
        self.ask(self.kernel > 0 and self.kernel % 2 == 1, f"kernel={self.kernel}; an odd number, 3 or 1 usually")

    def build(self, widths: Sequence[int], names: Sequence[str]) -> MedusaViews:
        return MedusaViews(self, widths, names)


class Reader(nn.Module):
    """One head's attention."""

    def __init__(self, options: MedusaUFL, widths: Sequence[int], width: int) -> None:
        super().__init__()
        kernel = options.kernel

        def conv(before: int, bias: bool = False) -> nn.Conv2d:
            return nn.Conv2d(before, width, kernel, padding=kernel // 2, bias=bias)

        self.softmax = options.scale_norm == "softmax"
        self.masks = nn.ModuleList([conv(each, options.start is not None) for each in widths])
        self.values = nn.ModuleList([conv(each) for each in widths])
        self.scales = nn.Conv2d(len(widths) * width, len(widths), 1)
        self.last, self.norm = conv(width, True), norm_of(options.norm, width)
        if options.start is not None:
            for mask in self.masks:
                nn.init.constant_(cast(Tensor, mask.bias), options.start)

    def mix(self, features: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        """Σ_s a_s ∘ U_s."""
        parts = zip(features, self.masks, self.values, strict=True)
        masked = [mask(each).sigmoid() * value(each) for each, mask, value in parts]
        fine = torch.stack([_resized(each, size) for each in masked], 1)
        logits = self.scales(fine.flatten(1, 2))
        weights = logits.softmax(1) if self.softmax else logits.sigmoid()
        return (weights[:, :, None] * fine).sum(1)

    def forward(self, features: Sequence[Tensor], size: tuple[int, int]) -> Tensor:
        return F.relu(self.norm(self.last(self.mix(features, size))))


class MedusaViews(Views):
    def __init__(self, options: MedusaUFL, widths: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        self.options, self.widths, self.width = options, [*widths], options.width or widths[-1]
        self.readers = Each()
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.readers.put(name, Reader(self.options, self.widths, self.width))

    def keep(self, names: Sequence[str]) -> None:
        self.readers.keep(names)

    def like(self, features: Sequence[Tensor]) -> Tensor:
        return super().like([_finest(features)])

    def forward(
        self, features: Sequence[Tensor], names: list[str], share: Share, mask: Tensor | None
    ) -> dict[str, Tensor]:
        finest = _finest(features)
        size = tuple(as_map(finest, self.options.kernel, "medusa-ufl").shape[2:])
        shared = [share(each, names) for each in features]
        views = {}
        for name in names:
            mine = [as_map(each[name], self.options.kernel, "medusa-ufl") for each in shared]
            views[name] = from_map(self.readers.of(name)(mine, size), finest)
        return views


def _finest(features: Sequence[Tensor]) -> Tensor:
    return max(features, key=lambda each: each[0].numel() // each.shape[1 if each.dim() == 4 else -1])


def _resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size, mode="bilinear", align_corners=False)
