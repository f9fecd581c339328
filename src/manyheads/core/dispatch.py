"""Tokens sent to the experts that they chose, so that no expert works for others and none is dropped unasked.

N tokens choose k of E experts each, `chosen [N, k]`. An expert is a function of rows and of its slice of some weights
`[E, …]`: `expert(rows, *weights)` takes rows `[…, R, D]` and weights with the same leading axes, so that matmuls serve
one expert and several alike. Inputs are `[N, 1, D]`, or `[N, k, D]` where each choice has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

Expert = Callable[..., Tensor]


class Groups(Protocol):
    """One choice of experts, good for several functions of theirs."""

    def each(self, x: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        """What every choice gives, `[N, k, F]`; zero where it was not kept."""
        ...

    def sum(self, x: Tensor, gates: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        """Σ_j gates_nj expert_(chosen_nj)(x_nj), `[N, F]`."""
        ...


SMALL = 2**17
"""Multiply-adds that cost no more than a matmul of its own does (measured on CPU in float32)."""


def group(chosen: Tensor, experts: int, kept: Tensor | None = None, size: int = 0) -> Groups:
    """The cheapest way for a choice, judged from shapes alone.

    kept: bool `[N, k]`, False where a choice is to come to nothing. size: multiply-adds of one row in one expert.
    """
    tokens, top = chosen.shape
    if _forced is not None:
        return _forced(chosen, experts, kept)
    if tokens * (experts - top) * size <= SMALL * min(experts, tokens * top):
        return Everyone(chosen, experts, kept)
    if torch.compiler.is_compiling() or chosen.device.type != "cpu":
        return Blocks(chosen, experts, kept)
    return Sorted(chosen, experts, kept)


class Sorted:
    """Rows sorted by expert, and one call for each expert that has any: exactly the work of the choices."""

    def __init__(self, chosen: Tensor, experts: int, kept: Tensor | None = None) -> None:
        self.shape, expert = chosen.shape, chosen.flatten()
        if kept is not None:
            expert = expert.masked_fill(~kept.flatten(), experts)
        sizes: list[int] = torch.bincount(expert, minlength=experts)[:experts].tolist()
        self.busy = [(owner, size) for owner, size in enumerate(sizes) if size]
        self.order = expert.argsort(stable=True)[: sum(sizes)]
        self.token = self.order // chosen.shape[1]

    def each(self, x: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        rows = self._run(x, expert, weights)
        out = torch.cat(rows) if rows else self._nothing(x, expert, weights)
        return out.new_zeros(self.shape.numel(), out.shape[-1]).index_copy(0, self.order, out).unflatten(0, self.shape)

    def sum(self, x: Tensor, gates: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        rows = self._run(x, expert, weights)
        width = (rows[0] if rows else self._nothing(x, expert, weights)).shape[-1]
        total, gate = x.new_zeros(len(x), width), gates.to(x.dtype).flatten()[self.order, None]
        for out, token, g in zip(rows, self._split(self.token), self._split(gate), strict=True):
            total = total.index_add_(0, token, out * g)
        return total

    def _run(self, x: Tensor, expert: Expert, weights: tuple[Tensor, ...]) -> list[Tensor]:
        rows = x[:, 0].index_select(0, self.token) if x.shape[1] == 1 else x.flatten(0, 1).index_select(0, self.order)
        if torch.is_grad_enabled():
            slices = [weight.unbind() for weight in weights]  # whose gradients are one tensor, made once
            own = [[weight[owner] for weight in slices] for owner, _ in self.busy]
        else:
            own = [[weight[owner] for weight in weights] for owner, _ in self.busy]
        return [expert(part, *mine) for part, mine in zip(self._split(rows), own, strict=True)]

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([size for _, size in self.busy]) if self.busy else ()

    def _nothing(self, x: Tensor, expert: Expert, weights: tuple[Tensor, ...]) -> Tensor:
        return expert(x.new_zeros(0, x.shape[-1]), *(weight[0] for weight in weights))


class Blocks:
    """Rows of one expert packed into blocks, and one call for all blocks: at most about twice the work.

    No shape depends on data, so that it compiles to one graph and a GPU need not wait.
    """

    def __init__(self, chosen: Tensor, experts: int, kept: Tensor | None = None) -> None:
        self.shape, expert = chosen.shape, chosen.flatten()
        rows, nowhere = len(expert), experts  # where choices go that are not kept
        if kept is not None:
            expert = expert.masked_fill(~kept.flatten(), nowhere)
        self.size = size = max(1, rows // experts)
        load = torch.zeros_like(expert[:1]).expand(experts + 1).scatter_add(0, expert, torch.ones_like(expert))
        blocks = -(-load // size)  # of each expert
        ends = blocks.cumsum(0)
        order = expert.argsort(stable=True)
        sorted_expert = expert[order]
        turn = torch.arange(rows, device=chosen.device) - (load.cumsum(0) - load)[sorted_expert]  # among its expert's
        place = (ends - blocks)[sorted_expert] * size + turn
        self.most = (rows + experts * (size - 1)) // size
        if kept is not None:
            place = torch.where(sorted_expert == nowhere, self.most * size, place)
        self.place = torch.empty_like(order).scatter(0, order, place)
        every = torch.arange(self.most, device=chosen.device)
        self.owner = torch.searchsorted(ends[:experts], every, right=True).clamp_max(experts - 1)

    def each(self, x: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        packed = x.new_zeros(self.most * self.size + 1, x.shape[-1])  # the last row takes those not kept
        packed = packed.index_copy(0, self.place, x.expand(-1, self.shape[1], -1).flatten(0, 1))
        rows = expert(packed[:-1].unflatten(0, (self.most, self.size)), *(weight[self.owner] for weight in weights))
        rows = torch.cat([rows.flatten(0, 1), rows.new_zeros(1, rows.shape[-1])])
        return rows.index_select(0, self.place).unflatten(0, self.shape)

    def sum(self, x: Tensor, gates: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        return (gates.to(x.dtype)[:, None] @ self.each(x, expert, *weights))[:, 0]


class Everyone:
    """Every expert on every token: where all are chosen, or where the work is small beside that of sorting."""

    def __init__(self, chosen: Tensor, experts: int, kept: Tensor | None = None) -> None:
        self.chosen, self.experts, self.kept = chosen, experts, kept

    def each(self, x: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        out = self._run(x, expert, weights).take_along_dim(self.chosen[..., None], 1)
        return out if self.kept is None else out * self.kept[..., None]

    def sum(self, x: Tensor, gates: Tensor, expert: Expert, *weights: Tensor) -> Tensor:
        gates = gates.to(x.dtype)
        gates = self._spread((gates if self.kept is None else gates * self.kept)[..., None])
        return (gates.transpose(1, 2) @ self._run(x, expert, weights))[:, 0]

    def _run(self, x: Tensor, expert: Expert, weights: tuple[Tensor, ...]) -> Tensor:
        """`[N, E, F]`."""
        rows = x.expand(-1, self.experts, -1) if x.shape[1] == 1 else self._spread(x)
        return expert(rows.transpose(0, 1), *weights).transpose(0, 1)

    def _spread(self, x: Tensor) -> Tensor:
        """`[N, k, D]` to `[N, E, D]`, zero where an expert was not chosen."""
        zero = x.new_zeros(len(x), self.experts, x.shape[-1])
        return zero.scatter(1, self.chosen[..., None].expand(-1, -1, x.shape[-1]), x)


_forced: Callable[[Tensor, int, Tensor | None], Groups] | None = None


@contextmanager
def using(kind: Callable[[Tensor, int, Tensor | None], Groups]) -> Iterator[None]:
    """Every `group` inside is of this kind (for tests and benchmarks)."""
    global _forced
    before, _forced = _forced, kind
    try:
        yield
    finally:
        _forced = before
