"""Decoupled heads: key heads and value heads in different numbers, each shared by query heads of its own choice."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.grouped import Biases
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DHA(Part):
    """Query head h reads key head a(h) and value head b(h): o_h = softmax(q_h k_a(h)ᵀ / √d) v_b(h).

    k `[B, G_K, S, d]`, v `[B, G_V, S, d]`; caches d·(G_K + G_V) numbers a token. a and b are any maps onto the heads;
    in equal consecutive groups the same for both they are `gqa`. Rows are cached before rotation and spread over the
    heads when read: not at all where a run of query heads shares both, else by one copy.

    Options: k_heads G_K, v_heads G_V (default: all heads). k_map a, v_map b: a head for each query head (default: equal
    groups of consecutive ones). head_dim, bias, scale as in `gqa`.

    The maps, and which heads of a trained model may share, are found by the conversion of the same name.

    Source: Chen et al. 2024, arXiv 2406.06567.
    """

    name: ClassVar[str] = "dha"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2406.06567"
    examples: ClassVar = (
        {"k_heads": 2, "v_heads": 1},
        {"k_heads": 3, "v_heads": 2, "k_map": (0, 1, 1, 2), "v_map": (1, 0, 1, 0), "bias": "qkvo"},
        {"k_heads": 1, "v_heads": 4, "head_dim": 8},
    )

    k_heads: int | None = None
    v_heads: int | None = None
    k_map: tuple[int, ...] | None = None
    v_map: tuple[int, ...] | None = None
    head_dim: int | None = None
    bias: Biases = "none"
    scale: float | None = None

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"})

    def maps(self, heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """a and b with the defaults filled in."""
        return self._map("k", heads), self._map("v", heads)

    def _map(self, side: str, heads: int) -> tuple[int, ...]:
        count, given = getattr(self, f"{side}_heads"), getattr(self, f"{side}_map")
        count = heads if count is None else count
        if given is None:
            if count < 1 or heads % count:
                fits = [n for n in range(1, heads + 1) if heads % n == 0]
                raise OptionError(
                    f"dha: {side}_heads={count} of {heads} query heads are no equal groups; it may be {fits}, or any "
                    f"number with {side}_map"
                )
            return tuple(head * count // heads for head in range(heads))
        if len(given) != heads or {*given} != {*range(count)}:
            raise OptionError(
                f"dha: {side}_map={[*given]} must name a head for each of {heads} query heads, and each of the "
                f"{side}_heads={count} heads, 0 to {count - 1}, at least once"
            )
        return given

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        runs = len(_runs(*self.maps(heads.q)))
        scale = width**-0.5 if self.scale is None else self.scale
        return Heads(heads.dim, heads.q, runs, width, width, heads.q, width, scale, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> DHAProject:
        return DHAProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        own, source, width = site.kv_source is None, site.context_dim or after.dim, after.qk_width
        q, o = after.q * width, after.out * after.out_width
        kv = sum(max(heads) + 1 for heads in self.maps(after.q)) * width if own else 0
        weights = after.dim * (q + o) + source * kv
        biases = (q + kv) * ("qkv" in self.bias) + after.dim * (self.bias in ("o", "qkvo"))
        cached = Fraction(kv)
        return Cost(weights + biases, cached, 0, 2 * weights, 4 * after.q * width, windows(after.keep, cached))


class DHAProject(Project):
    rotate = "read"

    def __init__(self, options: DHA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.heads, self.turns = heads.q, heads.rotary
        maps = dict(zip("kv", options.maps(heads.q), strict=True))
        runs = _runs(*maps.values())
        source, width, qkv = site.context_dim or heads.dim, heads.qk_width, "qkv" in options.bias
        self.q_proj = nn.Linear(heads.dim, heads.q * width, bias=qkv)
        if site.kv_source is None:
            self.k_proj, self.v_proj = (nn.Linear(source, (max(each) + 1) * width, bias=qkv) for each in maps.values())
            self.entries = {side: Entry(max(each) + 1, width) for side, each in maps.items()}
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=options.bias in ("o", "qkvo"))
        self.read = {side: [each[first] for first in runs] for side, each in maps.items()}

    def queries(self, flow: Flow) -> Tensor:
        return self.q_proj(flow.x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        rows = {"k": self.k_proj(flow.source), "v": self.v_proj(flow.source)}
        return {name: row.unflatten(-1, (self.entries[name].heads, -1)).transpose(1, 2) for name, row in rows.items()}

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        return q, self._spread("k", flow.rows["k"]), self._spread("v", flow.rows["v"]), flow.rows.axis

    def _spread(self, side: str, rows: Tensor) -> Tensor:
        """Heads as runs of query heads read them."""
        heads = self.read[side]
        if heads == [*range(rows.shape[1])]:
            return rows
        if len({*heads}) == 1:
            return rows.expand(-1, len(heads), -1, -1)
        return rows.index_select(1, torch.tensor(heads, device=rows.device))


def _runs(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    """The first query head of each of equally long runs that share a key head and a value head; as few as possible."""
    heads = len(a)
    for length in range(heads, 1, -1):
        starts = range(0, heads, length)
        if heads % length == 0 and all(
            len({*zip(a[s : s + length], b[s : s + length], strict=True)}) == 1 for s in starts
        ):
            return [*starts]
    return [*range(heads)]
