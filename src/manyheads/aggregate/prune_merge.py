"""The important tokens are kept, each other one joins the kept one that it is most like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Pooled, register_aggregator
from manyheads.aggregate.merger import Merger, MergerOptions, alike, in_order, means, rows_of, share_of
from manyheads.core.check import OptionError, check_whole
from manyheads.core.kernel import Call


@register_aggregator("token_prune_merge")
@dataclass(frozen=True)
class PruneMerge(MergerOptions):
    """The K = ceil(keep · N) tokens of most importance stay, and each other token joins the one of them that it is most
    like: j(t) = argmax_c cos(x_t, x_c), x_c ← Σ w_t x_t / Σ w_t over c and those that joined it. Order stays.

    Options:
        keep: share of tokens that stay. weights: w is the token's `importance`, its `similarity` to c (from 0 on; 1 for
            c), or its `size`. merge: without it the others are dropped. score: importance is the attention of the
            `class` token (number `of`) to a token, or the attention that a token has `received`, mean over queries.
        protect: tokens by number that stay and that nothing joins (default: the class token).
        proportional: attention behind it adds ln(size) to the scores of a key.
    cond: `[B, N]`, the importance, from 0 on (default: what tokens receive where x attends to itself in one head).

    ASSUMED, for the source says no more than that unimportant tokens are merged into similar important ones: scores,
    weights, and where it is done.

    Source: Bian et al. 2023, arXiv 2306.04897.
    """

    keep: float = 0.7
    weights: Literal["importance", "similarity", "size"] = "importance"
    merge: bool = True
    score: Literal["class", "received"] = "class"
    of: int = 0
    protect: tuple[int, ...] = (0,)
    proportional: bool = False

    def __post_init__(self) -> None:
        self.ask_share(keep=self.keep)
        self.ask(self.of >= 0, f"of={self.of} is no number of a token")
        self.ask_protect(self.protect)

    def build(self, width: int) -> PruneMerger:
        return PruneMerger(self, width)

    def reads(self, call: Call) -> Tensor:
        rows = slice(self.of, self.of + 1) if self.score == "class" else slice(None)
        return received(rows_of(call, rows), None if self.score == "class" else call.mask.q.valid)

    @classmethod
    def examples(cls) -> tuple[PruneMerge, ...]:
        return cls(weights="similarity", protect=()), cls(weights="size", keep=0.4), cls(merge=False)


def received(weights: Tensor, valid: Tensor | None = None) -> Tensor:
    """The attention `[B, S]` that keys receive, mean over heads and queries: of weights `[B, H, t, S]`.

    valid: bool `[B, t]`, which queries are tokens.
    """
    if valid is None:
        return weights.mean((1, 2))
    count = valid.sum(1).clamp_min(1)[:, None]
    return (weights.mean(1) * valid[..., None]).sum(1) / count


class PruneMerger(Merger):
    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        options, (rows, n) = self.options, x.shape[:2]
        if cond is None:
            scores = (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf)
            cond = received(scores.softmax(-1)[:, None], mask)
        if cond.shape != (rows, n):
            raise ValueError(f"token_prune_merge: cond is {list(cond.shape)}, an importance of each token {[rows, n]}")
        importance = torch.where(mask, cond, 0.0)
        if not bool((importance >= 0).all()):
            raise ValueError("token_prune_merge: an importance is a number from 0 on")
        own = self.kept(n).to(x.device) & mask
        free = mask & ~own
        count = share_of(free.sum(1), options.keep, up=True)
        order = importance.masked_fill(~free, -1.0).argsort(dim=1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(n, device=x.device).expand(rows, n))
        stays = free & (rank < count[:, None])
        similar = alike(x, x).masked_fill(~stays[:, None], -torch.inf)
        index = torch.arange(n, device=x.device)
        joined = similar.argmax(-1) if options.merge else torch.full_like(order, -1)
        leader = torch.where(own | stays, index, torch.where(free, joined, -1))
        weight = None
        if options.weights == "importance":
            weight = torch.where(own, 1.0, importance)
        elif options.weights == "similarity":
            near = similar.gather(2, leader.clamp_min(0)[..., None])[..., 0].clamp_min(0)
            weight = torch.where(own | stays, torch.ones_like(near), near)
        all_kept = len(options.protect) + int(share_of(n - len(options.protect), options.keep, up=True))
        return means(x, in_order(leader), all_kept, mask, size, weight)


class TwoScaleStem(nn.Module):
    """Patches at two scales, fused before the first layer: image `[B, C, h, w]` to tokens `[B, (h/p)·(w/p), D]`.

    y = [fine; up(coarse)] W (or fine + up(coarse)): fine patches of p pixels, coarse ones of `times` · p, each repeated
    over the fine ones in it. Positions are added behind it. ASSUMED, as in `PruneMerge`.
    """

    def __init__(
        self, dim: int, channels: int = 3, patch: int = 16, times: int = 2, fuse: Literal["concat", "add"] = "concat"
    ) -> None:
        super().__init__()
        check_whole(dim=dim, channels=channels, patch=patch)
        check_whole(2, times=times)
        if fuse not in ("concat", "add"):
            raise OptionError(f"fuse={fuse!r} is neither concat nor add")
        self.times, self.pixels = times, patch * times
        self.fine = nn.Conv2d(channels, dim, patch, patch)
        self.coarse = nn.Conv2d(channels, dim, self.pixels, self.pixels)
        self.fuse = nn.Linear(2 * dim, dim) if fuse == "concat" else None

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[-1] % self.pixels or image.shape[-2] % self.pixels:
            raise ValueError(f"an image of {[*image.shape[-2:]]} pixels is not in patches of {self.pixels}")
        fine, coarse = self.fine(image), F.interpolate(self.coarse(image), scale_factor=self.times)
        if self.fuse is None:
            return (fine + coarse).flatten(2).mT
        return self.fuse(torch.cat([fine, coarse], 1).flatten(2).mT)


__all__ = ["PruneMerge", "TwoScaleStem", "received"]
