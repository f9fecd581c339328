"""Heads tell each other what they found in the trunk's features, and read the result through masks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.multi.between import Between, Each, Share, Views, as_map, from_map, norm_of, register_between


@register_between("ati-net")
@dataclass(frozen=True, kw_only=True)
class ATINet(Between):
    """T heads exchange features at the bottleneck z `[B, C, h, w]`, then head t reads m_t ∘ z'.

        D_t = 1x1 convs C → widths, each with BN and ReLU
        R_t = D_t + Σ_{a ≠ t} sigmoid(conv_at(D_a)) ∘ conv'_at(D_a)       convs for every ordered pair
        z'  = mean_t Q_t(R_t), Q_t 1x1 convs back to C, or z + this
        m_t = sigmoid(BN(conv1x1(relu(BN(conv1x1(z))))))

    Whatever heads are asked for, all of them take part in z'; a loss of one reaches D_a of another through R.
    With kernel=1 it reads tokens `[B, T, D]` and rows too.

    Options: widths, downwards. kernel: of the pairs' convs. masks: False lets heads read z' itself. residual: z + z'.
        legacy: heads read z, as in the authors' code, which computes z' and leaves it. norm: BN, or none.

    Choices: the paper's mask chain runs beside each stage of a SegNet; here it is the one stage behind the bottleneck.
    ASSUMED: z' in place of z, not added to it.

    Source: Sinodinos and Armanfard 2022, arXiv 2201.10649; masks: Liu et al. 2019, arXiv 1803.10704 (MTAN).
    """

    widths: tuple[int, ...] = (256, 128, 64)
    kernel: int = 3
    masks: bool = True
    residual: bool = False
    legacy: bool = False
    norm: Literal["batch", "none"] = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "widths", tuple(self.widths))
        self.ask(bool(self.widths) and min(self.widths) > 0, f"widths={list(self.widths)}; at least one, from 1 on")
        self.ask(self.kernel > 0 and self.kernel % 2 == 1, f"kernel={self.kernel}; an odd number, 3 or 1 usually")
        self.ask(len(self.taps) < 2, f"taps={list(self.taps)}; it reads one")
        self.ask(not (self.legacy and self.residual), "legacy leaves z' out, so residual=true adds nothing")

    def build(self, widths: Sequence[int], names: Sequence[str]) -> ATIViews:
        return ATIViews(self, widths[0], names)


def layers(options: ATINet, widths: Sequence[int]) -> nn.Sequential:
    """1x1 convs with BN and ReLU."""
    blocks: list[nn.Module] = []
    for before, after in pairwise(widths):
        blocks += [nn.Conv2d(before, after, 1), norm_of(options.norm, after), nn.ReLU()]
    return nn.Sequential(*blocks)


class Task(nn.Module):
    """What is one head's own. heard: for each other head a gate and a value."""

    def __init__(self, options: ATINet, width: int) -> None:
        super().__init__()
        self.options = options
        self.down = layers(options, [width, *options.widths])
        self.heard = Each()
        self.up = layers(options, [*reversed(options.widths), width])
        self.mask = None
        if options.masks:
            last = [nn.Conv2d(width, width, 1), norm_of(options.norm, width), nn.Sigmoid()]
            self.mask = nn.Sequential(*layers(options, [width, width]), *last)

    def hear(self, other: str) -> None:
        narrow, kernel = self.options.widths[-1], self.options.kernel
        convs = [nn.Conv2d(narrow, narrow, kernel, padding=kernel // 2) for _ in range(2)]
        self.heard.put(other, nn.ModuleDict({"gate": convs[0], "value": convs[1]}))


class ATIViews(Views):
    apart: ClassVar[bool] = False

    def __init__(self, options: ATINet, width: int, names: Sequence[str]) -> None:
        super().__init__()
        self.options, self.width, self.tasks = options, width, Each()
        self.names: list[str] = []
        for name in names:
            self.add(name)

    def task(self, name: str) -> Task:
        found = self.tasks.of(name)
        assert isinstance(found, Task)
        return found

    def add(self, name: str) -> None:
        """It speaks to all others, so their outputs change."""
        self.tasks.put(name, Task(self.options, self.width))
        for other in self.names:
            self.task(name).hear(other)
            self.task(other).hear(name)
        self.names.append(name)

    def keep(self, names: Sequence[str]) -> None:
        """All stay: each has a part in what the others read."""

    def exchanged(self, z: Tensor) -> dict[str, Tensor]:
        """R_t `[B, widths[-1], h, w]` of all heads."""
        first = {name: self.task(name).down(z) for name in self.names}
        found = {}
        for name, own in first.items():
            for other in self.names:
                if other != name:
                    pair: dict[str, nn.Module] = self.task(name).heard.of(other)  # type: ignore[assignment]
                    own = own + pair["gate"](first[other]).sigmoid() * pair["value"](first[other])
            found[name] = own
        return found

    def forward(
        self, features: Sequence[Tensor], names: list[str], share: Share, mask: Tensor | None
    ) -> dict[str, Tensor]:
        z = as_map(features[0], self.options.kernel, "ati-net")
        mixed = z
        if not self.options.legacy:
            made = {name: self.task(name).up(each) for name, each in self.exchanged(z).items()}
            mixed = torch.stack([*made.values()]).mean(0)
            mixed = z + mixed if self.options.residual else mixed
        views = {}
        for name, each in share(mixed, names).items():
            own = self.task(name).mask
            views[name] = from_map(each if own is None else own(z) * each, features[0])
        return views
