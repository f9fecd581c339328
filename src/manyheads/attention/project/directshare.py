"""Head-wise shared weights: heads of later layers use the weights of similar heads of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from manyheads.attention.grouped import Biases, grouped_layout
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.part import Heads, OptionError, Part, Project, Site, borrow
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DirectShare(Part):
    """`gqa` with weights from a bank of head groups: W_q, W_k, W_v and columns of W_O of group g are those of roots[g].

    A group is a key head with its value head and the H/G query heads that read it; for multi-head attention it is a
    head. Group g of layer l has the number l·G + g. All layers with one root compute with the very same tensors, which
    a stack keeps and saves once; activations and caches are each layer's own: 2·G·d numbers a token, as in `gqa`.

    Options: kv_heads G, head_dim, bias, scale as in `gqa` (biases of q, k and v are shared with their weights). roots:
    the group whose weights each group has; by default its own. output: whether columns of W_O are shared too (where a
    later part makes other outputs of the heads, W_O is the layer's own).

    Which heads of a trained model may share is found by `manyheads.convert.directshare`.

    Source: Cao et al. 2024, arXiv 2402.11819.
    """

    name: ClassVar[str] = "directshare"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2402.11819"
    examples: ClassVar = (
        {"kv_heads": 2},
        {"roots": (0, 5, 5, 2), "head_dim": 8, "bias": "qkvo"},
        {"kv_heads": 2, "roots": (3, 1), "output": False, "bias": "qkv"},
    )

    kv_heads: int | None = None
    head_dim: int | None = None
    bias: Biases = "none"
    scale: float | None = None
    roots: tuple[int, ...] | None = None
    output: bool = True

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        made = grouped_layout(self.name, heads, self.kv_heads, self.head_dim, self.scale)
        if self.roots is not None and (len(self.roots) != made.kv or min(self.roots) < 0):
            raise OptionError(f"directshare: roots={[*self.roots]} must number a group for each of {made.kv} key heads")
        if site.kv_source is not None:
            raise OptionError("directshare: a layer that reads another's rows has no keys whose weights it could share")
        return made

    def roots_of(self, heads: Heads, site: Site) -> tuple[int, ...]:
        """With the default filled in."""
        return self.roots or tuple(site.layer * heads.kv + group for group in range(heads.kv))

    def shares_output(self, heads: Heads) -> bool:
        return self.output and (heads.out, heads.out_width) == (heads.q, heads.v_width)

    def build(self, before: Heads, after: Heads, site: Site) -> DirectShareProject:
        return DirectShareProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        source, width, each = site.context_dim or after.dim, after.qk_width, after.q // after.kv
        roots = dict.fromkeys(self.roots_of(after, site))
        out = after.out * after.out_width
        group = (each * after.dim + 2 * source) * width + (each + 2) * width * ("qkv" in self.bias)
        output = self.shares_output(after)
        group += after.dim * each * width * output
        own = out * after.dim * (not output) + after.dim * (self.bias in ("o", "qkvo"))
        weights = after.dim * (after.q * width + out) + 2 * source * after.kv * width
        pair, cached = 4 * after.q * width, 2 * after.kv * width
        shared = () if site.shared is None else tuple((_name(root), group) for root in roots)
        total = len(roots) * group + own
        return Cost(total, Fraction(cached), 0, 2 * weights, pair, windows(after.keep, Fraction(cached)), shared)


class HeadGroup(nn.Module):
    """The weights of a key head, its value head and the query heads that read it."""

    def __init__(self, dim: int, source: int, each: int, width: int, bias: bool, output: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(dim, each * width, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(source, width, bias=bias) for _ in range(2))
        if output:
            self.o_proj = nn.Linear(each * width, dim, bias=False)


class DirectShareProject(Project):
    def __init__(self, options: DirectShare, heads: Heads, site: Site) -> None:
        super().__init__()
        self.turns, self.width, self.shares_output = heads.rotary, heads.qk_width, options.shares_output(heads)
        self.roots = options.roots_of(heads, site)
        each, source = heads.q // heads.kv, site.context_dim or heads.dim

        def make() -> HeadGroup:
            return HeadGroup(heads.dim, source, each, heads.qk_width, "qkv" in options.bias, self.shares_output)

        for root in dict.fromkeys(self.roots):
            borrow(self, f"group{root}", site, _name(root), make)
        self.entries = {name: Entry(heads.kv, heads.qk_width, name) for name in "kv"}
        out_bias = options.bias in ("o", "qkvo")
        if not self.shares_output:
            self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=out_bias)
        self.o_bias = nn.Parameter(torch.zeros(heads.dim)) if self.shares_output and out_bias else None

    @property
    def groups(self) -> list[HeadGroup]:
        """The weights of each group, first to last; some may be the same."""
        return [cast(HeadGroup, getattr(self, f"group{root}")) for root in self.roots]

    def _rows(self, name: str, x: Tensor) -> Tensor:
        rows = torch.cat([getattr(group, name)(x) for group in self.groups], -1)
        return rows.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def queries(self, flow: Flow) -> Tensor:
        return self._rows("q_proj", flow.x)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {"k": self._rows("k_proj", flow.source), "v": self._rows("v_proj", flow.source)}

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        if not self.shares_output:
            return super().output(o, flow)
        parts = o.transpose(1, 2).flatten(2).chunk(len(self.roots), -1)
        y = torch.stack([group.o_proj(part) for group, part in zip(self.groups, parts, strict=True)]).sum(0)
        return y if self.o_bias is None else y + self.o_bias


def _name(root: int) -> str:
    return f"directshare {root}"
