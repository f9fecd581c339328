"""Heads for what people know of items: one for each category and for each stretch of the future, on one sequence trunk.

A block is x + SiLU(W x + b), W and b zero at first, so every head starts as the trunk itself. Of states h `[B, L, D]`
heads make z `[B, L, heads, D]`; scores of items are cosines of z and their embeddings. Head (c, s) learns only where
the item that comes p + 1 places later is of category c, p in segment s of the window:

    L = Σ_c π_c Σ_p λ_p · mean over such places of CE([z·e⁺, z·e⁻…] exp(scale)),   λ_p = 0.99^p / Σ 0.99^p

Choices: a category without a target in the batch adds exactly 0 (the authors' code trains it at random places); stacked
blocks have weights of their own (there one block is repeated); W stays zero at the start, as the paper means it.
Merging candidates by the highest score over heads is ASSUMED. Left out: an embedding of the segment, a bottleneck, and
the switch that predicts which categories will come, which is `multi-label(labels=C)` on h.

Source: Don't Waste It (arXiv 2511.10492).
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import OptionError, check_whole

COMPOSITIONS = ("additive", "multiplicative", "hierarchical")


class _Blocks(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class PriorHeads(nn.Module):
    """h `[B, L, dim]` to `[B, L, heads, dim]`, and what each head is for.

    Args:
        categories: C, segments: S of a `window` of P places, which S divides.
        compose: additive: C heads and S heads side by side. multiplicative: one of each pair. hierarchical: one of each
            pair, Seg(Cat(h)); shared: Seg is one network for all categories. layers: blocks of a network.
    """

    def __init__(
        self, dim: int, categories: int, window: int = 1, segments: int = 1, *, compose: str = "multiplicative",
        shared: bool = False, layers: int = 1, scale: float = 20.0,
    ) -> None:  # fmt: skip
        check_whole(dim=dim, categories=categories, window=window, segments=segments, layers=layers)
        if compose not in COMPOSITIONS:
            raise OptionError(f"compose={compose!r} is none of {', '.join(COMPOSITIONS)}")
        if window % segments or (shared and compose != "hierarchical") or not scale > 0:
            raise OptionError(
                f"segments={segments} must divide window={window}; shared goes with compose='hierarchical'; "
                f"scale={scale} is above 0"
            )
        super().__init__()
        self.categories, self.segments, self.window, self.compose = categories, segments, window, compose
        count = {"additive": categories + segments, "multiplicative": categories * segments, "hierarchical": categories}
        self.nets = nn.ModuleList(_Blocks(dim, layers) for _ in range(count[compose]))
        seconds = 0 if compose != "hierarchical" else segments if shared else categories * segments
        self.seconds = nn.ModuleList(_Blocks(dim, layers) for _ in range(seconds))
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    @property
    def heads(self) -> list[tuple[int | None, int | None]]:
        """Category and segment of each head; None: any. Segment by segment, categories within."""
        categories, segments = range(self.categories), range(self.segments)
        if self.compose == "additive":
            return [*((c, None) for c in categories), *((None, s) for s in segments)]
        return [(c, s) for s in segments for c in categories]

    def forward(self, h: Tensor) -> Tensor:
        made = [net(h) for net in self.nets]
        if self.compose == "hierarchical":
            own = len(self.seconds) == self.segments * self.categories
            seconds = cast("list[_Blocks]", list(self.seconds))
            made = [
                seconds[s * self.categories + c if own else s](made[c])
                for s in range(self.segments) for c in range(self.categories)
            ]  # fmt: skip
        return torch.stack(made, 2)

    def loss(
        self, h: Tensor, items: Tensor, embeddings: Tensor, belongs: Tensor, *, negatives: int = 64,
        decay: float = 0.99, balanced: bool = False, alike: float = 0.99, generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """L; halved where heads of categories and of segments stand side by side.

        Args:
            h: of the sequences whose items are `items` `[B, L]`, -1 on padding. embeddings: `[items, dim]`.
            belongs: bool `[items, C]`; an item may be of several categories.
            negatives: drawn of the head's category, and dropped where more alike to the positive than `alike`.
            balanced: π_c is 1/C; else the share of c among the items of the batch.
        """
        if h.shape[:2] != items.shape or belongs.shape != (len(embeddings), self.categories):
            raise ValueError(
                f"h {list(h.shape)} of items {list(items.shape)}; belongs {list(belongs.shape)} of "
                f"{len(embeddings)} items in {self.categories} categories"
            )
        z, e = F.normalize(self(h), dim=-1), F.normalize(embeddings, dim=-1)
        present = items >= 0
        often = belongs[items.clamp_min(0)][present].to(z.dtype).mean(0)
        often = torch.full_like(often, 1 / self.categories) if balanced else often / often.sum().clamp_min(1e-12)
        decays = decay ** torch.arange(self.window, dtype=z.dtype, device=z.device)
        decays = decays / decays.sum()
        total = z.new_zeros(())
        for place, (category, segment) in enumerate(self.heads):
            pool = torch.arange(len(e), device=e.device) if category is None else belongs[:, category].nonzero()[:, 0]
            each = self.window // self.segments
            offsets = range(self.window) if segment is None else range(segment * each, (segment + 1) * each)
            for p in offsets:
                wanted = items[:, 1 + p :]
                known = (wanted >= 0) & present[:, : wanted.shape[1]]
                if category is not None:
                    known = known & belongs[wanted.clamp_min(0), category]
                if not bool(known.any()):
                    continue
                said, true = z[:, : wanted.shape[1], place][known], wanted[known]
                drawn = torch.randint(len(pool), (len(true), negatives), generator=generator).to(pool.device)
                drawn = pool[drawn]
                right = (said * e[true]).sum(-1, keepdim=True)
                wrong = torch.einsum("nd,nkd->nk", said, e[drawn])
                close = torch.einsum("nd,nkd->nk", e[true], e[drawn]) > alike
                logits = torch.cat([right, wrong.masked_fill(close | (drawn == true[:, None]), -math.inf)], -1)
                nll = -(logits * self.log_scale.exp()).log_softmax(-1)[:, 0].mean()
                total = total + (1 if category is None else often[category]) * decays[p] * nll
        return total / 2 if self.compose == "additive" else total

    def scores(self, h: Tensor, embeddings: Tensor, belongs: Tensor, on: Tensor | None = None) -> Tensor:
        """Cosines `[B, heads, items]` of states h `[B, dim]`, -inf for items of other categories and heads not `on`
        (bool `[B, heads]`); their greatest over heads ranks items."""
        found = torch.einsum(
            "bhd,nd->bhn", F.normalize(self(h[:, None])[:, 0], dim=-1), F.normalize(embeddings, dim=-1)
        )
        everything = torch.ones(len(embeddings), dtype=torch.bool, device=h.device)
        own = torch.stack([everything if c is None else belongs[:, c] for c, _ in self.heads])
        found = found.masked_fill(~own, -math.inf)
        return found if on is None else found.masked_fill(~on[..., None], -math.inf)
