"""Dual attention: heads that route relations between tokens, beside heads that route features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.relational import PositionSymbols, Relations, RelativeSymbols, SymbolicAttention
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out
from manyheads.core.part import Heads, OptionError, Part, Project, Site
from manyheads.core.registry import register

WIDEST = 256
"""Channels of values up to which fused kernels are fast; wider sums go in several calls."""


@register
@dataclass(frozen=True)
class DAT(Part):
    """The last `relational` of H heads read relations and symbols; the others are grouped-query attention.

    All heads are d = D/H wide with weights α^h = softmax(q_h k_g(h)ᵀ / √d), rotated as usual. A relational head reads
    o^h_i = Σ_j α^h_ij (r_ij W_r^h + s_j W_s^g(h)); r^ℓ_ij = act((x_i W_q^ℓ)·(x_j W_k^ℓ) / √d_r) are n_r relations,
    never rotated and shared by the n relational heads, d_r = n d / n_r; s `[B, S, D]` are symbols; W_r^h `[n_r, d]`.
    Each kind of head has a square W_O of its own, and the two results stand side by side.

    With act = identity, Σ_j α_ij r^ℓ_ij = q^ℓ_i·(Σ_j α_ij k^ℓ_j) / √d_r: fused attention whose values are relation
    keys. Other acts, and symbols of distances, take the explicit path. Caches 2 G d + n d numbers a token (relation
    keys are not grouped).

    Options:
        relational n (default H/2), relations n_r (default n), kv_heads G: each is read by H/G heads of one kind.
        act. symmetric: W_k^ℓ = W_q^ℓ, so that r_ij = r_ji. joint_out: one full W_O, as the paper's notation suggests.
        symbols: `attention` (a token looks at learned templates, by `symbol_heads`), `position` (a table), or
            `relative` (a table of distances j - i in place of cached symbols). symbol_count: templates (default D),
            positions (default the site's max_len, or 1024), or the distance at which the table ends (likewise).

    Choices: symbols are of the stream before the layer's norm where a block hands it on, as in the authors' code, which
    shares one retriever between layers; here each layer has its own. Relations are averaged before W_r, the same sum.

    Source: Altabaa & Lafferty 2024, arXiv 2405.16727.
    """

    name: ClassVar[str] = "dat"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2405.16727"
    examples: ClassVar = (
        {},
        {"kv_heads": 2, "relations": 4, "symmetric": True, "symbols": "position"},
        {"relational": 1, "relations": 3, "act": "tanh", "symbols": "relative", "symbol_count": 4, "joint_out": True},
    )

    relational: int | None = None
    relations: int | None = None
    kv_heads: int | None = None
    act: Literal["identity", "relu", "sigmoid", "tanh"] = "identity"
    symmetric: bool = False
    symbols: Literal["attention", "position", "relative"] = "attention"
    symbol_count: int | None = None
    symbol_heads: int = 8
    joint_out: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"self"} if self.symmetric else ())

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "paired heads", "plain outputs"})  # a relational head also reads through α ∘ r

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"alike heads"})  # relational heads are attention problems of their own

    @property
    def hint(self) -> dict[str, str]:
        return {"self": "dat(symmetric=false)"}

    def numbers(self, heads: Heads, site: Site) -> tuple[int, int, int]:
        """Relational heads, relations and symbols, with the defaults filled in."""
        count = heads.dim if self.symbols == "attention" else site.max_len or 1024
        relational = heads.q // 2 if self.relational is None else self.relational
        relations = relational if self.relations is None else self.relations
        return relational, relations, count if self.symbol_count is None else self.symbol_count

    def layout(self, heads: Heads, site: Site) -> Heads:
        relational, relations, count = self.numbers(heads, site)
        kv, width = heads.q if self.kv_heads is None else self.kv_heads, heads.dim // heads.q
        if heads.dim % heads.q:
            raise OptionError(f"dat: dim={heads.dim} is no multiple of heads={heads.q}")
        if kv < 1 or heads.q % kv:
            fits = [fit for fit in range(1, heads.q + 1) if heads.q % fit == 0]
            raise OptionError(f"dat: {heads.q} heads cannot share kv_heads={kv}; kv_heads may be {fits}")
        fits = [*range(heads.q // kv, heads.q + (self.symbols != "relative"), heads.q // kv)]
        if relational not in fits:
            raise OptionError(
                f"dat(symbols={self.symbols}): relational={relational} of {heads.q} heads with kv_heads={kv}; "
                f"relational may be {fits or 'nothing'}, and without any it is gqa"
                + (" (at least one head caches values)" if self.symbols == "relative" else "")
            )
        if relations < 1 or relational * width % relations:
            raise OptionError(f"dat: relations={relations} must divide {relational * width}, their width together")
        if self.symbols == "attention" and (self.symbol_heads < 1 or heads.dim % self.symbol_heads):
            raise OptionError(f"dat: symbol_heads={self.symbol_heads} must divide dim={heads.dim}")
        least = site.max_len or 1 if self.symbols == "position" else 1
        if count < least:
            raise OptionError(f"dat(symbols={self.symbols}): symbol_count={count}; at least {least}")
        if self.symmetric and site.kv_source is not None:
            raise OptionError("dat(symmetric=true): one map serves queries and keys; rows of another layer have theirs")
        return Heads(heads.dim, heads.q, kv, width, width, heads.q, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> DATProject:
        return DATProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        n, relations, count = self.numbers(before, site)
        dim, source, d, own = after.dim, site.context_dim or after.dim, after.qk_width, site.kv_source is None
        relative, shared = self.symbols == "relative", n * after.kv // after.q
        weights = dim * (after.q + n) * d + n * relations * d  # queries, W_r
        weights += own * source * (2 * after.kv - shared + n * (not self.symmetric)) * d  # keys, values, relation keys
        weights += (own or relative) * dim * shared * d  # W_s
        weights += sum(out * after.out_width * out * (dim // after.q) for out in self.kinds(after, n))
        extra = 0
        if relative:
            extra = (2 * count + 1) * dim
        elif own:
            extra = count * dim if self.symbols == "position" else source * dim + dim + 2 * count * dim
        cached = Fraction(own * (2 * after.kv - relative * shared + n) * d)
        return Cost(
            weights + extra, cached, 0, 2 * weights + 2 * extra * (own and self.symbols == "attention"),
            4 * after.q * d + 2 * n * (d + n * d), windows(after.keep, cached),
        )  # fmt: skip

    def kinds(self, heads: Heads, relational: int) -> list[int]:
        """How many heads each output projection takes."""
        kinds = (heads.q,) if self.joint_out else (heads.q - relational, relational)
        return [count for count in kinds if count]


class DATProject(Project):
    joins_by_lse = False

    o_proj: nn.ModuleList  # type: ignore[assignment]

    def __init__(self, options: DAT, heads: Heads, site: Site) -> None:
        super().__init__()
        n, self.relations, count = options.numbers(heads, site)
        dim, source, width, own = heads.dim, site.context_dim or heads.dim, heads.qk_width, site.kv_source is None
        shared, relative = n * heads.kv // heads.q, options.symbols == "relative"
        self.width, self.sensory, self.kv_sensory = width, heads.q - n, heads.kv - shared
        self.scale, self.turns = (n * width // self.relations) ** -0.5, heads.rotary

        def to(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs * width, bias=False)

        self.q_proj, self.relation_q_proj = to(dim, heads.q), to(dim, n)
        self.v_proj = self.symbol_proj = None
        if own:
            self.k_proj = to(source, heads.kv)
            self.v_proj = to(source, self.kv_sensory) if self.kv_sensory else None
            self.relation_k_proj = None if options.symmetric else to(source, n)
            self.symbol_proj = None if relative else to(dim, shared)
        self.relative = RelativeSymbols(dim, count, shared, width) if relative else None
        if own and options.symbols == "position":
            self.symbols = PositionSymbols(dim, count)
        elif own and not relative:
            self.symbols = SymbolicAttention(source, dim, count, options.symbol_heads)
        self.explicit = None if options.act == "identity" else Relations(options.act, self.relations)
        self.relation_out = nn.Parameter(0.02 * torch.randn(n, self.relations, width))
        self.o_proj = nn.ModuleList(
            nn.Linear(out * heads.out_width, out * (dim // heads.q), bias=False) for out in options.kinds(heads, n)
        )
        values = self.kv_sensory if relative else heads.kv
        self.entries = {
            "k": Entry(heads.kv, width, "k"), "v": Entry(values, width, "v"), "relation": Entry(1, n * width),
        }  # fmt: skip

    def queries(self, flow: Flow) -> Tensor:
        return self._heads(self.q_proj(flow.x))

    def write(self, flow: Flow) -> dict[str, Tensor]:
        values = [] if self.v_proj is None else [self.v_proj(flow.source)]
        if self.symbol_proj is not None:
            stream = flow.links.residual if flow.source is flow.x else None
            values.append(self.symbol_proj(self.symbols(flow.source if stream is None else stream, flow.new)))
        compared = (self.relation_k_proj or self.relation_q_proj)(flow.source)
        k, v = self._heads(self.k_proj(flow.source)), self._heads(torch.cat(values, -1))
        return {"k": k, "v": v, "relation": compared[:, None]}

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def rotary(self, name: str) -> slice | None:
        return self.turns if name in ("q", "k") else None

    def split(self, call: Call, flow: Flow) -> list[Call]:
        """All heads over values; then the relational heads over relation keys, and over distances."""
        assert flow.rows is not None
        keys = flow.rows["relation"].expand(-1, call.k.shape[1] - self.kv_sensory, -1, -1)
        calls, more = [call], replace(call, q=call.q[:, self.sensory :], k=call.k[:, self.kv_sensory :], v=keys)
        if self.relative:
            sensory = replace(call, q=call.q[:, : self.sensory], k=call.k[:, : self.kv_sensory])
            calls = [sensory, replace(more, program=(self.relative.bind(flow),))]
        if self.explicit is None:
            return [*calls, *(replace(more, v=part) for part in keys.split(WIDEST, -1))]
        flow.memo["relation queries"] = self._relation_queries(flow)
        return [*calls, replace(more, program=(self.explicit.bind(flow),))]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        first, rest = (torch.cat([outs[0].o, outs[1].o], 1), outs[2:]) if self.relative else (outs[0].o, outs[1:])
        related = torch.cat([out.o for out in rest], -1)
        if self.explicit is None:
            related = related.unflatten(-1, (self.relations, -1)).transpose(2, 3)  # [B, n, n_r, T, d_r]
            related = (related * self._relation_queries(flow)[:, None]).sum(-1).transpose(2, 3)
        relational = first[:, self.sensory :] + related @ self.relation_out
        return Out(torch.cat([first[:, : self.sensory], relational], 1))

    def _relation_queries(self, flow: Flow) -> Tensor:
        """x W_q / √d_r, `[B, n_r, T, d_r]`."""
        return self.scale * self.relation_q_proj(flow.x).unflatten(-1, (self.relations, -1)).transpose(1, 2)

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        kinds = o.split([self.sensory, o.shape[1] - self.sensory], 1) if len(self.o_proj) > 1 else [o]
        parts = [proj(kind.transpose(1, 2).flatten(2)) for proj, kind in zip(self.o_proj, kinds, strict=True)]
        return torch.cat(parts, -1)
