"""A looped stack that caches one row a token for all its loops: a gate carries what it is made of from turn to turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.cache import Cache, Trial
from manyheads.core.check import check_share, check_whole, is_number
from manyheads.core.cost import Cost
from manyheads.core.flow import Links, RowSource
from manyheads.core.mask import Mask
from manyheads.core.part import FACTS, OptionError
from manyheads.core.prefix import PrefixCache
from manyheads.core.spec import read_one


@dataclass(frozen=True)
class MELT:
    """Memory-efficient looped transformer: all T loops of a layer share one cached row a token, updated by a gate.

    With x_t `[B, S, D]` the normed input of a layer in loop t = 1 … T,

        h_1 = x_1,   z_t = σ(W x_t + U h_{t-1} + b),   h_t = z_t ∘ h_{t-1} + (1 - z_t) ∘ x_t

    keys and values are made of h_t, queries of x_t. A token reads earlier tokens as *their* loop T left them and itself
    as of this loop, so only rows of loop T are cached: the memory of a stack that runs once. In return tokens are read
    in order. A pass runs in chunks, and inside a chunk tokens read each other's rows of this loop; with chunks of one
    token it computes what decoding does. W, U `[D, D]` and b `[D]` are a layer's own, 2 D² + D parameters.

    While a looped model (T rows a token) is taken over, what is read may go from its rows to those of h:
    α melted + (1 - α) of x_t, as its own loop t left them; `on_step` moves α from 0 to 1. Until α is 1 a pass takes no
    cache. `convert.melt.aligned` is the loss of the training after that.

    Options: gate: `channel`; `scalar`, one number a token; `mean` of the loops so far; `ema`, z = decay; `last`, h = x
    (the authors' ablations). chunk: tokens that run together in training. prefill: the same in evaluation, where 1 is
    exact, and more reads a prompt faster as training did. transition: the share of training in which α goes from 0 to 1
    (0: α = 1 from the start). bias: first value of b; below 0 it favours the newest input.
    The source leaves open, or we could not read there: h after the norm, h_1 = x_1, what tokens of a chunk see of each
    other, a linear α, the length of chunks, the gate's start, the scalar gate's input (as z, width 1), the decay.

    Source: arXiv 2605.07721.
    """

    name: ClassVar[str] = "melt"

    gate: Literal["channel", "scalar", "mean", "ema", "last"] = "channel"
    chunk: int = 256
    prefill: int = 1
    transition: float = 0.0
    bias: float = 0.0
    decay: float | None = None

    def check(self, layers: Iterable[Attention], loops: int, causal: bool = True, cross: bool = False) -> None:
        """Raise an `OptionError` for numbers that do not fit, or layers (without weights) that cache other rows."""
        check_whole(**{"melt: chunk": self.chunk, "melt: prefill": self.prefill})
        check_share(**{"melt: transition": self.transition})
        if not is_number(self.bias):
            raise OptionError(f"melt: bias is a number, not {self.bias!r}")
        if self.bias and self.gate not in ("channel", "scalar"):
            raise OptionError(f"melt: bias={self.bias} without weights; gate may be channel or scalar, not {self.gate}")
        if self.decay is not None and self.gate != "ema":
            raise OptionError(f"melt: decay={self.decay} is of gate=ema, not of gate={self.gate}")
        if self.decay is not None and not (is_number(self.decay) and 0 < self.decay < 1):
            raise OptionError(f"melt: decay={self.decay!r}; it is between 0 and 1")
        if loops < 2:
            raise OptionError(f"melt: loops={loops}; rows are shared by loops, of which there are 2 or more")
        if not causal or cross:
            what = "cross-attention" if cross else "an encoder"
            raise OptionError(
                f"melt: tokens are read in order, chunk by chunk, which {what} does not do; a decoder does"
            )
        for layer in layers:
            why = _why_not(layer)
            if why is not None:
                raise OptionError(f"melt: layer {layer.site.layer} ({layer.spec}) cannot share rows over loops: {why}")

    def width(self, dim: int) -> int:
        """Numbers of a learned gate, for each token."""
        return {"channel": dim, "scalar": 1}.get(self.gate, 0)

    def cost(self, dim: int, loops: int) -> Cost:
        """Of one layer's gate, which acts in every loop but the first."""
        width = self.width(dim)
        return Cost(width * (2 * dim + 1), token_flops=4 * dim * width * (loops - 1))

    def share(self, progress: float) -> float:
        """α at a point of training."""
        return min(1.0, progress / self.transition) if self.transition else 1.0


def read_melt(line: str | MELT | None) -> MELT | None:
    """The options that a text such as `melt(chunk=128)` names."""
    return line if line is None or isinstance(line, MELT) else read_one(line, _find, "melt")


def _find(name: str) -> type[MELT]:
    if name != MELT.name:
        raise OptionError(f"melt={name!r}; it is a line such as 'melt' or 'melt(chunk=128)'")
    return MELT


def _why_not(layer: Attention) -> str | None:
    """Why a layer does not cache one row a token, made of one input apart from the queries'."""
    broken = {fact: part.name for part in layer.spec.parts for fact in part.breaks}
    for fact in ("token keys", "final rows"):
        if fact in broken:
            return f"{broken[fact]} breaks {fact!r} ({FACTS[fact]})"
    if layer.states or layer.project.remembers:
        return "it goes on from what earlier tokens left, which is not the same in every loop"
    own = layer.site.kv_source is None
    for part in layer.spec.parts:
        if part.stage == "tokens" or (own and part.stage == "project" and "self" in part.needs):
            return f"{part.name} makes queries and rows of one input"
    return None


class Gate(nn.Module):
    """h_t of x_t and h_{t-1}, `[B, S, D]` each (see `MELT`)."""

    def __init__(self, dim: int, options: MELT) -> None:
        super().__init__()
        self.options, width = options, options.width(dim)
        if width:
            self.x_proj, self.h_proj = (nn.Linear(dim, width, bias=False) for _ in range(2))
            self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """First values of what is no linear map."""
        if self.options.width(1):
            nn.init.constant_(self.bias, self.options.bias)

    def forward(self, x: Tensor, h: Tensor, turn: int) -> Tensor:
        """turn: 1 for the second loop, and so on."""
        z = self.keep(x, h, turn)
        return z * h + (1 - z) * x

    def keep(self, x: Tensor, h: Tensor, turn: int) -> Tensor | float:
        """z: how much of h stays."""
        match self.options.gate:
            case "mean":
                return turn / (turn + 1)
            case "ema":
                return 0.5 if self.options.decay is None else self.options.decay
            case "last":
                return 0.0
        return torch.sigmoid(self.x_proj(x) + self.h_proj(h) + self.bias)


@dataclass(eq=False)
class Turn:
    """One loop over one chunk: what attention reads and hands on in it, and h by layer, before and after.

    cache: rows that earlier chunks left, to which this turn's go. own: the same of a looped stack's own rows.
    """

    number: int
    cache: Trial
    links: Links
    share: float
    own: Trial | None
    before: Mapping[int, Tensor]
    latents: dict[int, Tensor] = field(default_factory=dict)

    def source(self, layer: int, gate: Gate, x: Tensor) -> RowSource:
        """What a layer of normed input x `[B, S, D]` makes its rows of."""
        h = x if self.number == 0 else gate(x, self.before[layer], self.number)
        self.latents[layer] = h
        return RowSource(h, self.share, self.own)


class Melting:
    """A pass through a melted stack. Nothing is in the caller's cache before `end`.

    Every turn goes on from the rows that earlier chunks left; those of the last turn stay.
    """

    def __init__(self, loops: int, share: float, cache: Cache | None, links: Links) -> None:
        self.loops, self.share, self.cache, self.links = loops, share, cache, links
        self.kept = Trial(Cache() if cache is None else cache)
        self.own = [Trial(Cache()) if share < 1 else None for _ in range(loops)]
        self.losses: dict[str, list[tuple[Tensor, int]]] = {}

    def turns(self, cut: slice) -> Iterator[Turn]:
        """The turns of the next chunk; what a turn leaves is read when the following one is asked for."""
        types, last, before = self.links.types, self.kept, {}
        types = types if types is None else types[:, cut]
        for number, own in enumerate(self.own):
            memo = {**self.links.memo}
            links = replace(self.links, rows={}, weigh={}, handed={}, aux={}, memo=memo, types=types)
            turn = Turn(number, Trial(self.kept), links, self.share, None if own is None else Trial(own), before)
            yield turn
            last, before, self.own[number] = turn.cache, turn.latents, turn.own
            for name, loss in links.aux.items():
                self.losses.setdefault(name, []).append((loss, cut.stop - cut.start))
            if number == self.loops - 1:
                self.links.rows.update(links.rows)
        self.kept = last

    def end(self) -> None:
        """Hand over what the pass leaves. An auxiliary loss is its mean over tokens and loops."""
        for name, parts in self.losses.items():
            tokens = sum(count for _, count in parts)
            self.links.aux[name] = torch.stack([loss * (count / tokens) for loss, count in parts]).sum()
        if self.cache is not None:
            self.cache.take(self.kept)


def check_melted(x: Tensor, mask: Tensor | Mask | None, cache: object, share: float) -> None:
    """Raise ValueError for what a pass through a melted stack cannot keep to."""
    if cache is not None and (isinstance(cache, PrefixCache) or not isinstance(cache, Cache)):
        raise ValueError(f"turns of a melted stack do not go back in a {type(cache).__name__}; use manyheads.Cache")
    if cache is not None and share < 1:
        raise ValueError(
            f"rows are still mixed with those of each loop (α = {share:g}), which no cache has; pass none, or end the "
            "transition (on_step(1))"
        )
    if isinstance(mask, Mask):
        raise ValueError(
            "a melted stack reads tokens chunk by chunk, which a Mask does not describe; mark padding by a [B, T] "
            "mask, packed documents by the segments of an Axis, pairs by a 4-D mask"
        )
    past = cache.length() if isinstance(cache, Cache) else 0
    if mask is not None and mask.ndim == 4:
        for dim, what, wanted in ((2, "queries", x.shape[1]), (3, "keys", past + x.shape[1])):
            if mask.shape[dim] not in (1, wanted):
                raise ValueError(f"a mask {[*mask.shape]} is about {mask.shape[dim]} {what}; there are {wanted}")


def mask_of(mask: Tensor | None, cut: slice, past: int) -> Tensor | None:
    """A mask's part about a chunk: `[B, T]`, or `[B, H, T, S]` with S the rows until the chunk's end."""
    if mask is None or mask.ndim == 2:
        return mask if mask is None else mask[:, cut]
    rows = mask if mask.shape[2] == 1 else mask[:, :, cut]
    return rows if mask.shape[3] == 1 else rows[..., : past + cut.stop]
