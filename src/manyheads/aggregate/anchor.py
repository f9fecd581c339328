"""Where on a picture a token looks: a map from all heads, weighted by how they serve the question before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.aggregate.merger import alike
from manyheads.core.check import OptionError, check_whole, is_number

EPS = 1e-8


class Grounding(NamedTuple):
    """map `[B, V]`, sums to 1 over patches; weights `[B, F]` of all heads, sum to 1; affinity `[B, Q]` of the tokens of
    the question to the picture.
    """

    map: Tensor
    weights: Tensor
    affinity: Tensor


@dataclass(frozen=True)
class AnchorReader:
    """The attention of one token, the anchor, to patches, over all heads f of all layers.

    G_q = Σ_l Σ_v cos(h_lq, h_lv) says which tokens q of the question are about the picture. Heads are weighted by

        hard: w = softmax_f Σ_v α_f[q*, v], q* the `top` tokens of most G (their mean);
        soft: w = softmax_f -KL(p_G ‖ p_f), p_f = softmax_q Σ_v α_f[q, v], p_G = softmax_q G_q,

    and m_v = Σ_f w_f α_f[a, v], divided by its sum over v. The sums are in [0, 1], so weights differ by a factor of e
    at most; `temperature`, by which they are divided before the softmax, is an addition.

    Attention is taken from a running model with `mh.capture`, of the rows needed only:

    >>> rows = [*questions, anchor]
    >>> with mh.capture(model, queries=rows, grad=True) as tape:
    ...     states = model(**inputs, output_hidden_states=True).hidden_states[1:]
    >>> maps = [tape[layer].weights for layer in tape]
    >>> found = AnchorReader()(maps, states, patches=patches, questions=questions)

    Source: 2025, arXiv 2511.00810.
    """

    how: Literal["hard", "soft"] = "hard"
    top: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.how not in ("hard", "soft"):
            raise OptionError(f"how={self.how!r} is neither hard nor soft")
        check_whole(top=self.top)
        if not is_number(self.temperature) or self.temperature <= 0:
            raise OptionError(f"temperature={self.temperature!r} is no number above 0")

    def __call__(
        self, maps: Sequence[Tensor], states: Sequence[Tensor], *, patches: Sequence[int], questions: Sequence[int]
    ) -> Grounding:
        """Read a pass.

        Args:
            maps: a layer each, weights `[B, H, Q + 1, S]` of the question's tokens, then the anchor, over all keys.
            states: a layer each, outputs `[B, S, D]`. patches, questions: which of the S tokens are these.
        """
        patches, questions = list(patches), list(questions)
        if not patches or not questions:
            raise ValueError("a grounding needs patches and tokens of a question")
        alpha = torch.cat(list(maps), 1)[..., patches]
        if alpha.shape[2] != len(questions) + 1:
            raise ValueError(f"maps have {alpha.shape[2]} rows; {len(questions)} of the question and the anchor's")
        affinity = sum(alike(h[:, questions], h[:, patches]).sum(-1) for h in states)
        if not isinstance(affinity, Tensor):
            raise ValueError("there are no states of layers")
        weights = self.weigh(alpha[:, :, :-1], affinity)
        return Grounding(grounding_map(alpha[:, :, -1], weights), weights, affinity)

    def weigh(self, alpha: Tensor, affinity: Tensor) -> Tensor:
        """Weights `[B, F]` of heads, from attention `[B, F, Q, V]` of the question and affinity `[B, Q]`."""
        if self.top > affinity.shape[1]:
            raise ValueError(f"top={self.top}, but the question has {affinity.shape[1]} tokens")
        seen = alpha.sum(-1)  # [B, F, Q]
        if self.how == "hard":
            best = affinity.topk(self.top, -1).indices[:, None].expand(-1, seen.shape[1], -1)
            score = seen.gather(2, best).mean(-1)
        else:
            log_g = affinity.log_softmax(-1)[:, None]
            score = -(log_g.exp() * (log_g - seen.log_softmax(-1))).sum(-1)
        return (score / self.temperature).softmax(-1)


def grounding_map(alpha: Tensor, weights: Tensor) -> Tensor:
    """Σ_f w_f α_f over its sum, `[B, V]`, of attention to patches `[B, F, V]` and weights `[B, F]`."""
    found = torch.einsum("bf,bfv->bv", weights, alpha)
    return found / (found.sum(-1, keepdim=True) + EPS)


def box_target(boxes: Tensor, grid: tuple[int, int], patch: float = 28.0, spread: float | None = 0.8) -> Tensor:
    """The distribution over patches `[B, h·w]` that a box `[B, 4]` (x0, y0, x1, y1 in pixels) asks for.

    y_v ∝ overlap of patch and box / area of a patch · exp(-½ (dx²/σx² + dy²/σy²)), d from the centre of the box to that
    of the patch, σ = spread · size of the box; spread None: by overlap alone.

    Raises:
        ValueError: a box is empty, or outside of the picture.
    """
    (h, w), wide = grid, boxes.double()
    x0, y0, x1, y1 = (each[:, None] for each in wide.unbind(-1))
    xs, ys = (torch.arange(n, dtype=wide.dtype, device=boxes.device)[None] * patch for n in (w, h))
    across = (torch.minimum(x1, xs + patch) - torch.maximum(x0, xs)).clamp_min(0)
    down = (torch.minimum(y1, ys + patch) - torch.maximum(y0, ys)).clamp_min(0)
    if bool(((across.sum(-1) <= 0) | (down.sum(-1) <= 0)).any()):
        raise ValueError(f"a box covers no patch of a picture of {w * patch:g} by {h * patch:g}; x0 < x1 and y0 < y1")
    if spread is not None:
        across = across * (-0.5 * ((xs + patch / 2 - (x0 + x1) / 2) / (spread * (x1 - x0))).square()).exp()
        down = down * (-0.5 * ((ys + patch / 2 - (y0 + y1) / 2) / (spread * (y1 - y0))).square()).exp()
    y = (down[:, :, None] * across[:, None]).flatten(1)
    return (y / y.sum(-1, keepdim=True)).to(torch.promote_types(boxes.dtype, torch.float32))


def grounding_loss(found: Tensor, target: Tensor) -> Tensor:
    """KL(y ‖ m), summed over patches, mean over the batch; the source's log m has no ε, this one has."""
    return F.kl_div((found + EPS).log(), target.to(found.dtype), reduction="none").sum(-1).mean()


def point(found: Tensor, grid: tuple[int, int], patch: float = 28.0, share: float | None = None) -> Tensor:
    """A place `[B, 2]` (x, y in pixels) on a map `[B, h·w]`: the centre of its greatest patch.

    share: in place of that, the mean of the patches with at least this share of the greatest, weighted by the map.
    """
    v = torch.arange(grid[0] * grid[1], device=found.device)
    centres = (torch.stack([v % grid[1], v // grid[1]], -1) + 0.5) * patch
    if share is None:
        return centres[found.argmax(-1)]
    kept = found.masked_fill(found < share * found.amax(-1, keepdim=True), 0.0)
    return kept / kept.sum(-1, keepdim=True) @ centres.to(found.dtype)


__all__ = ["AnchorReader", "Grounding", "box_target", "grounding_loss", "grounding_map", "point"]
