"""Names for combinations that papers introduce as one mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyheads.core.part import Part
from manyheads.core.registry import register_preset
from manyheads.core.spec import Spec


@register_preset
@dataclass(frozen=True)
class GDA:
    """Grouped differential attention: `differential` and its `head_norm`.

    Options: ratio of signal to noise heads (the authors' large model has 4; 1 is plain differential attention).

    Source: arXiv 2510.06949.
    """

    name: ClassVar[str] = "gda"
    paper: ClassVar[str] = "arXiv 2510.06949"

    ratio: int = 1
    offset: int = 0

    def parts(self) -> tuple[Part, ...]:
        return Spec.parse(
            f"differential(ratio={self.ratio}, offset={self.offset}) + "
            f"head_norm(scale=differential, offset={self.offset})"
        ).parts
