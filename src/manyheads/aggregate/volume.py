"""Two dense feature maps compared by head, and the volume of their similarities pooled to one score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.core.check import OptionError, check_whole


@dataclass(frozen=True)
class Volume:
    """How a volume of similarities `[…, K, y, x, f, t]` becomes a score.

    By default s ← max_k s, max over places (y, x), mean over f, and mean over the steps t that are there. Every step is
    asked for its best place, so that this is late interaction of several heads.

    Args:
        heads: how many heads the channels are split into. over_heads: `max` or `sum`, elementwise before the rest, or
            `last`: the maximum of what each head gives.
        space, time: `max` or `mean`. paired: half of (space max, time mean) and half of (time max, space mean).
        clamp: similarities below 0 are 0.

    Source: Hamilton et al. 2024, arXiv 2406.05629.
    """

    heads: int = 1
    over_heads: Literal["max", "sum", "last"] = "max"
    space: Literal["max", "mean"] = "max"
    time: Literal["max", "mean"] = "mean"
    paired: bool = False
    clamp: bool = False

    def __post_init__(self) -> None:
        check_whole(heads=self.heads)
        kinds = {"over_heads": ("max", "sum", "last"), "space": ("max", "mean"), "time": ("max", "mean")}
        for what, allowed in kinds.items():
            if getattr(self, what) not in allowed:
                raise OptionError(f"{what}={getattr(self, what)!r} is none of {', '.join(allowed)}")

    def of(self, audio: Tensor, image: Tensor, classes: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """s[b, v, k, y, x, f, t] = ⟨A[b, k, :, f, t], V[v, k, :, y, x]⟩, float32 or wider, without norms or a scale.

        Args:
            audio: `[B, K·c, F, T]`. image: `[V, K·c, h, w]`. classes: `[B, K·c]` and `[V, K·c]`, whose product by head
                is added everywhere.
        """
        if audio.dim() != 4 or image.dim() != 4 or audio.shape[1] != image.shape[1] or audio.shape[1] % self.heads:
            raise ValueError(
                f"a volume of {self.heads} heads is of [B, D, F, T] and [V, D, h, w], D a multiple of it; "
                f"not {list(audio.shape)} and {list(image.shape)}"
            )
        a, v = (self._split(t) for t in (audio, image))
        s = torch.einsum("bkcft,vkcyx->bvkyxft", a, v)
        if classes is not None:
            a, v = (self._split(t) for t in classes)
            s = s + torch.einsum("bkc,vkc->bvk", a, v)[..., None, None, None, None]
        return s.clamp_min(0) if self.clamp else s

    def pool(self, s: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[B, V]` of a volume `[B, V, K, y, x, f, t]`. mask: bool `[B, T]`, steps that are there (of none: 0)."""
        if s.dim() != 7 or 0 in s.shape[2:]:
            raise ValueError(f"a volume is [B, V, heads, y, x, f, t], one each at least, not {list(s.shape)}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (len(s), s.shape[-1])):
            raise ValueError(f"mask is bool {[len(s), s.shape[-1]]}, not {mask.dtype} {list(mask.shape)}")
        if mask is None:
            mask = torch.ones(len(s), s.shape[-1], dtype=torch.bool, device=s.device)
        s = torch.where(mask[:, None, None, None, None, None], s, 0.0)
        if self.over_heads != "last":
            s = (s.amax(2) if self.over_heads == "max" else s.sum(2)).unsqueeze(2)
        ways = [("max", "mean"), ("mean", "max")] if self.paired else [(self.space, self.time)]
        each = [self._reduced(s, mask, *way) for way in ways]
        return (sum(each[1:], each[0]) / len(each)).amax(2)

    def score(
        self, audio: Tensor, image: Tensor, mask: Tensor | None = None, *,
        classes: tuple[Tensor, Tensor] | None = None, chunk: int | None = None,
    ) -> Tensor:  # fmt: skip
        """`pool(of(…))`, `[B, V]`; chunk: of so many images at a time, each with a volume of its own."""
        step = max(1, len(image)) if chunk is None else chunk
        check_whole(chunk=step)

        def part(first: int, last: int) -> Tensor:
            some = None if classes is None else (classes[0], classes[1][first:last])
            return self.pool(self.of(audio, image[first:last], some), mask)

        return torch.cat([part(at, at + step) for at in range(0, max(1, len(image)), step)], 1)

    def heat(self, s: Tensor, span: slice = slice(None)) -> Tensor:
        """Where a span of steps is heard, by head: `[…, K, y, x]`, the mean over it of `[…, K, y, x, f, t]`."""
        return s[..., span].mean((-1, -2))

    def _split(self, t: Tensor) -> Tensor:
        return t.to(torch.promote_types(t.dtype, torch.float32)).unflatten(1, (self.heads, -1))

    def _reduced(self, s: Tensor, mask: Tensor, space: str, time: str) -> Tensor:
        s = (s.amax((3, 4)) if space == "max" else s.mean((3, 4))).mean(3)  # [B, V, K, t]
        there = mask[:, None, None]
        if time == "mean":
            return s.sum(-1) / mask.sum(-1).clamp_min(1)[:, None, None]
        return s.masked_fill(~there, -torch.inf).amax(-1).masked_fill(~mask.any(-1)[:, None, None], 0.0)


class Calibration(nn.Module):
    """S' = a S - mean(a S), a = exp(log a) in [0.01, 100], 1 at the start: scores `[B, V]` as logits of a match."""

    def __init__(self) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.zeros(()))

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores * self.log_a.clamp(math.log(0.01), math.log(100.0)).exp()
        return scores - scores.mean()

    def penalty(self, least: float = 1.0) -> Tensor:
        """max(0, log least - log a)²: a is not to fall below."""
        return (math.log(least) - self.log_a).clamp_min(0).square()


def specialisation(s: Tensor) -> Tensor:
    """Mean over pairs of heads of |s_i| |s_j|, of a volume with heads at dimension 2: 0 where one at most answers."""
    heads, sizes = s.shape[2], s.abs()
    if heads < 2:
        return s.new_zeros(())
    pairs = (sizes.sum(2).square() - sizes.square().sum(2)) / (heads * (heads - 1))
    return pairs.mean()


def pressure(s: Tensor) -> Tensor:
    """Mean of min(s, 0)², over the similarities of feature pairs drawn at random, say."""
    return s.clamp_max(0).square().mean()


def roughness(s: Tensor) -> Tensor:
    """Mean of (s_{t+1} - s_t)², over a volume `[…, t]`."""
    return s.diff(dim=-1).square().mean()


def loudness(s: Tensor, silent: Tensor) -> Tensor:
    """Mean of |s| over the steps that are silent, bool `[B, T]`, of a volume `[B, …, t]`; 0 of none."""
    at = silent.reshape(len(s), *[1] * (s.dim() - 2), -1).expand_as(s)
    return torch.where(at, s.abs(), 0.0).sum() / at.sum().clamp_min(1)


__all__ = ["Calibration", "Volume", "loudness", "pressure", "roughness", "specialisation"]
