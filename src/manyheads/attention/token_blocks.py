"""The rows of a pass laid out in the blocks of tokens that they belong to."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.mask import Axis
from manyheads.core.scan import Stream


class TokenBlocks(NamedTuple):
    """What a pass has of each block, its rows in their order: `count` blocks with room for `room` rows each.

    slot: int `[B, T]`, where a row stands, padding behind them all; or, where rows are in order already, how many rows
    of the first block came before them. block, document `[B or 1, count]`: which block of which document each is,
    counted from the first one and from the document of the state. reach: how many blocks the newest documents have.
    """

    slot: Tensor | int
    count: int
    room: int
    block: Tensor
    document: Tensor
    reach: int

    @classmethod
    def along(cls, axis: Axis, stream: Stream, size: int, table: Tensor | None) -> TokenBlocks:
        """Blocks of `size` consecutive positions, or by a table of the block of each position."""
        plain = axis.start is not None and axis.given_position is None and axis.whole and stream.document is None
        if plain and axis.start is not None and table is None:
            first, last = axis.start // size, (axis.start + axis.length - 1) // size
            block = torch.arange(first, last + 1, device=axis.device)[None]
            before = 0 if first == last else axis.start % size
            room = axis.length if first == last else size
            return cls(before, last + 1 - first, room, block, torch.zeros_like(block), last + 1)
        place = torch.where(axis.validity, axis.position, 0)
        block = place // size if table is None else table[place]
        batch = max(len(each) for each in (block, axis.validity, block if stream.document is None else stream.document))
        document = torch.zeros_like(block)
        if stream.document is not None:
            document = (stream.document[:, 1:] != stream.document[:, :-1]).cumsum(-1)
        block, document, valid = (each.expand(batch, -1) for each in (block, document, axis.validity))
        many = int(block.max()) + 1
        last = int(document.max() + 1) * many  # of padding
        key, order = torch.where(valid, document * many + block, last).sort(dim=-1, stable=True)
        fresh = F.pad(key[:, 1:] != key[:, :-1], (1, 0), value=False)
        number = fresh.cumsum(-1)
        row = torch.arange(axis.length, device=key.device).expand(batch, -1)
        within = row - torch.where(fresh, row, 0).cummax(-1).values
        real = key < last
        count, room = (int(torch.where(real, each, 0).max()) + 1 for each in (number, within))
        slot = torch.where(real, number * room + within, count * room)
        of = torch.where(real, number, count)  # of a block that is not there: padding, and less of some sequences
        named = key.new_full((batch, count + 1), last).scatter(1, of, key)[:, :count]
        there = named < last
        block, document = torch.where(there, named % many, 0), torch.where(there, named // many, -1)
        newest = document == document.amax(-1, keepdim=True).clamp_min(0)
        reach = int(torch.where(newest, block + 1, 0).max())
        return cls(torch.empty_like(slot).scatter(1, order, slot), count, room, block, document, reach)

    def lay(self, rows: Tensor) -> Tensor:
        """Rows `[B, heads, T, width]` as `[B, heads, count, room, width]`, zero where there is none."""
        room = self.count * self.room
        if isinstance(self.slot, int):
            return F.pad(rows, (0, 0, self.slot, room - self.slot - rows.shape[2])).unflatten(2, (self.count, -1))
        blank = rows.new_zeros(*rows.shape[:2], room + 1, rows.shape[3])
        laid = blank.scatter(2, self.slot[:, None, :, None].expand_as(rows), rows)
        return laid[:, :, :room].unflatten(2, (self.count, -1))

    def gather(self, laid: Tensor, tokens: int) -> Tensor:
        """The rows of `tokens` in their own order; zero for padding."""
        rows = laid.flatten(2, 3)
        if isinstance(self.slot, int):
            return rows[:, :, self.slot : self.slot + tokens]
        index = self.slot[:, None, :, None].expand(len(rows), rows.shape[1], -1, rows.shape[3])
        return F.pad(rows, (0, 0, 0, 1)).gather(2, index)

    def carry_on(self, past: Tensor, sums: Tensor) -> Tensor:
        """The state of the newest document, `[B, heads, blocks, …]`: sums of its blocks, those of `past` included."""
        held = past.shape[2]
        if isinstance(self.slot, int):  # only the newest blocks change; the others are copied once
            first = self.reach - self.count
            begun = F.pad(past[:, :, first:], (0, 0, 0, 0, 0, self.reach - held))
            return torch.cat([past[:, :, :first], begun + sums], 2)
        newest = self.document.amax(-1).clamp_min(0)
        count = max(self.reach, int(torch.where(newest == 0, held, 0).max()))
        here = self.block[:, None] == torch.arange(count, device=sums.device)[:, None]
        here = (here & (self.document == newest[:, None])[:, None]).to(sums.dtype)
        new = torch.einsum("bij,bgjkv->bgikv", here.expand(len(sums), -1, -1), sums)
        kept = past[:, :, :count] * (newest == 0)[:, None, None, None, None]
        return new + F.pad(kept, (0, 0, 0, 0, 0, count - kept.shape[2]))


def grid_blocks(blocks: tuple[int, ...], sizes: tuple[int, ...], device: torch.device | None) -> Tensor:
    """The block of each position of a grid that is read line by line; blocks, and tokens a block, along each side."""
    block = torch.zeros((), dtype=torch.long, device=device)
    for count, size in zip(blocks, sizes, strict=True):
        block = block[..., None] * count + torch.arange(count * size, device=device) // size
    return block.flatten()


def nearness(blocks: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """1 - distance / largest distance of the row between the middles of blocks, `[M, M]`, rows summing to one."""
    middles = torch.cartesian_prod(*(torch.arange(n) * size for n, size in zip(blocks, sizes, strict=True)))
    middles = middles.double().reshape(-1, len(blocks))
    away = torch.cdist(middles, middles)
    near = 1 - away / away.amax(-1, keepdim=True).clamp_min(1)
    return (near / near.sum(-1, keepdim=True)).float()
