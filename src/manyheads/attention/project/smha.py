"""Selective multi-head attention: each token joins a few heads, and attends only among the tokens that joined them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.grouped import Biases, GQAProject, grouped_cost
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Rule
from manyheads.core.part import Heads, OptionError, Part, Site
from manyheads.core.registry import register
from manyheads.core.router import Router, Routing


@register
@dataclass(frozen=True)
class SMHA(Part):
    """The heads of `gqa` as experts: y_t = Σ_h m_th (g_th o_th W_O^h + b^h), o_th over the tokens s with m_sh = 1.

    s = softmax(x W_g) `[B, T, G]`; m marks the `top` largest of a token. The G experts are the key heads, each with the
    H/G query heads that read it: o_th = softmax(q_th k_shᵀ / √d) v_sh over the keys that t may see and that joined h
    too (always itself), exactly zero where t did not join. Positions are those in the sequence. With top = G all of it
    is `gqa`, weights and all.

    Caches k, v and the number of each of a token's `top` heads, top·(2 d + 1) numbers. Projections and scores are
    computed for all heads and masked, since heads of different loads in one batch have no common shape: what is saved
    is memory, not time.

    In training the balance loss G Σ_h mean(s_h) mean(m_h) / top (1 when even) goes to the auxiliary losses as `smha`.
    The authors have none, and without a gate nothing else reaches W_g: weigh it by 0 for a router that stays as drawn.

    Options: top (default G/2, as in the authors' language models). kv_heads, head_dim, bias as in `gqa`, but an output
        bias is one for each expert, for the tokens that joined it.
        gate g: `none`, 1, the authors'; `scale`, G s_th; `straight`, 1 with the gradient of s_th.

    Choices: the authors let each head take its c likeliest tokens of the sequence, filled up with tokens that did not
    choose it, and c be that of the whole batch: neither causal nor independent of other sequences. Here membership is a
    token's choice alone, with no limit. Of their codes one rotates by places among the members, the other by positions.

    Source: Union of Experts 2025, arXiv 2503.02495, the attention half.
    """

    name: ClassVar[str] = "smha"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2503.02495"
    slot: ClassVar[str | None] = "router"
    examples: ClassVar = (
        {},
        {"top": 1, "kv_heads": 2, "bias": "qkvo", "gate": "scale"},
        {"top": 4, "gate": "straight"},
    )

    top: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    gate: Literal["none", "scale", "straight"] = "none"
    bias: Biases = "none"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"self", "own tokens"})

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"alike heads", "plain outputs"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"cached heads", "one map"})

    @property
    def hint(self) -> dict[str, str]:
        return dict.fromkeys(("cached heads", "one map"), "gqa + moh, where a token chooses heads that see all tokens")

    def chosen(self, groups: int) -> int:
        """`top` with the default filled in."""
        return max(1, groups // 2) if self.top is None else self.top

    def layout(self, heads: Heads, site: Site) -> Heads:
        width = heads.head_width(self.name, self.head_dim)
        groups = heads.q if self.kv_heads is None else self.kv_heads
        top = self.chosen(groups)
        if not 1 <= top <= groups:
            raise OptionError(f"smha: top={top} of {groups} key heads; top may be 1 to {max(groups, 1)}")
        if top < groups > 256:
            raise OptionError(f"smha: {groups} key heads; the cache holds numbers of heads up to 256 in every dtype")
        if site.kv_source is not None:
            raise OptionError("smha: rows are kept for heads that were chosen here; it cannot read those of a layer")
        return Heads(heads.dim, heads.q, groups, width, width, heads.q, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> SMHAProject:
        return SMHAProject(self, after, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        dense = grouped_cost(after, site, "qkv" if "qkv" in self.bias else "none")
        top = self.chosen(after.kv)
        router, biases = after.dim * after.kv, after.dim * after.kv * (self.bias in ("o", "qkvo"))
        cached = Fraction(top * (after.qk_width + after.v_width + (top < after.kv)))
        return dense._replace(
            parameters=dense.parameters + router + biases,
            cache_floats=cached,
            token_flops=dense.token_flops + 2 * router,
            windows=windows(after.keep, cached),
        )


class SMHAProject(GQAProject):
    """A token's rows are made, transformed and rotated for every head; those of its own heads are kept."""

    def __init__(self, options: SMHA, heads: Heads, site: Site) -> None:
        super().__init__(heads, site, "qkv" if "qkv" in options.bias else "none")
        self.top, self.gate = options.chosen(heads.kv), options.gate
        self.some = self.top < heads.kv
        self.router = Router(heads.dim, heads.kv, self.top)
        biased = options.bias in ("o", "qkvo")
        self.o_bias = nn.Parameter(torch.zeros(heads.kv, heads.dim)) if biased else None
        if self.some:
            self.entries = {
                "k": Entry(self.top, heads.qk_width, "k"),
                "v": Entry(self.top, heads.v_width, "v"),
                "head": Entry(self.top, 1),
            }
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_normal_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def queries(self, flow: Flow) -> Tensor:
        routing: Routing = self.router(flow.x)
        routing = flow.memo["routing"] = routing._replace(chosen=routing.chosen.sort(-1).values)
        flow.memo["joins"] = torch.zeros_like(routing.chance, dtype=torch.bool).scatter(-1, routing.chosen, True)
        if flow.training:
            flow.add_loss("smha", routing.balance(flow.q.validity) / self.top)
        return super().queries(flow)

    def write(self, flow: Flow) -> dict[str, Tensor]:
        rows = {"k": self.k_proj(flow.source), "v": self.v_proj(flow.source)}
        return {name: row.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for name, row in rows.items()}

    def settle(self, q: Tensor, rows: dict[str, Tensor], flow: Flow) -> dict[str, Tensor]:
        if not self.some:
            return rows
        head = flow.memo["routing"].chosen.transpose(1, 2)[..., None]
        kept = {name: row.gather(1, head.expand(-1, -1, -1, row.shape[-1])) for name, row in rows.items()}
        return kept | {"head": head.to(rows["k"].dtype)}

    def keys(self, q: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor, Axis]:
        """Rows at their heads again; the others get one of the token's rows, which `rules` hides."""
        assert flow.rows is not None
        if not self.some:
            return super().keys(q, flow)
        head = flow.rows["head"][..., 0].long()
        batch, top, tokens = head.shape
        slots = torch.arange(top, device=q.device)[:, None].expand_as(head)
        slot = head.new_full((batch, self.kv_heads, tokens), -1).scatter(1, head, slots)
        flow.memo["joined"] = slot >= 0
        sequence = torch.arange(batch, device=q.device)[:, None, None]
        at = (sequence * top + slot.clamp_min(0)) * tokens + torch.arange(tokens, device=q.device)
        k, v = (flow.rows[name].flatten(0, 2)[at] for name in ("k", "v"))
        return q, k, v, flow.rows.axis

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        if not self.some or flow.rows is None:
            return ()
        keys, times = flow.rows.axis, self.heads // self.kv_heads

        def together(q: Axis, k: Axis) -> Tensor:
            both = flow.memo["joins"].transpose(1, 2), flow.memo["joined"]
            joins, joined = (each.repeat_interleave(times, 1) for each in both)
            return joins[:, :, q.within(flow.q), None] & joined[:, :, None, k.within(keys)]

        return (together,)

    def output(self, o: Tensor, flow: Flow) -> Tensor:
        routing: Routing = flow.memo["routing"]
        if self.gate != "none":
            chance = routing.gates()
            gates = self.kv_heads * chance if self.gate == "scale" else 1 + (chance - chance.detach())
            gates = routing.spread(gates).repeat_interleave(self.heads // self.kv_heads, -1)
            o = o * gates.to(o.dtype).transpose(1, 2)[..., None]
        y = super().output(o, flow)
        return y if self.o_bias is None else y + flow.memo["joins"].to(y.dtype) @ self.o_bias
