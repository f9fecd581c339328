"""How far what a model says or represents moves when a head is switched off, and the group that moves it furthest.

Source: Zhou et al. 2024 (Ships and Sahara), arXiv 2410.13708.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Heads, Inputs, channels_of, chosen_heads, run, steer
from manyheads.inspect.edit import check_maps, check_one_map, standing_by
from manyheads.inspect.layers import Layer, chosen
from manyheads.inspect.measures.table import HeadTable
from manyheads.inspect.stream import head_of

Off = Literal["even", "scale", "mean"]


class _Even(Tap):
    def __init__(self, layer: Layer, heads: list[int], factor: float) -> None:
        self.layer, self.heads, self.factor = layer, heads, factor

    def ask(self, call: Call, flow: Flow | None) -> Call:
        call = channels_of(self.layer, call, flow, "q")
        check_one_map(self.layer, call, flow, "to make even")
        scale = torch.ones(call.q.shape[1], 1, 1, dtype=call.q.dtype, device=call.q.device)
        scale[self.heads] = self.factor
        return replace(call, q=call.q * scale)


class _Mean(Tap):
    def __init__(self, heads: list[int]) -> None:
        self.heads = heads

    def out(self, o: Tensor, flow: Flow | None) -> Tensor:
        index = torch.tensor(self.heads, device=o.device)
        return o.index_copy(1, index, o.mean(1, keepdim=True).expand_as(o[:, self.heads]))


@contextmanager
def switched_off(model: nn.Module, heads: Heads, how: Off = "even", factor: float = 0.0) -> Iterator[None]:
    """Heads that no longer tell tokens apart (`even`), or say almost nothing (`scale`), or what all say (`mean`).

    even: q_h times the factor, behind rotation and norms: scores go to 0 and weights to 1 / n_t over the keys that a
    query sees. It is of query heads, so that heads which share keys keep them; a learned sink keeps its share. scale:
    o_h times the factor, before the output projection. mean: o_h is the mean of the layer's heads.
    """
    if how == "scale":
        with steer(model, heads, scale=factor):
            yield
        return
    if how not in ("even", "mean"):
        raise ValueError(f"how={how!r}; heads are switched off by even, scale or mean")
    some = chosen_heads(model, heads)
    if how == "even":
        check_maps([layer for layer, _ in some])

    def make(layer: Layer) -> Tap:
        picked = next(of for each, of in some if each is layer)
        return _Mean(picked) if how == "mean" else _Even(layer, picked, factor)

    with standing_by([layer for layer, _ in some], make):
        yield


def ships(
    model: nn.Module, inputs: Inputs, layers: int | Iterable[int] | None = None, *, how: Off = "even",
    factor: float = 1e-4,
) -> HeadTable:  # fmt: skip
    """KL(p ‖ p_h) in nats, the mean over prompts: p the next-token distribution behind each, p_h with a head off.

    A forward pass of all prompts for each head. 1e-12 is added to both distributions, as the authors do.
    """

    def after() -> Tensor:
        with torch.no_grad():
            output = run(model, inputs)
        logits = getattr(output, "logits", output)
        return logits[torch.arange(len(logits)), _last(inputs, logits)].double().softmax(-1) + 1e-12

    base, rows = after(), {}
    for layer in chosen(model, layers):
        found = []
        for head in range(layer.heads):
            with switched_off(model, {layer.number: [head]}, how, factor):
                other = after()
            found.append((base * (base / other).log()).sum(-1).mean().clamp_min(0).cpu())
        rows[layer.number] = torch.stack(found)
    return HeadTable("ships", rows)


def _last(inputs: Inputs, x: Tensor) -> Tensor:
    """The place of the last token of each prompt, padding on either side left out."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is None:
        return torch.full((len(x),), x.shape[1] - 1)
    return (torch.arange(x.shape[1], device=mask.device) * mask).argmax(-1).cpu()


def last_states(model: nn.Module, inputs: Inputs) -> Tensor:
    """M `[N, D]`: what the output head reads of each prompt's last token."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any) -> None:
        seen.append(args[0])

    hook = head_of(model).register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            run(model, inputs)
    finally:
        hook.remove()
    x = seen[-1]
    return x[torch.arange(len(x)), _last(inputs, x)].double()


def subspace_angle(
    one: Tensor, other: Tensor, rank: int = 1, axis: Literal["prompts", "features"] = "prompts"
) -> float:
    """Σ of the principal angles, in degrees, between the spans of the first `rank` singular vectors of M and M_h.

    axis: left singular vectors, which live in the space of prompts (as published), or right ones, of features.
    """
    if axis not in ("prompts", "features"):
        raise ValueError(f"axis={axis!r}; singular vectors of prompts or of features")
    one, other = (x if axis == "prompts" else x.mT for x in (one.double(), other.double()))
    if not 1 <= rank <= min(one.shape):
        raise ValueError(f"rank={rank}; states {[*one.shape]} have 1 to {min(one.shape)} singular vectors")
    bases = [torch.linalg.svd(x, full_matrices=False).U[:, :rank] for x in (one, other)]
    cosines = torch.linalg.svdvals(bases[0].mT @ bases[1]).clamp(max=1)
    # near 0, an angle is told by what is left beside the other span
    beside = torch.linalg.svdvals(bases[1] - bases[0] @ (bases[0].mT @ bases[1])).clamp(max=1).flip(-1)
    return torch.where(cosines > 0.7, beside.asin(), cosines.acos()).rad2deg().sum().item()


def sahara(
    model: nn.Module, inputs: Inputs, steps: int = 1, *, how: Off = "even", factor: float = 1e-5, rank: int = 1,
    axis: Literal["prompts", "features"] = "prompts", layers: int | Iterable[int] | None = None,
) -> list[tuple[int, int, float]]:  # fmt: skip
    """A group of heads found greedily: at each step the one whose going, with those before it, turns M furthest.

    (layer, head, angle) in the order found: generalised Ships (`subspace_angle`) of all heads up to this one. A forward
    pass of all prompts for each head and step.
    """
    places = [(layer.number, head) for layer in chosen(model, layers) for head in range(layer.heads)]
    if not 1 <= steps <= len(places):
        raise ValueError(f"steps={steps}; there are {len(places)} heads")
    base, group, found = last_states(model, inputs), [], []
    for _ in range(steps):
        scores = []
        for place in places:
            if place in group:
                continue
            heads: dict[int, list[int]] = {}
            for layer, head in (*group, place):
                heads.setdefault(layer, []).append(head)
            with switched_off(model, heads, how, factor):
                scores.append((subspace_angle(base, last_states(model, inputs), rank, axis), place))
        best, place = max(scores, key=lambda one: one[0])
        group.append(place)
        found.append((*place, best))
    return found
