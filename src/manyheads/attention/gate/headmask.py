"""HeadMask: some heads fall silent in each training step, so that none is needed and none is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost
from manyheads.core.flow import Flow, Links
from manyheads.core.part import Gate, Heads, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class HeadMask(Part):
    """o_h ← ξ_h o_h with ξ of zeros and ones, drawn over all heads of a model at once; without a draw, ξ = 1.

    The pool of heads spans layers (encoder, decoder and cross-attention alike), so a training step draws and hands
    the draw to its pass; evaluation and every other pass is the base model's.

    >>> links = Links(memo=mask_top(at_random(model), 18))               # Mask-Random, n = 18 of 144
    >>> links = Links(memo=mask_top(importance(model, losses, 32), 18))  # Mask-Impt, by a pass of its own
    >>> loss(model(x, links=links)).backward()

    The masks do not change between a pass and its recomputation, and a seeded generator gives all ranks the same.

    Options: rescale: multiply the kept heads of a layer by H / (kept heads), as dropout does; the authors do not.

    Choices the source leaves open: one pool for all layers, a draw a batch, the importance (see `importance`), and
    that a draw leaves every layer a head.

    Source: Sun et al. 2020, arXiv 2009.09672.
    """

    name: ClassVar[str] = "headmask"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2009.09672"
    slot: ClassVar[str | None] = "headmask"
    examples: ClassVar = ({}, {"rescale": True})

    rescale: bool = False

    def build(self, before: Heads, after: Heads, site: Site) -> HeadMaskGate:
        return HeadMaskGate(before.out, self.rescale)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost()


class HeadMaskGate(Gate):
    """Reads ξ, `[H]` or `[B, H]`, from `links.memo` under itself."""

    def __init__(self, heads: int, rescale: bool) -> None:
        super().__init__()
        self.heads, self.rescale = heads, rescale

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        mask = flow.links.memo.get(self)
        if mask is None:
            return o
        if self.rescale:
            mask = mask * (self.heads / mask.detach().sum(-1, keepdim=True).clamp_min(1))
        return o * mask.to(o)[..., None, None]


Scores = Mapping[HeadMaskGate, Tensor]
"""A number for each head `[H]` of each layer."""


def gates_of(model: nn.Module) -> list[HeadMaskGate]:
    return [module for module in model.modules() if isinstance(module, HeadMaskGate)]


def at_random(model: nn.Module, generator: torch.Generator | None = None) -> Scores:
    return {gate: torch.rand(gate.heads, generator=generator) for gate in gates_of(model)}


def importance(
    model: nn.Module, losses: Callable[[Links], Tensor], examples: int, *, normalise: bool = False
) -> Scores:
    """I_h = mean over examples b of |Σ_t o_h[b, t] · ∂L_b/∂o_h[b, t]| = |∂L_b/∂ξ_h[b]|: what a head's removal changes.

    losses: one loss an example `[examples]`, from a pass with these links. normalise: divide by the L2 norm over the
    heads of a layer. Gradients, buffers and the state of random numbers are afterwards what they were before.
    """
    one = next(model.parameters()).new_ones(())
    one = one.to(torch.promote_types(one.dtype, torch.float32))
    probes = {gate: one.repeat(examples, gate.heads).requires_grad_() for gate in gates_of(model)}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(), torch.enable_grad():
        slopes = torch.autograd.grad(losses(Links(memo=dict(probes))).sum(), list(probes.values()))
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    scores = [slope.abs().mean(0) for slope in slopes]
    return {gate: s / s.norm() if normalise else s for gate, s in zip(probes, scores, strict=True)}


def mask_top(scores: Scores, n: int, *, allow_empty: bool = False) -> dict[HeadMaskGate, Tensor]:
    """ξ for each layer, zero at the `n` heads of largest score over all layers; for `Links.memo`.

    allow_empty: also silence a layer's last head; otherwise that head is passed over for the next.
    """
    left = {gate: gate.heads - (not allow_empty) for gate in scores}
    if not 0 <= n <= sum(left.values()):
        raise ValueError(f"headmask: {n} heads to silence in {len(left)} layers; 0 to {sum(left.values())} may be")
    masks = {gate: torch.ones_like(each) for gate, each in scores.items()}
    ranked = [(score, gate, head) for gate, each in scores.items() for head, score in enumerate(each.tolist())]
    for _, gate, head in sorted(ranked, key=lambda entry: -entry[0]):
        if n and left[gate]:
            masks[gate][head] = 0
            left[gate], n = left[gate] - 1, n - 1
    return masks
