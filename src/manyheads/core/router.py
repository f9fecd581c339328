"""A router: which few of many experts serve a token, how much each counts, and what keeps the load even.

Shapes: `[*, E]` are scores of E experts for each token, `[*, k]` its k chosen ones.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import check_top
from manyheads.core.flow import Flow

Renorm = Literal["none", "detach", "full"]


class Routing(NamedTuple):
    """logits and chance = softmax(logits) `[*, E]`; chosen `[*, k]`, the experts of each token."""

    logits: Tensor
    chance: Tensor
    chosen: Tensor

    def gates(self, renorm: Renorm = "none") -> Tensor:
        """The chances of the chosen experts `[*, k]`; renorm divides by their sum, `detach` without its gradient."""
        kept = self.chance.gather(-1, self.chosen)
        if renorm == "none":
            return kept
        total = kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).eps)
        return kept / (total.detach() if renorm == "detach" else total)

    def spread(self, gates: Tensor) -> Tensor:
        """Gates of the chosen experts over all experts, zero for the others, `[*, E]`."""
        return torch.zeros_like(self.chance).scatter(-1, self.chosen, gates)

    def balance(self, valid: Tensor, *, per_sequence: bool = False) -> Tensor:
        """E Σ_e mean(chance_e) mean(is chosen_e) over valid tokens: k when all is even, E when one takes all (k = 1).

        Over k it is the loss of Switch Transformer, arXiv 2101.03961. per_sequence: the mean over sequences of the same
        within each.
        """
        chosen = self.spread(torch.ones_like(self.chosen, dtype=self.chance.dtype))
        if not per_sequence:
            chance, load = (_mean(x, valid) for x in (self.chance, chosen))
            return self.chance.shape[-1] * (chance * load).sum()
        tokens = valid.expand(self.chance.shape[:2])[..., None].to(self.chance.dtype)
        count = tokens.sum(1)
        chance, load = ((x * tokens).sum(1) / count.clamp_min(1) for x in (self.chance, chosen))
        return self.chance.shape[-1] * (chance * load).sum() / (count > 0).sum().clamp_min(1)

    def size(self, valid: Tensor) -> Tensor:
        """Mean of logsumexp(logits)² over valid tokens, which keeps logits small (the z-loss of arXiv 2202.08906)."""
        return _mean(self.logits.logsumexp(-1, keepdim=True).square(), valid).sum()


def _mean(x: Tensor, valid: Tensor) -> Tensor:
    """Over valid tokens, bool `[B or 1, T]`; `[B, T, E]` to `[E]`."""
    tokens = valid.expand(x.shape[:2])[..., None].to(x.dtype)
    return (x * tokens).sum((0, 1)) / tokens.sum().clamp_min(1)


def route(logits: Tensor, top: int, sample: int = 0) -> Routing:
    """The `top` likeliest experts; of these, `sample` are drawn by chance from all but the top - sample best.

    Chances are at least float32.
    """
    chance = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    best = chance.topk(top - sample, -1).indices
    if sample:
        rest = (chance.detach() + torch.finfo(chance.dtype).tiny).scatter(-1, best, 0.0)
        drawn = torch.multinomial(rest.flatten(0, -2), sample).unflatten(0, logits.shape[:-1])
        best = torch.cat([best, drawn], -1)
    return Routing(logits, chance, best)


class Router(nn.Module):
    """logits = x W_g; noisy adds ε ∘ (softplus(x W_n) + 0.01), ε from N(0, 1), in training.

    W_g starts at zero, where all experts are alike, but from N(0, 0.01²) where some are left out: else ties would send
    every token to the same few. sample: see `route`, in training.
    """

    unhooked = ("score",)  # read in wider numbers than its own

    def __init__(
        self, dim: int, experts: int, top: int, *, noisy: bool = False, sample: int = 0, bias: bool = False
    ) -> None:
        super().__init__()
        check_top(top, experts)
        self.top, self.sample = top, sample
        self.score = nn.Linear(dim, experts, bias=bias)
        self.noise = nn.Linear(dim, experts, bias=False) if noisy else None
        nn.init.normal_(self.score.weight, std=0.01 if top < experts else 0.0)
        if bias:
            nn.init.zeros_(self.score.bias)

    def forward(self, x: Tensor) -> Routing:
        wide = torch.promote_types(x.dtype, torch.float32)  # a choice is no place for rounding
        bias = None if self.score.bias is None else self.score.bias.to(wide)
        logits = F.linear(x.to(wide), self.score.weight.to(wide), bias)
        if self.training and self.noise is not None:
            logits = logits + torch.randn_like(logits) * (F.softplus(self.noise(x)) + 0.01)
        return route(logits, self.top, self.sample if self.training else 0)


class Choice(NamedTuple):
    """The experts of each token `[*, k]`, their gates, and which choices come to something (None: all)."""

    chosen: Tensor
    gates: Tensor
    kept: Tensor | None = None

    def flatten(self) -> Choice:
        """All tokens in one row, `[N, k]`."""
        kept = None if self.kept is None else self.kept.flatten(0, -2)
        return Choice(self.chosen.flatten(0, -2), self.gates.flatten(0, -2), kept)


class Chooser(Router):
    """A router with what a mixture of experts has around it: gates, padding, capacity, losses.

    renorm: of the gates, see `Routing.gates`. capacity c, in training: an expert takes the first ⌈c k n / E⌉ choices
    of a sequence of n tokens, the others come to nothing (gate zero). z: weight of `Routing.size` beside the balance
    loss, which is 1 when all is even. per_sequence: see `Routing.balance`.
    """

    def __init__(
        self, dim: int, experts: int, top: int, *, renorm: Renorm = "none", capacity: float | None = None,
        z: float = 0.0, per_sequence: bool = False, noisy: bool = False, sample: int = 0, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, experts, top, noisy=noisy, sample=sample, bias=bias)
        self.renorm: Renorm = renorm
        self.capacity, self.z, self.per_sequence = capacity, z, per_sequence

    def choose(self, x: Tensor, valid: Tensor | None, flow: Flow, name: str | None) -> Choice:
        """Of x `[B, T, D]`; padding (valid False, `[B or 1, T]`) goes nowhere. In training the losses go to `name`."""
        routing = self(x)
        kept = None if valid is None else valid.expand(x.shape[:2])[..., None].expand_as(routing.chosen)
        tokens = torch.ones_like(x[..., 0], dtype=torch.bool) if valid is None else valid
        if flow.training and name is not None:
            loss = routing.balance(tokens, per_sequence=self.per_sequence) / self.top
            flow.add_loss(name, loss + self.z * routing.size(tokens) if self.z else loss)
        if flow.training and self.capacity is not None:
            kept = first_come(routing.chosen, tokens.expand(x.shape[:2]), self.capacity, routing.chance.shape[-1])
        return Choice(routing.chosen, self.gates(routing), kept)

    def gates(self, routing: Routing) -> Tensor:
        """How much each chosen expert counts, `[*, k]`."""
        return routing.gates(self.renorm)


def first_come(chosen: Tensor, valid: Tensor, capacity: float, experts: int) -> Tensor:
    """Which choices `[B, T, k]` an expert still has room for, by order of tokens, best choice first; bool.

    Of a sequence of n valid tokens an expert takes ⌈capacity · k · n / experts⌉ choices.
    """
    batch, tokens, top = chosen.shape
    queue = torch.arange(batch, device=chosen.device)[:, None, None] * experts + chosen
    queue = queue.masked_fill(~valid[..., None], batch * experts).flatten()
    order = queue.argsort(stable=True)
    load = torch.zeros_like(queue[:1]).expand(batch * experts + 1).scatter_add(0, queue, torch.ones_like(queue))
    turn = torch.arange(len(queue), device=chosen.device) - (load.cumsum(0) - load)[queue[order]]
    turn = torch.empty_like(turn).scatter(0, order, turn).view(batch, tokens, top)
    room = (capacity * top * valid.sum(-1).double() / experts).ceil()
    return (turn < room[:, None, None]) & valid[..., None]
