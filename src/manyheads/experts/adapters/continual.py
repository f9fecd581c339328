"""What tasks that arrive one after the other do to each other: how much is forgotten, and what a route has to serve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def backward_transfer(scores: Tensor) -> float:
    """BWT = mean_{i < T} (a_Ti - a_ii) of scores a `[T, T]`, a_ji that of task i after training on task j.

    What is forgotten is its negative. Lopez-Paz and Ranzato 2017, arXiv 1706.08840.
    """
    if scores.ndim != 2 or scores.shape[0] != scores.shape[1] or len(scores) < 2:
        raise ValueError(f"scores are [T, T] for two tasks or more, not {[*scores.shape]}")
    return (scores[-1] - scores.diagonal())[:-1].double().mean().item()


class Compositions(NamedTuple):
    """Effective compositions of each route that was taken `[R]`, the share of tokens that took it, and their mean."""

    each: Tensor
    usage: Tensor
    mean: float


def effective_compositions(routes: Tensor, compositions: Tensor) -> Compositions:
    """N_eff(ρ) = 1 / Σ_c p(c | ρ)²: how many kinds of token, evenly mixed, route ρ serves; from arXiv 2602.12587.

    routes `[N, …]`: what each token chose, all slices together (the order of choices within the last dimension does
    not count). compositions int `[N, …]`: what the token carries, one label or several that count jointly.
    """
    tokens = len(routes)
    if not tokens or len(compositions) != tokens:
        raise ValueError(f"{tokens} routes and {len(compositions)} compositions; give one of each for every token")
    routes = routes.reshape(tokens, 1) if routes.ndim == 1 else routes.sort(-1).values.flatten(1)
    route, kind = (each.reshape(tokens, -1).unique(dim=0, return_inverse=True)[1] for each in (routes, compositions))
    kinds = int(kind.max()) + 1
    count = torch.bincount(route * kinds + kind, minlength=(int(route.max()) + 1) * kinds).view(-1, kinds).double()
    usage = count.sum(1)
    each = 1 / (count / usage[:, None]).square().sum(1)
    return Compositions(each, usage / tokens, (each * usage).sum().item() / tokens)
