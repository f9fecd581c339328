"""Head tokens: each head's channels, summed up as one more token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.pool import counted, whole_mean
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.mask import Axis, Rule, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Site, Tokens
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class DHVT(Part):
    """H head tokens join the N tokens in attention, and their mean is added to the class token, the first one.

    m `[B, H, d]` is the mean of x over tokens (class token included), cut into d = D/H channels a head;
    t = m W_t + b_t `[B, H, D]`, W_t `[d, D]` the same for all heads; t ← GELU(LayerNorm_d(t)) on each d channels;
    x' = [x; t + E], E `[H, D]` from N(0, 0.02²); y' = attention(x') `[B, N + H, D]`; the first of N gets the
    mean of the last H, which are dropped.

    Head tokens see every token and every query sees them, windows and given masks apart. Padding is not in the mean;
    with padding on the left, the class token is the first token that is none.

    Choices: head tokens stand at position 0, so that rotations leave them as they are. The mean is of the whole
    sequence, so causal attention is refused, and so are packed documents, which would share head tokens. The paper's
    feed-forward and patch embedding are no matter of heads and not here.

    Source: Lu et al. 2022, arXiv 2210.05958.
    """

    name: ClassVar[str] = "dhvt"
    stage: ClassVar = "tokens"
    paper: ClassVar[str] = "arXiv 2210.05958"
    slot: ClassVar[str | None] = "head tokens"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"bidirectional", "self"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"own tokens"})

    @property
    def hint(self) -> dict[str, str]:
        return dict.fromkeys(("bidirectional", "self"), "dhvt in the self-attention of an encoder (causal=False)")

    def layout(self, heads: Heads, site: Site) -> Heads:
        if heads.dim % heads.q:
            raise OptionError(
                f"dhvt: dim={heads.dim} does not split into the channels of heads={heads.q}; "
                f"dim may be {heads.dim // heads.q * heads.q or heads.q}"
            )
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> DHVTTokens:
        return DHVTTokens(before.dim, before.q)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        dim, heads = before.dim, before.q
        width = dim // heads
        return Cost(width * dim + dim + 2 * width + heads * dim, token_flops=dim)


class DHVTTokens(Tokens):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.extra = heads
        self.token = nn.Linear(dim // heads, dim)
        self.norm = nn.LayerNorm(dim // heads)
        self.place = nn.Parameter(nn.init.trunc_normal_(torch.empty(heads, dim), std=0.02))

    def enter(self, x: Tensor, axis: Axis, flow: Flow) -> tuple[Tensor, Axis]:
        if axis.segment is not None:
            raise ValueError("dhvt: packed documents would share their head tokens; give each a row of its own")
        flow.memo[DHVT.name] = counted(flow)
        t = self.token(whole_mean(flow)[:, 0].unflatten(-1, (self.extra, -1)))
        t = F.gelu(self.norm(t.unflatten(-1, (self.extra, -1)))).flatten(-2) + self.place
        nowhere = torch.zeros(1, self.extra, dtype=torch.long, device=x.device)
        more = Axis(self.extra, given_position=nowhere, given_time=nowhere, device=x.device)
        return torch.cat([x, t], 1), axis.cat(more)

    def widen(self, rule: Rule, flow: Flow) -> Rule:
        def wide(q: Axis, k: Axis) -> Tensor:
            counts = flow.memo[DHVT.name]
            tokens, seen = counts.shape[1], F.pad(counts, (0, self.extra), value=True)

            def known(axis: Axis) -> tuple[Axis, Tensor]:
                """The axis with head tokens in the guise of the last token, and which rows those are."""
                rows = torch.arange(axis.length, device=axis.device)[None] if axis.rows is None else axis.rows
                return replace(axis, rows=rows.clamp_max(tokens - 1)), rows

            (q, at), (k, of) = known(q), known(k)
            every = seen.expand(max(len(seen), len(of)), -1).gather(1, of.expand(max(len(seen), len(of)), -1))
            return torch.where(rows_of(at >= tokens), cols_of(every), rule(q, k) | cols_of(of >= tokens))

        return wide

    def leave(self, y: Tensor, flow: Flow) -> Tensor:
        counts = flow.memo[DHVT.name]
        first = F.one_hot(counts.long().argmax(-1), counts.shape[1])[..., None].to(y.dtype)
        y, heads = y.split([counts.shape[1], self.extra], 1)
        return y + first * heads.mean(1, keepdim=True)
