"""What one layer did in one pass, recomputed from its queries and keys when, and as far as, it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from manyheads.core.kernel import Bias, Call, Out, ScoreProgram, attend
from manyheads.core.kernels.tiled import TILE_BYTES, maps_of
from manyheads.core.mask import Axis, Mask, Rule
from manyheads.core.part import BoundProgram, Program

COLUMNS = 64
"""Unit values a pass, where weights are what heads return for them."""


class CaptureError(RuntimeError):
    """Something asked for does not exist in a layer, or cannot be computed from what is known of it."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Query rows of a layer's maps `[B, H, t, S]` over all keys; scores are -inf where a key is hidden."""

    rows: slice
    scores: Tensor
    weights: Tensor
    visible: Tensor


@dataclass(eq=False)
class Look:
    """One pass of one layer.

    axis: of the queries, T of them, as outputs have them. call: the attention problem as it was solved, q
    `[B, H, T, E]`, k `[B, G, S, E]`, v `[B, G, S, V]`, its mask with the axes of queries and keys. read: what attention
    returned `[B, H', T, V']`. out: head outputs as the output projection takes them. again: solves another problem the
    way the layer does. program: score programs. project: from head outputs to the layer's output. unlike: why one map
    of scores does not say what the layer's heads do, if so. none: why it has no weights at all. exact: False where
    weights were dropped at random, in training. tokens: ids of the tokens `[B, T]`, where they are known.
    """

    layer: int
    name: str
    axis: Axis
    call: Call
    read: Tensor
    out: Tensor
    again: Callable[[Call], Out]
    program: Sequence[ScoreProgram] = ()
    project: Callable[[Tensor], Tensor] | None = None
    unlike: str | None = None
    none: str | None = None
    view: str = "expanded"
    exact: bool = True
    tokens: Tensor | None = None

    @property
    def heads(self) -> int:
        """Heads with an output of their own."""
        return self.out.shape[1]

    @property
    def mask(self) -> Mask:
        return self.call.mask

    @property
    def fused(self) -> bool:
        """Whether weights are the softmax of scores alone, so that fused passes give masses and moments."""
        return self.unlike is None and not self.none and not self.program and not self.call.program

    @cached_property
    def lse(self) -> Tensor:
        """log Σ exp(score) over the visible keys, `[B, H, T]`; -inf where a query sees none."""
        return self.lse_of(self.call)

    def lse_of(self, call: Call) -> Tensor:
        """The log-sum-exp of another problem, a key set's for example; values, which it does not read, are narrow."""
        self._scored()
        if self.fused:
            found = attend(replace(call, v=call.v[..., :1]), need_lse=True).lse
            assert found is not None
            return found
        normalised = [p for p in (*self.program, *call.program) if _overrides(p, "normalise")]
        if normalised:
            raise CaptureError(
                f"{self.name}: its weights are no softmax ({normalised[0]}), so they have no log-sum-exp"
            )
        rows = [tile.scores.logsumexp(-1) for tile in self.tiles()]
        return torch.cat(rows, 2)

    def tiles(self, heads: Sequence[int] | None = None, rows: Sequence[int] | None = None) -> Iterator[Tile]:
        """The maps, a tile of query rows after the other, few enough that a tile is small."""
        self._scored()
        call = self.call
        if self.fused and heads is not None:
            call, heads = some_heads(call, heads), None
        halo = max([0, *(p.halo for p in (*self.program, *call.program))])
        batch, count, length, keys = *call.q.shape[:3], call.k.shape[2]
        step = max(1, TILE_BYTES // (4 * max(1, batch * count * keys * call.q.element_size())))
        for cut in _runs(range(length) if rows is None else rows, step):
            maps = maps_of(call, (*self.program, *call.program), cut, halo)
            visible = maps.visible.expand(*maps.scores.shape[:1], -1, *maps.scores.shape[2:])
            scores = maps.scores.masked_fill(~visible, -torch.inf)
            parts = []
            for x, fill in ((scores, -torch.inf), (maps.weights, 0.0), (visible, False)):
                whole = x.new_full((*x.shape[:3], keys), fill)
                whole[..., maps.keys] = x
                parts.append(whole if heads is None or x.shape[1] == 1 else whole[:, list(heads)])
            yield Tile(cut, *parts)

    def weights(self, heads: Sequence[int] | None = None, rows: Sequence[int] | None = None) -> Iterator[Tile]:
        """As `tiles`, but for any layer that has weights: where a head's map is joined of several problems, what it
        returns for unit vectors as values is its map (its scores are then those of the map, log weights)."""
        self._weighted()
        if self.unlike is None:
            yield from self.tiles(heads, rows)
            return
        picked = list(range(self.read.shape[1]) if heads is None else heads)
        wanted = list(range(self.axis.length) if rows is None else rows)
        (batch, groups, keys, _), columns = self.call.v.shape, []
        for first in range(0, keys, COLUMNS):
            width = min(COLUMNS, keys - first)
            unit = torch.zeros(keys, width, dtype=self.call.v.dtype, device=self.call.v.device)
            unit[range(first, first + width), range(width)] = 1
            call = replace(self.call, v=unit.expand(batch, groups, keys, width))
            try:
                o = self.again(call).o
            except (RuntimeError, IndexError) as error:
                raise CaptureError(
                    f"{self.name}: its values decide what it attends to, or have a width of their own, "
                    f"so that weights cannot be told ({self.unlike})"
                ) from error
            columns.append(o[..., :width][:, picked][:, :, wanted])
        weights, at = torch.cat(columns, -1), 0
        for cut in _runs(wanted, len(wanted)):
            some = weights[:, :, at : at + cut.stop - cut.start]
            visible = self.mask.tile(cut) if self._alike else some != 0
            visible = visible if visible.shape[1] in (1, some.shape[1]) else some != 0
            tile = Tile(cut, some.abs().log(), some, visible.expand(batch, *visible.shape[1:]))
            self.check(tile, heads)
            yield tile
            at += cut.stop - cut.start

    def mass(self, keys: Rule) -> Tensor:
        """Σ of a query's weights over the keys M of a rule, `[B, H, T]`: exp(lse(M) - lse), both fused.

        Not a number where no visible key is in M.
        """
        some = self.exists(keys)
        if self.fused and self._alike:
            within = self.lse_of(replace(self.call, mask=self.mask & keys))
            mass = (within - self.lse).exp().masked_fill(within == -torch.inf, 0.0)
        else:
            mass = self._summed(lambda tile: tile.weights.masked_fill(~self._in(keys, tile), 0.0).sum(-1))
        return mass.masked_fill(~some, torch.nan)

    def moment(self, values: Tensor) -> Tensor:
        """Σ_j A_ij f_j, `[B, H, T, F]`, of values f `[B or 1, 1, S, F]`: one fused pass with values f."""
        if self.fused:
            dtype, shape = torch.promote_types(self.call.q.dtype, values.dtype), self.call.k.shape[:3]
            q, k, v = (x.to(dtype) for x in (self.call.q, self.call.k, values.expand(*shape, -1)))
            return self.again(replace(self.call, q=q, k=k, v=v)).o
        return self._summed(lambda tile: tile.weights.to(values.dtype) @ values)

    def exists(self, keys: Rule | None = None) -> Tensor:
        """Which queries see a key (of a rule), bool `[B or 1, H or 1, T]`."""
        if not self._alike:
            return self._summed(lambda tile: (tile.visible if keys is None else self._in(keys, tile)).any(-1))
        mask = self.mask if keys is None else self.mask & keys
        return self._rows_of(mask, lambda seen: seen.any(-1))

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each query sees, `[B or 1, H or 1, T]`."""
        if not self._alike:
            return self._summed(lambda tile: tile.visible.sum(-1))
        return self._rows_of(self.mask, lambda seen: seen.sum(-1))

    @property
    def _alike(self) -> bool:
        """Whether the problem has the rows that outputs have; parts may make several rows of a query."""
        return self.mask.q.length == self.axis.length

    def _rows_of(self, mask: Mask, change: Callable[[Tensor], Tensor]) -> Tensor:
        step = max(1, TILE_BYTES // max(1, 16 * mask.k.length))
        cuts = [slice(at, at + step) for at in range(0, mask.q.length, step)]
        return torch.cat([change(mask.tile(cut)) for cut in cuts], -1)

    def uniform(self) -> Look:
        """The same pass if every query spread its weights evenly over what it sees: what chance gives."""
        q, mask = self.call.q, replace(self.mask, q=self.axis) if not self._alike else self.mask
        q = q.new_zeros(*q.shape[:2], self.axis.length, q.shape[3])
        call = replace(self.call, q=q, mask=mask, bias=None, level=None, softcap=None, program=())
        return replace(self, call=call, program=(), unlike=None, again=attend)

    def contributions(self) -> Iterator[tuple[int, Tensor]]:
        """What each head adds to the layer's output, `[B, T, D]`: W_O[h] o_h."""
        if self.project is None:
            raise CaptureError(f"{self.name}: its output projection is not known")
        nothing = torch.zeros_like(self.out)
        bias = self.project(nothing)
        for head in range(self.heads):
            alone = nothing.clone()
            alone[:, head] = self.out[:, head]
            yield head, self.project(alone) - bias

    def check(self, tile: Tile, heads: Sequence[int] | None) -> None:
        """That the weights times the values are what the layer returned: it may do more than is known here."""
        if not self.exact or any(_overrides(p, "read") for p in (*self.program, *self.call.program)):
            return
        read = self.read if heads is None else self.read[:, list(heads)]
        v, beside = self.call.v, self.read.shape[-1] // max(1, self.call.v.shape[-1])
        if beside > 1:
            v = v.unflatten(1, (-1, beside)).transpose(2, 3).flatten(3)
        if self.read.shape[1] % v.shape[1] or v.shape[-1] != read.shape[-1]:
            return
        index = range(self.read.shape[1]) if heads is None else heads
        v = v[:, [head // (self.read.shape[1] // v.shape[1]) for head in index]].float()
        want, got = read[:, :, tile.rows].float(), tile.weights.float() @ v
        seen = tile.visible.any(-1, keepdim=True)
        off = ((got - want).abs() * seen).amax() if want.numel() else want.new_zeros(())
        low = read.dtype in (torch.float16, torch.bfloat16)
        if off > (0.05 if low else 1e-3) * (1 + want.abs().amax()):
            if self.unlike:
                raise CaptureError(
                    f"{self.name}: what its heads return is no weighted sum of values of their own, so that weights "
                    f"cannot be told ({self.unlike})"
                )
            raise CaptureError(
                f"{self.name}: the weights computed from q and k do not give what its heads returned (off by "
                f"{off.item():.2g}), so something in it changes scores in a way that is not known here"
            )

    def _summed(self, change: Callable[[Tile], Tensor]) -> Tensor:
        return torch.cat([change(tile) for tile in self.weights()], 2)

    def _in(self, keys: Rule, tile: Tile) -> Tensor:
        return tile.visible & keys(self.axis[tile.rows], self.mask.k)

    def _weighted(self) -> None:
        if self.none:
            raise CaptureError(f"{self.name} has no weights: {self.none}")

    def _scored(self) -> None:
        self._weighted()
        if self.unlike:
            raise CaptureError(f"{self.name} has no one map of scores: {self.unlike}")


def _overrides(program: ScoreProgram, hook: str) -> bool:
    if isinstance(program, BoundProgram):
        return getattr(type(program.piece), hook) is not getattr(Program, hook)
    return bool(getattr(program, f"own_{hook}", False))


def _runs(rows: Sequence[int], step: int) -> Iterator[slice]:
    """Neighbouring rows as slices of at most `step`."""
    first = last = None
    for row in rows:
        if first is None or last is None:
            first = last = row
        elif row == last + 1 and row - first < step:
            last = row
        else:
            yield slice(first, last + 1)
            first = last = row
    if first is not None and last is not None:
        yield slice(first, last + 1)


def some_heads(call: Call, heads: Sequence[int]) -> Call:
    """The call of some query heads, each with its key head."""
    heads, each = list(heads), call.q.shape[1] // call.k.shape[1]
    if heads == list(range(call.q.shape[1])):
        return call

    def pick(x: Tensor) -> Tensor:
        return x if x.shape[1] == 1 else x[:, heads]

    def only(rule: Rule) -> Rule:
        return lambda q, k: pick(rule(q, k))

    def lean(bias: Bias | None) -> Bias | None:
        return None if bias is None else lambda q, k: pick(bias(q, k))

    run = slice(heads[0], heads[-1] + 1)
    if heads == list(range(run.start, run.stop)):
        mask = call.mask.of(run)
    else:
        mask = replace(call.mask, rules=tuple(map(only, call.mask.rules)))
    k, v = (x if x.shape[1] == 1 else x[:, [head // each for head in heads]] for x in (call.k, call.v))
    return replace(call, q=call.q[:, heads], k=k, v=v, mask=mask, bias=lean(call.bias), level=lean(call.level))
