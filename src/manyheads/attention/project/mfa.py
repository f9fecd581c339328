"""Multi-matrix factorisation attention, and its form that reuses keys as values."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.attention.latent import RMSNorm
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class MFA(Part):
    """One wide key and value head, many query heads through a shared low-rank map.

    u = RMSNorm(x S_q) `[B, T, q_rank]`, q = u Q `[B, H, T, C]`; k = x S_k, v = x S_v `[B, 1, S, C]`; scores over √C.
    Caches 2C numbers a token.

    key_reuse: no S_v; v_j = M k_j with M = I + diag(α) N on the un-rotated key, α = 0 at the start. Only the un-rotated
    key is cached (C numbers a token); rotation happens when it is read, and M is applied once to each head's output,
    which is the same sum.

    Options: width C (default 2 head widths). q_rank C_q (default C). norm: of u; both known implementations have it,
    the paper's formula does not. How rotation and reuse meet is not stated in the paper: the value is taken before it.

    Source: Hu et al. 2024, arXiv 2412.19255.
    """

    name: ClassVar[str] = "mfa"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2412.19255"
    examples: ClassVar = ({"width": 8}, {"key_reuse": True, "q_rank": 5})

    width: int | None = None
    q_rank: int | None = None
    key_reuse: bool = False
    norm: bool = True

    @property
    def gives(self) -> frozenset[str]:
        return frozenset() if self.key_reuse else frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} if self.key_reuse else ())

    @property
    def hint(self) -> dict[str, str]:
        return {"gives head keys": "mfa(key_reuse=false)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.width is None and heads.dim % heads.q:
            raise OptionError(f"mfa: dim={heads.dim} is no multiple of heads={heads.q}; give width")
        width = 2 * (heads.dim // heads.q) if self.width is None else self.width
        if width < 1 or (self.q_rank is not None and self.q_rank < 1):
            raise OptionError(f"mfa: width={width} and q_rank={self.q_rank} must be positive")
        return Heads(heads.dim, heads.q, 1, width, width, heads.q, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> MFAProject:
        return MFAProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        c, rank, source = after.qk_width, self.q_rank or after.qk_width, site.context_dim or after.dim
        own, stored = site.kv_source is None, 1 if self.key_reuse else 2
        weights = after.dim * rank + rank * after.q * c + after.out * after.out_width * after.dim
        weights += source * c * stored if own else 0
        extra = rank * self.norm + (c * c + c if self.key_reuse else 0)
        cached = Fraction(c * stored if own else 0)
        return Cost(weights + extra, cached, 0, 2 * weights, 4 * after.q * c, windows(after.keep, cached))


class MFAProject(Project):
    def __init__(self, options: MFA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.heads, self.width, self.reuse = heads.q, heads.qk_width, options.key_reuse
        self.turns = heads.rotary
        rank, source = options.q_rank or self.width, site.context_dim or heads.dim
        self.q_a_proj = nn.Linear(heads.dim, rank, bias=False)
        self.q_a_norm = RMSNorm(rank, 1e-6) if options.norm else nn.Identity()
        self.q_b_proj = nn.Linear(rank, heads.q * self.width, bias=False)
        self.rotate, self.undoes = "read" if self.reuse else "write", self.reuse
        if site.kv_source is None:
            self.k_proj = nn.Linear(source, self.width, bias=False)
            self.entries = {"k": Entry(1, self.width, None if self.reuse else "k")}
            if not self.reuse:
                self.v_proj = nn.Linear(source, self.width, bias=False)
                self.entries["v"] = Entry(1, self.width, "v")
        if self.reuse:
            self.value_map = nn.Linear(self.width, self.width, bias=False)
            self.value_gate = nn.Parameter(torch.zeros(self.width))
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=False)

    def queries(self, flow: Flow) -> Tensor:
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(flow.x)))
        return q.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        rows = {"k": self.k_proj(flow.source)[:, None]}
        return rows if self.reuse else rows | {"v": self.v_proj(flow.source)[:, None]}

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        k = flow.rows["k"]
        return q, k, k if self.reuse else flow.rows["v"], flow.rows.axis

    def undo(self, o: Tensor, flow: Flow) -> Tensor:
        return o + self.value_gate * self.value_map(o) if self.reuse else o
