"""Several guesses at numbers, of which only the best need be right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.multi.head import register_head
from manyheads.multi.heads.numbers import RowHead


def choose(errors: Tensor, relaxed: float = 0.0, temperature: float = 0.0) -> tuple[Tensor, Tensor]:
    """Losses `[B]` and winners `[B]` of the errors `[B, K]` of K hypotheses.

    The winner's error alone; with relaxed = ε, (1 - ε) of it and ε / (K - 1) of each other's; with a temperature,
    Σ_k w_k e_k with w = softmax(-e / temperature), through which no gradient goes. Of equal errors the first one wins.

    Source: TimeMCL (arXiv 2506.05515), Relaxed winner-takes-all (Rupprecht et al. 2017).
    """
    count = errors.shape[1]
    winner = errors.detach().argmin(-1)
    if temperature > 0:
        weights = (-errors.detach() / temperature).softmax(-1)
    else:
        best = F.one_hot(winner, count).to(errors.dtype)
        rest = relaxed / (count - 1) if count > 1 else 0.0
        weights = best * (1 - relaxed) + (1 - best) * rest if count > 1 else best
    # A hypothesis of weight 0 is left out rather than multiplied: nothing of it may enter.
    return torch.where(weights > 0, weights * errors, 0.0).sum(-1), winner


@register_head("hypotheses")
@dataclass(frozen=True)
class Hypotheses(RowHead):
    """Outputs `[B, count, size + 1]`: K guesses, and a logit of each being the best; labels `[B, size]` (`[B]` for 1).

    The error of a guess is its mean squared distance over known numbers, the winner is chosen once a row (`choose`);
    to its loss comes `score` times the mean binary cross-entropy of the logits with "is the winner". A place is a row
    with any known number. The prediction is the guess that the logits hold best; `distortion`, the metric, is the root
    of the mean squared distance of the nearest guess.
    """

    better = "lower"
    count: int = 4
    size: int = 1
    relaxed: float = 0.0
    temperature: float = 0.0
    score: float = 0.5
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.count > 0, f"count={self.count}; at least 1")
        self.ask_numbers()
        self.ask(0 <= self.relaxed < 1, f"relaxed={self.relaxed} is not in [0, 1)")
        self.ask(self.temperature >= 0, f"temperature={self.temperature} is negative")
        self.ask(not (self.relaxed and self.temperature), "relaxed and temperature exclude each other")
        self.ask(self.score >= 0, f"score={self.score} is negative")

    def build(self, width: int) -> nn.Module:
        return self.layers(width, self.count * (self.size + 1))

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        return net(features).unflatten(-1, (self.count, self.size + 1))

    def errors(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        """`[n, K]`: of each known row and guess."""
        true, missing = self.scaled(target, known)
        gap = (output[known][..., :-1] - true).masked_fill(missing, 0)
        return (gap**2).sum(-1) / (~missing).sum(-1)

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        loss, winner = choose(self.errors(output, target, known), self.relaxed, self.temperature)
        logits = output[known][..., -1]
        best = F.one_hot(winner, self.count).to(logits.dtype)
        return loss + self.score * F.binary_cross_entropy_with_logits(logits, best, reduction="none").mean(-1)

    def predict(self, output: Tensor) -> Tensor:
        best = output[..., -1].argmax(-1)
        return self.labels(output[torch.arange(len(best), device=best.device), best, :-1])

    def sums(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        errors = self.errors(output, target, known).double() * self.scale**2
        held = errors.gather(1, output[known][..., -1].argmax(-1, keepdim=True))
        return torch.stack([errors.amin(-1).sum(), held.sum(), known.sum().double()])

    def metrics(self, sums: Tensor) -> dict[str, float]:
        near, held, count = sums.tolist()
        pairs = (("distortion", near), ("rmse", held))
        return {name: math.sqrt(value / count) if count else math.nan for name, value in pairs}
