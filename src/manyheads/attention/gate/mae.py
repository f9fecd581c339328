"""Mixture of attentive experts: each expert is all heads but one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.pool import pooled_width, running_mean, running_state, runs, whole_mean
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow, Links
from manyheads.core.part import Gate, Heads, OptionError, Part, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MAE(Part):
    """y = Σ_i g_i f_i, with experts f_i = H/(H-1) Σ_{j≠i} o_j W_O^j and responsibilities g = softmax(U₂ tanh(U₁ x̄)).

    Computed in closed form, as weights of heads: w_j = H/(H-1) (1 - g_j), in [0, H/(H-1)], Σ w_j = H. U₁ `[D, width]`,
    U₂ `[width, H]` from zero, where all w are one and the layer is the plain one. x̄ is the mean of the sequence in
    bidirectional attention, of the context in cross-attention, and of the tokens so far in causal attention, with a
    state of one sum for each sequence.

    Trained by block coordinate descent, since joint training drives g to uniform or to one winner: mostly steps of
    the experts, where one expert is drawn from g and g has no gradient, and now and then (every fifth epoch) steps of
    the gates alone, on the full mixture. `turn` prepares either kind of step. There is no auxiliary loss.

    Options: width of the gate. best: give each input its likeliest expert instead of the mixture.

    Choices the source leaves open: the gate's form and width, a mean as the pool, the schedule, and all of causal use.
    An expert is drawn with one random number a sequence, so that it changes along it only as far as g does.

    Source: Peng et al. 2020, arXiv 2005.06537.
    """

    name: ClassVar[str] = "mae"
    stage: ClassVar = "gate"
    paper: ClassVar[str] = "arXiv 2005.06537"
    slot: ClassVar[str | None] = "router"
    examples: ClassVar = ({"width": 8},)

    width: int = 256
    best: bool = False

    def layout(self, heads: Heads, site: Site) -> Heads:
        if heads.out < 2:
            raise OptionError(f"mae: {heads.out} head leaves no expert of the others; at least 2")
        if self.width < 1:
            raise OptionError(f"mae: width={self.width} of the gate; at least 1")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> MAEGate:
        return MAEGate(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        dim = pooled_width(before, site)
        gate = (dim + before.out) * self.width
        if not runs(site):
            return Cost(gate, token_flops=dim)
        state = running_state(self.name, dim)[self.name]
        return Cost(gate, state_floats=state.shape[0], token_flops=2 * gate + dim)


class MAEGate(Gate):
    def __init__(self, options: MAE, heads: Heads, site: Site) -> None:
        super().__init__()
        self.best, self.cross, dim = options.best, site.cross, pooled_width(heads, site)
        self.states = running_state(MAE.name, dim) if runs(site) else {}
        self.inner = nn.Linear(dim, options.width, bias=False)
        self.outer = nn.Linear(options.width, heads.out, bias=False)
        nn.init.zeros_(self.outer.weight)

    def gate(self, o: Tensor, flow: Flow) -> Tensor:
        shares = self.shares(flow)
        heads = shares.shape[-1]
        weights = (1 - shares) * (heads / (heads - 1))
        return o * weights.to(o.dtype).transpose(1, 2)[..., None]

    def shares(self, flow: Flow) -> Tensor:
        """g `[B, 1 or T, H]`, or one expert in its place."""
        mean = running_mean(flow, MAE.name) if self.states else whole_mean(flow, self.cross)
        logits = self.outer(torch.tanh(self.inner(mean)))
        g = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if flow.links.memo.get(MAE.name) == "experts":
            drawn = torch.rand(len(g), 1, 1, dtype=g.dtype, device=g.device)
            expert = (g.cumsum(-1) <= drawn).sum(-1).clamp_max(g.shape[-1] - 1)
        elif self.best:
            expert = g.argmax(-1)
        else:
            return g
        return nn.functional.one_hot(expert, g.shape[-1]).to(g.dtype)


@contextmanager
def turn(model: nn.Module, whose: Literal["experts", "gates"]) -> Iterator[Links]:
    """One step of block coordinate descent: run its passes inside, with these links.

    >>> with turn(model, "experts") as links:
    ...     loss(model(x, links=links)).backward()

    Only the parameters whose turn it is get gradients; "experts" also draws one expert a layer and input.
    """
    of_gates = {id(p) for module in model.modules() if isinstance(module, MAEGate) for p in module.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and (id(p) in of_gates) != (whose == "gates")]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield Links(memo={MAE.name: whose})
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
