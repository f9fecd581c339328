"""A router: which few of many experts serve a token, how much each counts, and what keeps the load even.

Shapes: `[*, E]` are scores of E experts for each token, `[*, k]` its k chosen ones.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """logits and chance = softmax(logits) `[*, E]`; chosen `[*, k]`, the experts of each token."""

    logits: Tensor
    chance: Tensor
    chosen: Tensor

    def gates(self, renorm: Literal["none", "detach", "full"] = "none") -> Tensor:
        """The chances of the chosen experts `[*, k]`; renorm divides by their sum, `detach` without its gradient."""
        kept = self.chance.gather(-1, self.chosen)
        if renorm == "none":
            return kept
        total = kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).eps)
        return kept / (total.detach() if renorm == "detach" else total)

    def spread(self, gates: Tensor) -> Tensor:
        """Gates of the chosen experts over all experts, zero for the others, `[*, E]`."""
        return torch.zeros_like(self.chance).scatter(-1, self.chosen, gates)

    def balance(self, valid: Tensor) -> Tensor:
        """E Σ_e mean(chance_e) mean(is chosen_e) over valid tokens: k when all is even, E when one takes all (k = 1).

        Over k it is the loss of Switch Transformer, arXiv 2101.03961.
        """
        chosen = self.spread(torch.ones_like(self.chosen, dtype=self.chance.dtype))
        chance, load = (_mean(x, valid) for x in (self.chance, chosen))
        return self.chance.shape[-1] * (chance * load).sum()

    def size(self, valid: Tensor) -> Tensor:
        """Mean of logsumexp(logits)² over valid tokens, which keeps logits small (the z-loss of arXiv 2202.08906)."""
        return _mean(self.logits.logsumexp(-1, keepdim=True).square(), valid).sum()


def _mean(x: Tensor, valid: Tensor) -> Tensor:
    """Over valid tokens, bool `[B or 1, T]`; `[B, T, E]` to `[E]`."""
    tokens = valid.expand(x.shape[:2])[..., None].to(x.dtype)
    return (x * tokens).sum((0, 1)) / tokens.sum()


def route(logits: Tensor, top: int, sample: int = 0) -> Routing:
    """The `top` likeliest experts; of these, `sample` are drawn by chance from all but the top - sample best."""
    chance = logits.softmax(-1)
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

    def __init__(self, dim: int, experts: int, top: int, *, noisy: bool = False, sample: int = 0) -> None:
        super().__init__()
        self.top, self.sample = top, sample
        self.score = nn.Linear(dim, experts, bias=False)
        self.noise = nn.Linear(dim, experts, bias=False) if noisy else None
        nn.init.normal_(self.score.weight, std=0.01 if top < experts else 0.0)

    def forward(self, x: Tensor) -> Routing:
        wide = torch.promote_types(x.dtype, torch.float32)  # a choice is no place for rounding
        logits = F.linear(x.to(wide), self.score.weight.to(wide))
        if self.training and self.noise is not None:
            logits = logits + torch.randn_like(logits) * (F.softplus(self.noise(x)) + 0.01)
        return route(logits, self.top, self.sample if self.training else 0)


def dispatch(x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each token through its own experts: y_nj = x_nj W_e with e = chosen_nj.

    x `[N, k or 1, D]`, weight `[E, D, F]`, chosen `[N, k]` to y `[N, k, F]`. Rows that go to one expert are packed into
    blocks, and blocks are one batched matmul: about the work of N·k rows (twice that at most), whatever E. No shape
    depends on data.
    """
    (tokens, top), experts = chosen.shape, len(weight)
    if top == experts:  # everyone serves everyone: only the order of experts is to be kept
        if x.shape[1] > 1:
            x = x.take_along_dim(chosen.argsort(-1)[..., None], 1)
        y = torch.einsum("ned,edf->nef", x.expand(-1, experts, -1), weight)
        return y.take_along_dim(chosen[..., None], 1)
    rows, expert = x.expand(-1, top, -1).flatten(0, 1), chosen.flatten()
    size = max(1, len(expert) // experts)
    load = torch.zeros_like(expert[:1]).expand(experts).scatter_add(0, expert, torch.ones_like(expert))
    blocks = -(-load // size)  # of each expert
    ends = blocks.cumsum(0)
    order = expert.argsort(stable=True)
    turn = (
        torch.arange(len(expert), device=x.device) - (load.cumsum(0) - load)[expert[order]]
    )  # among its expert's rows
    place = torch.empty_like(order).scatter(0, order, (ends - blocks)[expert[order]] * size + turn)
    most = (len(expert) + experts * (size - 1)) // size
    packed = rows.new_zeros(most * size, rows.shape[-1]).index_copy(0, place, rows)
    owner = torch.searchsorted(ends, torch.arange(most, device=x.device), right=True).clamp_max(experts - 1)
    y = packed.unflatten(0, (most, size)) @ weight[owner]
    return y.flatten(0, 1)[place].unflatten(0, (tokens, top))
