"""What one pass carries: rows of a site, the channel between layers, and the scratchpad that hooks read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor

from manyheads.core.mask import Axis, Mask

View = Literal["expanded", "absorbed"]


@dataclass(frozen=True, eq=False)
class Rows:
    """Cached entries of a site as the new queries may read them, `[B, heads, S, width]` each, on one key axis.

    shared: rows that come before these and that several sequences have in common (see `PrefixCache`). axes: those of
    entries that have forgotten rows which others keep.
    """

    tensors: Mapping[str, Tensor]
    axis: Axis
    log: Axis | None = None  # all tokens so far, those whose rows are forgotten included (None: axis is all)
    shared: Sequence[Shared] = ()
    axes: Mapping[str, Axis] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device."""
        return Rows(
            {name: row.to(device) for name, row in self.tensors.items()},
            self.axis.to(device),
            None if self.log is None else self.log.to(device),
            [each._replace(rows=each.rows.to(device)) for each in self.shared],
            {name: axis.to(device) for name, axis in self.axes.items()},
        )

    def mixed(self, other: Rows, share: float) -> Rows:
        """Rows of the same tokens: `share` of these, and for the rest the other ones."""
        return replace(self, tensors={name: other[name].lerp(row, share) for name, row in self.tensors.items()})


class Shared(NamedTuple):
    """Rows of batch 1 that sequences first to last - 1 of a batch read, all of them before any new query."""

    rows: Rows
    first: int
    last: int


class RowSource(NamedTuple):
    """What a layer makes its rows of in place of x, `[B, T, D]`, where its queries are still of x.

    share: of what is read, the rest being rows of x itself, which `cache` keeps.
    """

    x: Tensor
    share: float = 1.0
    cache: transformers.Cache | None = None


@dataclass(eq=False)
class Links:
    """The one channel between the layers of a pass: explicit tensors in, explicit tensors out.

    `rows` holds what layers with readers wrote, by layer; `route` says of layers with rows of their own whose rows they
    read in this pass instead (none: their own); `weigh` has, by layer, how a layer's attention weights weigh values
    `[B, G, S, V]` of another, to head outputs; `handed` what select parts hand to later layers, by layer;
    `aux` the auxiliary losses by name; `memo` what is computed once a pass; `residual` the stream before the norm of
    the layer that runs now, where a block hands it on, and `source` what its rows are of; `types` the kind of each new
    token, int `[B or 1, T]` (None: all are of kind 0); `lse`, where a caller gives a dictionary for it, the log-sum-exp
    `[B, H, T]` of sequences' own rows and of each run that they share, by layer. The stack (or the caller of a lone
    layer) owns it; no cache and no module ever does.
    """

    rows: dict[int, Rows] = field(default_factory=dict)
    route: Mapping[int, int] = field(default_factory=dict)
    weigh: dict[int, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    handed: dict[int, Any] = field(default_factory=dict)
    aux: dict[str, Tensor] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)
    residual: Tensor | None = None
    source: RowSource | None = None
    types: Tensor | None = None
    lse: dict[int, list[Tensor]] | None = None

    def move(self, device: torch.device) -> None:
        """Bring the rows to a device, where another layer reads them, and forget what the last one worked out.

        What layers hand on besides stays where it is: models of a family, which alone are converted, hand on rows.
        """
        self.rows = {layer: rows.to(device) for layer, rows in self.rows.items()}
        self.memo.pop("axis", None)


@dataclass(eq=False)
class Flow:
    """Everything a hook may read; made for each call and never stored on a module.

    x: query side `[B, T, D]`; source: key side (x, what `links.source` says, or the context of cross-attention). q:
    axis of the queries; new: axis of the rows written in this pass. mask: as it was given, bool
    `[B or 1, H or 1, T, S]`, else None. state /
    new_state: per-sequence tensors before and after. few: queries are so few that work on all rows belongs on their
    side. moved: keys and values are left as they are cached, and what transforms do at read is done to queries and head
    outputs. turn(x, "q" or "k", axis, back=False): rotates what rotates of it, for parts that place keys themselves.
    described: the pass is only described (`explain`): shapes are there, numbers not.
    """

    x: Tensor
    source: Tensor
    q: Axis
    new: Axis
    links: Links
    layer: int = 0
    mask: Tensor | None = None
    rows: Rows | None = None
    # as before this pass: slots that may still be written, or every row for a projection that `remembers`
    past: Mapping[str, Rows] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    new_state: dict[str, Tensor] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)
    view: View = "expanded"
    few: bool = False
    moved: bool = False
    training: bool = False
    described: bool = False
    turn: Callable[..., Tensor] = lambda x, name, axis, back=False: x

    def add_loss(self, name: str, loss: Tensor) -> None:
        """An auxiliary loss of this layer, found by the trainer in `links.aux['<layer>.<name>']`."""
        self.links.aux[f"{self.layer}.{name}"] = loss


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "x": ((Tensor,), "a tensor [B, T, D]"),
    "positions": ((Tensor, Axis), "a tensor of whole numbers [B or 1, T] or an Axis"),
    "mask": ((Tensor, Mask), "a bool tensor [B, T] or [B, H, T, S], True = may attend, or a Mask"),
    "cache": ((transformers.Cache,), "a manyheads.Cache, or one of transformers"),
    "context": ((Tensor,), "a tensor [B, S, D']"),
    "context_mask": ((Tensor,), "a bool tensor [B, S]"),
    "links": ((Links,), "a manyheads.Links"),
}
"""What a pass takes."""


def check_pass(x: Tensor, dim: int, **given: Any) -> None:
    """Refuse an argument of another kind (each but x may be None), and a batch of nothing."""
    for name, value in (("x", x), *given.items()):
        kinds, said = _KINDS[name]
        if not isinstance(value, kinds) and (value is not None or name == "x"):
            raise ValueError(f"{name} is {said}, not a {type(value).__name__}")
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; this layer takes [batch, tokens, {dim}]")
    if not x.shape[0]:
        raise ValueError("x is a batch of 0; a pass has one sequence or more")
