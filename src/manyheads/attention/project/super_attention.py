"""Optimised, Efficient and Super Attention: raw slices of the input in place of projections."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Mask, causal
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class SuperAttention(Part):
    """Products of two linear maps in a row need one of them: W_V, then W_K, give way to slices X_h `[B, S, d]` of x.

    optimised: q_h = x W_Q^h, k_h = x W_K^h, v_h = X_h (channels h·d to (h+1)·d of x, d = D/H). 3 D² weights, caches 2D.
    efficient: k_h = X_h too, rotated when read. 2 D² weights; x is key and value, so D numbers a token are cached.
    super: as efficient, and v_h = W_A X_h, W_A `[length, length]` acting along the sequence: v'_t = Σ_m A_tm X_m by the
    positions t and m, lower triangular where the layer is causal. Caches 2D (x and v'). 2 D² + length² weights; earlier
    v' never change. Rows of padding and of other packed documents stay out of the sum; a given 4-D mask does not enter
    it. Positions from `length` on raise ValueError. A window hides keys but frees no rows, since new values need all.

    Options: form. length: default the site's max_len. per_head: a W_A for each head, as one of two known
    implementations has it. Choices the paper leaves open: a causal W_A is a full matrix whose upper triangle is masked
    (and has no gradient), from Xavier's uniform; no biases. One public port takes the softmax over queries; it is over
    keys. In cross-attention d is the context's width over H.

    Source: Hosseini et al. 2024, arXiv 2403.01643.
    """

    name: ClassVar[str] = "super-attention"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2403.01643"
    examples: ClassVar = ({"length": 12}, {"form": "efficient"}, {"form": "optimised"})

    form: Literal["optimised", "efficient", "super"] = "super"
    length: int | None = None
    per_head: bool = False

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"cached heads"} | ({"token keys", "final rows"} if self.form == "super" else set()))

    @property
    def hint(self) -> dict[str, str]:
        return {"gives token keys": "super-attention(form=efficient)"}

    def layout(self, heads: Heads, site: Site) -> Heads:
        source = site.context_dim or heads.dim
        if source % heads.q:
            raise OptionError(f"super-attention: {source} channels do not cut into {heads.q} slices")
        if self.form != "super" and (self.length is not None or self.per_head):
            raise OptionError(f"super-attention: length and per_head are about W_A, which form={self.form} has not")
        if self.form == "super" and (self.length or site.max_len or 0) < 1:
            raise OptionError("super-attention: give length, the longest context (at least 1)")
        if self.length is not None and (site.max_len or 0) > self.length:
            raise OptionError(f"super-attention: length={self.length} is below the {site.max_len} tokens of the site")
        width = source // heads.q
        return Heads(heads.dim, heads.q, heads.q, width, width, heads.q, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> SuperAttentionProject:
        return SuperAttentionProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        own, rows = site.kv_source is None, after.kv * after.qk_width
        weights = after.dim * (rows + after.out * after.out_width)
        weights += rows * rows if own and self.form == "optimised" else 0
        length = (self.length or site.max_len or 0) if own and self.form == "super" else 0
        align = length**2 * (after.kv if self.per_head else 1)
        cached = Fraction(rows * (1 if self.form == "efficient" else 2) if own else 0)
        dropped = () if self.form == "super" else windows(after.keep, cached)
        return Cost(weights + align, cached, 0, 2 * (weights + length * rows), 4 * rows, dropped)


class SuperAttentionProject(Project):
    def __init__(self, options: SuperAttention, heads: Heads, site: Site) -> None:
        super().__init__()
        self.form, self.heads, self.turns = options.form, heads.q, heads.rotary
        self.causal = site.causal and not site.cross
        self.rotate = "write" if self.form == "optimised" else "read"
        self.remembers = self.form == "super"
        rows = heads.kv * heads.qk_width
        self.q_proj = nn.Linear(heads.dim, rows, bias=False)
        if site.kv_source is None:
            entry = Entry(heads.kv, heads.qk_width)
            self.entries = {"x": entry} if self.form == "efficient" else {"x": entry, "v": entry}
            if self.form == "optimised":
                self.k_proj = nn.Linear(rows, rows, bias=False)
                self.entries = {"k": entry._replace(role="k"), "v": entry._replace(role="v")}
            if self.form == "super":
                self.length = options.length or site.max_len or 0
                shape = (heads.kv if options.per_head else 1, self.length, self.length)
                self.align = nn.Parameter(torch.empty(shape).uniform_(-1, 1) * (3 / self.length) ** 0.5)
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=False)

    def _slices(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def queries(self, flow: Flow) -> Tensor:
        return self._slices(self.q_proj(flow.x))

    def write(self, flow: Flow) -> dict[str, Tensor]:
        x = self._slices(flow.source)
        if self.form == "optimised":
            return {"k": self._slices(self.k_proj(flow.source)), "v": x}
        return {"x": x} if self.form == "efficient" else {"x": x, "v": self._aligned(x, flow)}

    def _aligned(self, x: Tensor, flow: Flow) -> Tensor:
        """v' of the new tokens, from the raw rows of all tokens up to them."""
        rows, axis, new = x, flow.new, flow.new
        if new.start is not None and new.given_position is None:
            last = new.start + new.length - 1
        else:
            last = int(new.position.max())
        if last >= self.length:
            raise ValueError(f"super-attention: position {last} is beyond W_A of length={self.length}")
        if "x" in flow.past:
            past = flow.past["x"]
            rows, axis = torch.cat([past[""], x], 2), past.axis.cat(new)
        to, of = new.position[:, :, None], axis.position[:, None]
        mix = self.align[:, to, of].transpose(0, 1)  # [B or 1, 1 or H, T, S]
        mix = mix * Mask(new, axis, (causal,) if self.causal else ()).tile()
        mix = mix * (of <= to)[:, None] if self.causal else mix
        return torch.einsum("bgts,bghsd->bghtd", mix, rows.unflatten(1, (mix.shape[1], -1))).flatten(1, 2)

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        assert flow.rows is not None
        k, v = {"optimised": ("k", "v"), "efficient": ("x", "x"), "super": ("x", "v")}[self.form]
        return q, flow.rows[k], flow.rows[v], flow.rows.axis
