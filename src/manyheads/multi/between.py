"""The contract of what stands between a trunk and its heads: features to one feature for each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from manyheads.core.key import key_of
from manyheads.core.kinds import Kinds, Named
from manyheads.multi.pool import pooled
from manyheads.multi.tree import named

Share = Callable[[Tensor, list[str]], dict[str, Tensor]]
"""What heads share up to here, for each of these heads: the place where a balance lets their gradients meet."""


@dataclass(frozen=True, kw_only=True)
class Between(Named):
    """Options of what is between; a kind is one file in `multi/betweens`, and `build` makes its `Views`.

    taps: submodules of the trunk that are read (default: the one that heads read).
    """

    unnamed: ClassVar[int] = 0

    taps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(named(self.taps)))

    def build(self, widths: Sequence[int], names: Sequence[str]) -> Views:
        """The module, for features of these widths, one a tap, and heads of these names."""
        raise NotImplementedError


class Views(nn.Module):
    """Features of the trunk, one a tap, as each head reads them.

    width: of what heads read. apart: no head's view depends on what belongs to another head.
    """

    width: int
    apart: ClassVar[bool] = True

    def forward(
        self, features: Sequence[Tensor], names: list[str], share: Share, mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Views of these heads alone; nothing else runs.

        features: rows `[B, D]`, tokens `[B, T, D]` or maps `[B, D, h, w]`. mask: bool `[B, T]`, False on padding.
        """
        raise NotImplementedError

    def like(self, features: Sequence[Tensor]) -> Tensor:
        """Something shaped as a view is; it holds nothing."""
        first = features[0]
        shape = [*first.shape]
        shape[channels(first)] = self.width
        return first.new_zeros(()).expand(shape)

    def penalty(self, shares: Mapping[str, float]) -> Tensor | float:
        """What is added to the loss. shares: of heads with labels, what part of those of the whole step is here."""
        return 0.0

    def add(self, name: str) -> None:
        """Make what one more head needs."""
        raise NotImplementedError

    def keep(self, names: Sequence[str]) -> None:
        """Forget what other heads than these need."""
        raise NotImplementedError


class Each(nn.ModuleDict):
    """A module for each head; names may be any text."""

    def of(self, name: str) -> nn.Module:
        return self[key_of(name)]

    def put(self, name: str, module: nn.Module) -> None:
        self[key_of(name)] = module

    def keep(self, names: Sequence[str]) -> None:
        safe = {key_of(name) for name in names}
        for key in [key for key in self if key not in safe]:
            del self[key]


def channels(features: Tensor) -> int:
    """The dimension of channels: the last, and of maps the second."""
    return 1 if features.dim() == 4 else -1


def as_map(features: Tensor, kernel: int, who: str) -> Tensor:
    """Rows `[B, D]` and tokens `[B, T, D]` as maps of one column, `[B, D, T, 1]`; maps as they are.

    Raises:
        ValueError: a kernel wider than 1 for what has no neighbours.
    """
    if features.dim() == 4:
        return features
    if kernel > 1:
        raise ValueError(
            f"{who}: kernel={kernel} reads maps [B, C, h, w], not {list(features.shape)}; kernel=1 would fit"
        )
    return features[:, :, None, None] if features.dim() == 2 else features.mT[..., None]


def from_map(made: Tensor, features: Tensor) -> Tensor:
    """Back to the form that the features had."""
    if features.dim() == 4:
        return made
    return made[:, :, 0, 0] if features.dim() == 2 else made[..., 0].mT


def norm_of(kind: Literal["batch", "none"], width: int) -> nn.Module:
    """Of a map. `batch` lets rows of a batch see each other in training."""
    return nn.BatchNorm2d(width) if kind == "batch" else nn.Identity()


def pooled_rows(features: Tensor, mask: Tensor | None) -> Tensor:
    """`[B, D]`: rows as they are, else means over tokens that are no padding, or over a map."""
    if features.dim() == 4:
        return features.mean((2, 3))
    return features if features.dim() == 2 else pooled(features, "mean", mask)


KINDS = Kinds(Between, "{} between trunk and heads")
register_between, find_between, read_between = KINDS.register, KINDS.find, KINDS.read


__all__ = ["Between", "Each", "Share", "Views", "find_between", "read_between", "register_between"]
