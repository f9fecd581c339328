"""Features of several layers, scales or models fused by weights that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import OptionError, check_whole


def ordered_weights(passed: Tensor) -> Tensor:
    """w_i = s_i Π_{j > i} (1 - s_j) of shares s `[n, …]`, what the later ones leave; they sum to 1 - Π (1 - s)."""
    left = (1 - passed).flip(0).cumprod(0)
    return passed * torch.cat([torch.ones_like(passed[:1]), left[:-1]]).flip(0)


class SpatialAttention(nn.Module):
    """A logit for each place, `[B, 1, h, w]` of maps `[B, C, h, w]`: two 3x3 convolutions with norms, one of 1x1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        check_whole(width=width)
        layers = [layer for _ in range(2) for layer in (
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())]  # fmt: skip
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ChannelAttention(nn.Module):
    """σ(W_2 relu(norm W_1 mean x) + W_2 relu(norm W_1 max x)), for each channel, `[B, C, 1, …]` of `[B, C, …]`."""

    def __init__(self, width: int, ratio: int = 16) -> None:
        super().__init__()
        check_whole(width=width, ratio=ratio)
        hidden = max(1, width // ratio)
        self.down, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2)
        each = [self.up(F.relu(self.norm(self.down(pooled)))) for pooled in (flat.mean(-1), flat.amax(-1))]
        return (each[0] + each[1]).sigmoid().reshape(*x.shape[:2], *[1] * (x.dim() - 2))


class PairFusion(nn.Module):
    """x ← s (1 - c) ∘ x + (1 - s) c ∘ f, s by places of x, c by channels of f; for two maps `[B, C, h, w]`.

    The weights do not sum to 1. Along a chain of layers, x is what is fused so far and f the next, deeper one.
    """

    def __init__(self, width: int, ratio: int = 16) -> None:
        super().__init__()
        self.space, self.channel = SpatialAttention(width), ChannelAttention(width, ratio)

    def forward(self, x: Tensor, f: Tensor) -> Tensor:
        _alike([x, f])
        s, c = self.space(x).sigmoid(), self.channel(f)
        return s * (1 - c) * x + (1 - s) * c * f


class LayerFusion(nn.Module):
    """Attentive feature aggregation: out = Σ_i w_i v_i F_i over maps `[B, C, h, w]` of layers, the finest last.

    w and v are `ordered_weights` of s_i = σ(SA F_i) and c_i = CA F_i, one SA and one CA for all.

    Source: Yang et al. 2023, arXiv 2111.00770.
    """

    def __init__(self, width: int, ratio: int = 16) -> None:
        super().__init__()
        self.space, self.channel = SpatialAttention(width), ChannelAttention(width, ratio)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        _alike(parts)
        w = ordered_weights(torch.stack([self.space(f).sigmoid() for f in parts]))
        v = ordered_weights(torch.stack([self.channel(f) for f in parts]))
        return (w * v * torch.stack(list(parts))).sum(0)


def render(
    logits: Sequence[Tensor], predictions: Sequence[Tensor], *, soft: bool = False, renormalise: bool = False
) -> Tensor:
    """Predictions of image scales fused as colours along a ray are: Σ_k α_k P_k, α_k = (1 - e^{-σ_k}) Π_{j<k} e^{-σ_j}.

    σ = |logit|; the α sum to 1 - e^{-Σ σ}, so that the result is no distribution.

    Args:
        logits: of `SpatialAttention`, `[B, 1, h, w]`, by scale in ascending order, resized to that of scale 1.
        predictions: `[B, C, h, w]`, distributions over C. soft: σ = softplus(logit), which has no kink.
        renormalise: divide by the sum of the α, in place of what the source has.

    Source: as `LayerFusion`.
    """
    if len(logits) != len(predictions) or not logits:
        raise ValueError(f"{len(logits)} logits for {len(predictions)} predictions; one or more of each, as many")
    _alike(logits)
    _alike(predictions)
    sigma = torch.stack([F.softplus(z) if soft else z.abs() for z in logits])
    alpha = -torch.expm1(-sigma) * (sigma - sigma.cumsum(0)).exp()
    if renormalise:
        alpha = alpha / alpha.sum(0).clamp_min(torch.finfo(alpha.dtype).tiny)
    return (alpha * torch.stack(list(predictions))).sum(0)


class ModelMix(nn.Module):
    """Spatial block-wise mixing: h = Σ_i A_i ∘ F_i of features `[B, C, h, w]` of N models, A = softmax over models.

    The logits of A are, of all features side by side, a residual block with the time embedding added, a transformer
    block over places (to themselves, to the text, MLP), and a 1x1 convolution, zero at the start, so that A = 1/N.

    Args:
        models: N. width: C. hidden: C_s of the block. time: width of the time embedding, text: of the text's tokens;
            None: without.

    ASSUMED: the inside of the block, of which the source's code is not public.

    Source: Wang et al. 2025, arXiv 2405.17082.
    """

    def __init__(
        self, models: int, width: int, hidden: int = 32, *, time: int | None = None, text: int | None = None,
        heads: int = 4, groups: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        check_whole(models=models, width=width, hidden=hidden, heads=heads, groups=groups)
        if hidden % heads or hidden % groups:
            raise OptionError(f"hidden={hidden} is no multiple of heads={heads} and groups={groups}")
        self.models, self.wants = models, (time is not None, text is not None)
        self.enter = nn.Conv2d(models * width, hidden, 3, padding=1)
        self.norm, self.leave = nn.GroupNorm(groups, hidden), nn.Conv2d(hidden, hidden, 3, padding=1)
        self.skip = nn.Conv2d(models * width, hidden, 1)
        self.time = None if time is None else nn.Linear(time, hidden)
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(3)])
        self.own = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.text = None if text is None else nn.MultiheadAttention(
            hidden, heads, batch_first=True, kdim=text, vdim=text)  # fmt: skip
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.last = nn.Conv2d(hidden, models, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)  # type: ignore[arg-type]

    def weights(self, parts: Sequence[Tensor], time: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        """A `[B, N, h, w]`. time `[B, E]`, text `[B, L, E']`."""
        _alike(parts)
        if len(parts) != self.models or (time is not None, text is not None) != self.wants:
            needs = " and ".join(name for name, wanted in zip(("time", "text"), self.wants, strict=True) if wanted)
            raise ValueError(f"it mixes {self.models} models, given {needs or 'no condition'}; here are {len(parts)}")
        x = torch.cat(list(parts), 1)
        y = self.norm(self.enter(x))
        if self.time is not None and time is not None:
            y = y + self.time(time)[..., None, None]
        y = self.skip(x) + self.leave(F.silu(y))
        places, (h, w) = y.flatten(2).mT, y.shape[2:]
        at = self.norms[0](places)
        places = places + self.own(at, at, at, need_weights=False)[0]
        if self.text is not None and text is not None:
            places = places + self.text(self.norms[1](places), text, text, need_weights=False)[0]
        places = places + self.mlp(self.norms[2](places))
        return self.last(places.mT.unflatten(2, (h, w))).softmax(1)

    def forward(self, parts: Sequence[Tensor], time: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        weights = self.weights(parts, time, text)
        return (weights.unsqueeze(2) * torch.stack(list(parts), 1)).sum(1)


Run = Callable[[nn.Module, Tensor], Tensor]


class SharedStream(nn.Module):
    """N frozen models of one architecture on one stream: h^b = mix_b(F_1^b(h^{b-1}), …, F_N^b(h^{b-1})).

    Every block of every model reads the mixture, and so do skip connections; only the mixers are trained.

    Args:
        models: the blocks of each, in the order they run. mixers: one for each block. skips: `{b: a}`, block b also
            reads the mixture behind block a, side by side with its input.

    ASSUMED, of the source (see `ModelMix`): that the mixture is the input of all models.
    """

    def __init__(
        self, models: Sequence[Sequence[nn.Module]], mixers: Sequence[nn.Module], skips: Mapping[int, int] | None = None
    ) -> None:
        super().__init__()
        depths = sorted({len(blocks) for blocks in models})
        if len(depths) != 1 or depths[0] != len(mixers):
            raise OptionError(
                f"models of {depths} blocks and {len(mixers)} mixers: as many of each, a mixer for each block"
            )
        self.skips = dict(skips or {})
        if any(not 0 <= a < b < len(mixers) for b, a in self.skips.items()):
            raise OptionError(f"skips={self.skips} go from a block to a later one, of {len(mixers)}")
        self.models = nn.ModuleList([nn.ModuleList(blocks) for blocks in models])
        self.models.requires_grad_(False)
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor, *, run: Run = lambda block, h: block(h), **cond: Any) -> Tensor:
        """The last mixture. run: how a block is called (a time embedding, say); cond: what mixers take."""
        past: list[Tensor] = []
        for number, mixer in enumerate(self.mixers):
            if number in self.skips:
                x = torch.cat([x, past[self.skips[number]]], 1)
            x = mixer([run(blocks[number], x) for blocks in self.models], **cond)  # type: ignore[index]
            past.append(x)
        return x


def _alike(parts: Sequence[Tensor]) -> None:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"what is fused has one shape, not {' and '.join(map(str, sorted(shapes))) or 'none'}")


__all__ = [
    "ChannelAttention", "LayerFusion", "ModelMix", "PairFusion", "SharedStream", "SpatialAttention", "ordered_weights",
    "render",
]  # fmt: skip
