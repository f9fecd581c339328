"""Equal attention for every part of a long text, in the rows of a sentence model that make its embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.core.kernel import Call
from manyheads.core.mask import Axis, cols_of, rows_of
from manyheads.inspect.edit import Edit, Editing, check_maps, standing_by
from manyheads.inspect.layers import chosen
from manyheads.inspect.look import Look
from manyheads.inspect.measures.table import Measure

Pool = Literal["first", "last", "mean"]
Isolate = Literal["none", "first", "last", "both"]
Share = Literal["equal", "original"] | float
ISOLATED: dict[str, Isolate] = {"first": "first", "last": "both", "mean": "none"}
"""Which end tokens stand apart from blocks, by how a model pools."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A text in blocks of its tokens, padding left out.

    of `[B, S]`: the block of each token, -1 for padding and tokens that stand apart. first, last `[B, S]`: those.
    count `[B]`: of blocks. rows `[B, S]`: the tokens whose states make the embedding.
    """

    of: Tensor
    first: Tensor
    last: Tensor
    count: Tensor
    rows: Tensor

    @classmethod
    def cut(cls, axis: Axis, size: int, pool: Pool, isolate: Isolate) -> Blocks:
        valid = axis.validity
        place, length = valid.long().cumsum(-1) - 1, valid.sum(-1, keepdim=True)
        first, last = valid & (place == 0), valid & (place == length - 1)
        rows = {"first": first, "last": last, "mean": valid}[pool]
        first, last = (first & (isolate in ("first", "both"))), (last & (isolate in ("last", "both")))
        last = last & ~first
        content = valid & ~first & ~last
        at = content.long().cumsum(-1) - 1
        of = torch.where(content, at // size, -1)
        return cls(of, first, last, of.amax(-1) + 1, rows)


def equalise(weights: Tensor, blocks: Blocks, first: Share = "original", last: Share = "equal") -> Tensor:
    """Rows `[B, H, t, S]` in which every block has the same mass, shares within a block as they were.

    A'_s = A_s / Σ_{u ∈ block(s)} A_u · r / (blocks with mass), with what the tokens that stand apart leave,
    r = 1 - Σ of their shares: `equal`, 1 / n with n blocks and such tokens in all; `original`, A_s; or a number. A row
    without mass on any block stays as it is.
    """
    content = cols_of(blocks.of >= 0)
    at = cols_of(blocks.of.clamp_min(0)).expand_as(weights)
    apart = {"first": (blocks.first, first), "last": (blocks.last, last)}
    n = blocks.count + sum(where.sum(-1) for where, _ in apart.values())
    mass = weights.new_zeros(*weights.shape[:3], max(1, int(blocks.count.max())))
    mass = mass.scatter_add(-1, at, weights * content)
    own = mass.gather(-1, at)
    within = torch.where(content & (own > 0), weights / own.clamp_min(torch.finfo(own.dtype).tiny), 0.0)
    fixed = torch.zeros_like(weights)
    for where, share in apart.values():
        if share == "original":
            value = weights
        elif share == "equal":
            value = (1 / n)[:, None, None, None].to(weights)
        else:
            value = torch.as_tensor(share).to(weights)
        fixed = torch.where(cols_of(where), value, fixed)
    rest = (1 - fixed.sum(-1, keepdim=True)).clamp_min(0)
    full = (mass > 0).sum(-1, keepdim=True)
    new = within * rest / full.clamp_min(1) + fixed
    return torch.where(full > 0, new / new.sum(-1, keepdim=True).clamp_min(torch.finfo(new.dtype).tiny), weights)


@dataclass(frozen=True, eq=False)
class Calibrated(Edit):
    """A ← λ A' + (1 - λ) A in some rows."""

    blocks: Blocks
    rows: Tensor
    blend: float
    first: Share
    last: Share

    def __str__(self) -> str:
        return "calibrated attention"

    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor:
        new = equalise(weights, self.blocks, self.first, self.last)
        return torch.where(rows_of(self.rows[:, rows]), self.blend * new + (1 - self.blend) * weights, weights)


@contextmanager
def calibrate(
    model: nn.Module, layers: int | Iterable[int] | None = None, *, pool: Pool = "first", block: int = 128,
    blend: float = 0.5, isolate: Isolate | None = None, first: Share = "original", last: Share = "equal",
) -> Iterator[None]:  # fmt: skip
    """Let late parts of a text count as much as early ones in its embedding, while the model runs.

    >>> with calibrate(model, pool="mean"):
    ...     states = model(**texts).last_hidden_state

    In the rows that make the embedding, A ← λ A' + (1 - λ) A, with A' of `equalise`: every block of tokens has the same
    mass. All other rows are what they were, and so are texts that are no longer than one block.

    Args:
        layers: by number; default the last half of them.
        pool: what the embedding is made of: the `first` token (CLS), the `last` one, or the `mean` of all (in a model
            whose tokens all see each other).
        block: tokens in one; the last may have fewer. blend: λ in [0, 1].
        isolate: end tokens that are in no block; default the first one for `first`, both for `last`, none for `mean`.
        first, last: what they get: `equal`, as much as a block; `original`, what they had; or a share in [0, 1).

    Raises:
        ValueError: options that do not fit, layers without one map a head, a text that is not read whole.

    Source: arXiv 2601.16934 and 2606.02737.
    """
    _check(pool, block, blend, isolate, first, last)
    some = chosen(model, layers)
    if layers is None:
        some = some[len(some) // 2 :]
    check_maps(some)
    aside = ISOLATED[pool] if isolate is None else isolate

    def make(call: Call) -> Edit | None:
        q, k = call.mask.q, call.mask.k
        if q.length != k.length:
            raise ValueError(
                f"calibration reads a text whole, not {q.length} queries with {k.length} keys; choose layers of "
                "self-attention and pass the text without a cache"
            )
        blocks = Blocks.cut(k, block, pool, aside)
        rows = blocks.rows & (blocks.count > 1)[:, None]
        if not rows.any() or not blend:
            return None
        if pool == "mean" and not (call.mask.tile() | ~cols_of(k.validity) | ~rows_of(k.validity)).all():
            raise ValueError(
                "the mean of all rows is calibrated where all tokens see each other; here pool='last' fits"
            )
        return Calibrated(blocks, rows, blend, first, last)

    with standing_by(some, lambda layer: Editing(layer, make)):
        yield


def _check(pool: str, block: int, blend: float, isolate: str | None, first: Share, last: Share) -> None:
    check_whole(block=block)
    if pool not in get_args(Pool):
        raise ValueError(f"pool={pool!r}; an embedding is made of the {', '.join(get_args(Pool))}")
    if isolate is not None and isolate not in get_args(Isolate):
        raise ValueError(f"isolate={isolate!r}; one of {', '.join(get_args(Isolate))}")
    if not 0 <= blend <= 1:
        raise ValueError(f"blend={blend}; between 0 (nothing) and 1 (equal mass)")
    given = [x for x in (first, last) if not isinstance(x, str)]
    words = [x for x in (first, last) if isinstance(x, str) and x not in ("equal", "original")]
    if words or any(x < 0 for x in given) or sum(given) >= 1:
        raise ValueError(
            f"first={first!r}, last={last!r}; equal, original, or numbers from 0 on that sum to less than 1"
        )


def block_mass(block: int = 128, blocks: int = 4, pool: Pool = "first", isolate: Isolate | None = None) -> Measure:
    """A measure `[B, H, T, blocks]`: how much the rows that make the embedding give to each of the first blocks.

    Undefined for blocks that a text does not have, and for all other rows.
    """
    _check(pool, block, 0.5, isolate, "original", "equal")
    check_whole(blocks=blocks)
    aside = ISOLATED[pool] if isolate is None else isolate

    def mass(look: Look) -> Tensor:
        cut = Blocks.cut(look.mask.k, block, pool, aside)
        each = [look.mass(lambda q, k, n=n: cols_of(cut.of == n)) for n in range(blocks)]
        rows = look.axis.time[:, :, None] == look.mask.k.time[:, None, :]
        rows = (rows & cut.rows[:, None, :]).any(-1)
        return torch.stack(each, -1).masked_fill(~rows[:, None, :, None], torch.nan)

    return mass


@dataclass(frozen=True, eq=False)
class SegmentBias:
    """How well each part of a document is found again in its embedding.

    reflection `[N, k, k]`: cos of document n in its p-th order with the segment at place s. by_place `[k]`: the mean of
    each place. slope: of a line through it, a place; below 0 where early parts count more. first_minus_last: of its
    ends. by_label: the mean of each label (a language, say), over all places.
    """

    reflection: Tensor
    by_place: Tensor
    by_label: dict[str, float]

    @property
    def slope(self) -> float:
        place = torch.arange(len(self.by_place), dtype=torch.float64)
        place = place - place.mean()
        return float(place @ self.by_place / place.square().sum())

    @property
    def first_minus_last(self) -> float:
        return float(self.by_place[0] - self.by_place[-1])


def segment_bias(
    embed: Callable[[list[str]], Tensor], documents: Sequence[Sequence[str]], labels: Sequence[Sequence[str]] = (),
    *, join: str = " ",
) -> SegmentBias:  # fmt: skip
    """Put the segments of documents into every rotation of their order, and see which the embedding reflects.

    Each segment stands at each place once, so that places differ by what a model does alone.

    Args:
        embed: texts to `[n, D]`. documents: of k segments each, two or more. labels: of each segment, its language for
            example.

    Source: arXiv 2601.16934; that a segment is reflected by the cosine of embeddings is ASSUMED.
    """
    counts = {len(one) for one in documents}
    if len(counts) != 1 or min(counts) < 2 or (labels and [*map(len, labels)] != [*map(len, documents)]):
        raise ValueError("documents have the same number of segments, two or more, and a label each if any")
    k, found = counts.pop(), []
    sums: dict[str, list[float]] = {}
    for n, segments in enumerate(documents):
        orders = [[(start + place) % k for place in range(k)] for start in range(k)]
        texts = [join.join(segments[at] for at in order) for order in orders]
        e = F.normalize(embed([*texts, *segments]).double().cpu(), dim=-1)
        cosines = e[:k] @ e[k:].T  # [order, segment]
        found.append(cosines.gather(1, torch.tensor(orders)))
        for at, label in enumerate(labels[n] if labels else ()):
            sums.setdefault(label, []).append(float(cosines[:, at].mean()))
    reflection = torch.stack(found)
    by_label = {label: sum(each) / len(each) for label, each in sums.items()}
    return SegmentBias(reflection, reflection.mean((0, 1)), by_label)


__all__ = ["Blocks", "SegmentBias", "block_mass", "calibrate", "equalise", "segment_bias"]
