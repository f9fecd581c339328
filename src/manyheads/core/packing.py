"""Rows kept in few bits: whole numbers and their scales in place of floats."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.check import OptionError

SCALE = torch.bfloat16
"""Of a block, which takes the range of float32: two bytes."""


class Cut(NamedTuple):
    """Channels side by side: bits a number (16: rounded to bfloat16, no scale), channels that share a scale."""

    width: int
    bits: int
    block: int

    @property
    def bytes(self) -> int:
        """Of a row."""
        return -(-self.width * self.bits // 8) + (0 if self.bits == 16 else 2 * (self.width // self.block))

    def pack(self, x: Tensor) -> Tensor:
        """uint8 `[…, bytes]` of x `[…, width]`."""
        if self.bits == 16:
            return x.to(torch.bfloat16).contiguous().view(torch.uint8)
        top, each = 2 ** (self.bits - 1) - 1, 8 // self.bits
        blocks = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, self.block))
        scales = (blocks.abs().amax(-1) / top).to(SCALE)
        wide = scales.to(blocks.dtype)[..., None]
        codes = torch.where(wide > 0, blocks / wide, 0).round().clamp(-top, top).flatten(-2) + 2 ** (self.bits - 1)
        codes = F.pad(codes, (0, -self.width % each)).to(torch.uint8).unflatten(-1, (-1, each))
        packed = (codes << self._shifts(x.device)).sum(-1).to(torch.uint8)
        return torch.cat([packed, scales.contiguous().view(torch.uint8)], -1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers `[…, width]` that bytes stand for."""
        if self.bits == 16:
            return packed.contiguous().view(torch.bfloat16).to(dtype)
        count = -(-self.width * self.bits // 8)
        codes = (packed[..., :count, None] >> self._shifts(packed.device)) & (2**self.bits - 1)
        wide = torch.promote_types(dtype, torch.float32)
        numbers = codes.flatten(-2)[..., : self.width].to(wide) - 2 ** (self.bits - 1)
        scales = packed[..., count:].contiguous().view(SCALE).to(wide)
        return (numbers.unflatten(-1, (-1, self.block)) * scales[..., None]).flatten(-2).to(dtype)

    def _shifts(self, device: torch.device) -> Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)


class Packing(NamedTuple):
    """How rows of an entry are stored, cut by cut: each row for itself, so that nothing depends on its neighbours.

    Of a block, s = max|x| / (2^(bits-1) - 1), in bfloat16, and a number is s · round(x / s). So |x - x̂| ≤ s/2, zero
    stays zero, and what has been through it once is stored without loss.
    """

    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, name: str, *cuts: tuple[int, int, int | None]) -> Packing:
        """From (channels, bits, channels of a block or None for all), those without channels left out.

        Raises:
            OptionError: other numbers of bits than 2, 4, 8 and 16, or blocks that do not divide the channels.
        """
        made = []
        for width, bits, block in cuts:
            block = width if block is None or bits == 16 else block
            if bits not in (2, 4, 8, 16):
                raise OptionError(f"{name}: rows of {bits} bits a number; they may have 2, 4, 8 or 16")
            if width and (block < 1 or width % block):
                fits = [size for size in range(1, width + 1) if width % size == 0]
                raise OptionError(f"{name}: blocks of {block} do not divide {width} channels; they may have {fits}")
            made.append(Cut(width, bits, block))
        return cls(tuple(cut for cut in made if cut.width))

    @property
    def bytes(self) -> int:
        """Of a row of one head."""
        return sum(cut.bytes for cut in self.cuts)

    def pack(self, rows: Tensor) -> Tensor:
        """uint8 `[…, bytes]` of rows `[…, width]`."""
        parts = rows.detach().split([cut.width for cut in self.cuts], -1)
        return torch.cat([cut.pack(part) for cut, part in zip(self.cuts, parts, strict=True)], -1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """What the bytes stand for, `[…, width]`."""
        parts = packed.split([cut.bytes for cut in self.cuts], -1)
        return torch.cat([cut.unpack(part, dtype) for cut, part in zip(self.cuts, parts, strict=True)], -1)

    def through(self, rows: Tensor) -> Tensor:
        """Rows as they are read back, with the gradient of the rows themselves."""
        back = self.unpack(self.pack(rows), rows.dtype)
        return back + (rows - rows.detach()) if rows.requires_grad else back

    def __str__(self) -> str:
        return " and ".join(
            f"{cut.width} in {cut.bits} bits" + (f", {cut.block} a scale" if cut.block < cut.width else "")
            for cut in self.cuts
        )
