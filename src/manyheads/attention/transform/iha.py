"""Interleaved head attention: each head attends with several mixtures of all heads, in one softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from manyheads.attention.mixing import mixed
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Deferred, Out, merge
from manyheads.core.mask import Axis, Mask, Rule, causal, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Site, Transform
from manyheads.core.registry import register

MADE_BYTES = 4 * 2**20
"""Keys made at a time for a few queries, few enough to stay in the processor's caches."""

Order = Literal["interleaved", "block", "token"]


@register
@dataclass(frozen=True)
class IHA(Part):
    """q̃_hp = Σ_m a_Q[m, h, p] q_m, k̃_gp and ṽ_gp likewise over the G key heads; o_h = Σ_p R[h, p] õ_hp.

    The P pseudo-tokens of token t take the places n = tP, …, tP + P - 1 of a sequence P times as long,
    q̃ `[B, H, T·P, d]`, k̃ and ṽ `[B, G, S·P, d]`, on which plain attention runs: up to P² patterns a head. Rows are
    mixed when they are read, so 2·G·d numbers a token are cached. Attention costs P² times as much, which the authors
    pay with windows; sizes of windows stay in tokens.

    Options:
        pseudo: P, default H. collapse: R `[H, P]` (head), or `[H, H, P]` over the outputs of all heads (global); the
            paper has both.
        order: `interleaved` rotates by n and is causal in n, the paper's form; `block` rotates by n, but the
            pseudo-tokens of one token all see each other; in `token` they also share its position t, so that equal
            pseudo-tokens with Σ_p R = 1 are the base layer.
        noise: added to the mixers at the start in the order `token`, N(0, noise): equal copies would have equal
            gradients for ever. Zero starts as the base layer exactly.

    Choices the paper leaves open: all pseudo-heads start as copies of their head, R as 1/P (head) or as copy 0
    (global); transforms named before it act on heads, those after it on pseudo-heads, before rotation.

    Source: Interleaved Head Attention 2026, arXiv 2602.21371.
    """

    name: ClassVar[str] = "iha"
    stage: ClassVar = "transform"
    paper: ClassVar[str] = "arXiv 2602.21371"
    at: ClassVar = "read"
    examples: ClassVar = (
        {"pseudo": 2},
        {"pseudo": 3, "order": "block", "collapse": "global"},
        {"pseudo": 2, "order": "token"},
    )

    pseudo: int | None = None
    order: Order = "interleaved"
    collapse: Literal["head", "global"] = "head"
    noise: float = 0.01

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"head keys", "one map"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "token keys", "token queries", "softmax"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.pseudo is not None and self.pseudo < 1:
            raise OptionError(f"iha: pseudo={self.pseudo} pseudo-heads a head; at least 1")
        if heads.content_width < heads.qk_width:
            raise OptionError(
                f"iha: {heads.qk_width - heads.content_width} of the {heads.qk_width} key channels belong to no head "
                "and cannot be mixed; a latent projection needs rope_dim=0"
            )
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> IHATransform:
        return IHATransform(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        pseudo, q, kv = self.pseudo or before.q, before.q**2, before.kv**2
        collapse = pseudo * (q if self.collapse == "global" else before.q)
        mixed = pseudo * (q * before.qk_width + kv * (before.qk_width + before.v_width)) + collapse * before.v_width
        pair = 2 * before.q * (before.qk_width + before.v_width)
        return Cost(pseudo * (q + 2 * kv) + collapse, token_flops=2 * mixed, pair_flops=(pseudo**2 - 1) * pair)


class IHATransform(Transform):
    linear = mixes = True

    def __init__(self, options: IHA, heads: Heads, site: Site) -> None:
        super().__init__()
        self.pseudo, self.order = options.pseudo or heads.q, options.order
        self.commutes, self.places = self.order == "token", self.order != "token"
        self.ranked = self.order == "interleaved" and site.causal and not site.cross
        noise = options.noise if self.order == "token" else 0.0

        def copies(count: int) -> nn.Parameter:
            start = torch.eye(count)[..., None].expand(-1, -1, self.pseudo)
            return nn.Parameter(start + noise * torch.randn(start.shape))

        self.q, self.k, self.v = copies(heads.q), copies(heads.kv), copies(heads.kv)
        if options.collapse == "head":
            self.collapse = nn.Parameter(torch.full((heads.q, self.pseudo), 1 / self.pseudo))
        else:
            self.collapse = nn.Parameter(torch.eye(heads.q)[..., None] * (torch.arange(self.pseudo) == 0))

    def on_q(self, q: Tensor, flow: Flow) -> Tensor:
        return _interleave(q, self.q)

    def on_k(self, k: Tensor, flow: Flow) -> Tensor:
        return _interleave(k, self.k)

    def on_v(self, v: Tensor, flow: Flow) -> Tensor:
        return _interleave(v, self.v)

    def axes(self, q: Axis, k: Axis) -> tuple[Axis, Axis]:
        return self._places(q), self._places(k)

    def _places(self, axis: Axis) -> Axis:
        """Pseudo-tokens share their token's time, so that masks and windows are about tokens."""

        def make() -> Axis:
            places = axis.repeat(self.pseudo)
            if self.order == "token":
                return places
            rank = torch.arange(self.pseudo, device=axis.device).repeat(axis.length)
            return replace(places, given_position=places.position * self.pseudo + rank, memo={})

        return axis.once(("iha", self.pseudo, self.order), make)

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        return (self._rank,) if self.ranked else ()

    def _rank(self, q: Axis, k: Axis) -> Tensor:
        """Of its own token a pseudo-token sees those up to itself."""
        before = cols_of(k.position % self.pseudo) <= rows_of(q.position % self.pseudo)
        return before | (cols_of(k.time) != rows_of(q.time))

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        if flow.described:
            return [call]
        if flow.moved:
            return self._by_rank(call, flow)
        if self.places:
            q, k = flow.turn(call.q, "q", call.mask.q), flow.turn(call.k, "k", call.mask.k)
            call = replace(call, q=q, k=k)
        return [replace(call, mask=self._triangle(call.mask, flow))]

    def _triangle(self, mask: Mask, flow: Flow) -> Mask:
        """With no rule but these two the mask is the plain triangle of the long sequence, which kernels know."""
        if mask.rules != (causal, self._rank) or flow.rows is None:
            return mask
        q, k, pseudo = flow.q, flow.rows.axis, self.pseudo
        if q.start is None or k.start is None or not (q.whole and k.whole):
            return mask
        long_q, long_k = (
            Axis(n * pseudo, at * pseudo, device=q.device) for n, at in ((q.length, q.start), (k.length, k.start))
        )
        return Mask(long_q, long_k)

    def _by_rank(self, call: Call, flow: Flow) -> Sequence[Call]:
        """Few queries: for each p, and some keys at a time, a problem over keys and values made for it alone.

        q̃·R(nP + p) k̃_p = R(-p) q̃ · (Σ_m a_K[m, g, p] R(nP) k_m), so keys turn once for all p.
        """
        mask, first = call.mask, flow.q.start
        known = first is not None and mask.k.start == 0 and mask.q.whole and mask.k.whole
        plain = known and mask.rules in ((causal,), (causal, self._rank))
        step = max(1, MADE_BYTES // (call.k[:, :, :1].numel() * call.k.element_size()))

        def some(at: int) -> tuple[Tensor, Tensor, Mask]:
            keys, near = slice(at, at + step), replace(mask, k=mask.k[at : at + step])
            k = call.k[:, :, keys]
            if self.places:
                k = flow.turn(k, "k", self._place(near.k, 0))
            past = plain and at + near.k.length <= (first or 0)
            return k, call.v[:, :, keys], replace(near, rules=()) if past else near

        def of(k: Tensor, v: Tensor, seen: Mask, rank: int) -> Call:
            q = call.q
            if self.places:
                q = flow.turn(q, "q", replace(mask.q, given_position=mask.q.position - rank, memo={}))
                seen = replace(seen, k=self._place(seen.k, rank)) if seen.rules else seen
            return replace(call, q=q, k=mixed(k, self.k[..., rank]), v=mixed(v, self.v[..., rank]), mask=seen)

        parts = [some(at) for at in range(0, call.k.shape[2], step)]
        return Deferred([partial(of, *part, rank) for part in parts for rank in range(self.pseudo)])

    def _place(self, axis: Axis, rank: int) -> Axis:
        """Where the pseudo-tokens of one rank stand."""
        return replace(axis, given_position=axis.position * self.pseudo + rank, memo={})

    def join(self, outs: list[Out], flow: Flow) -> Out:
        o = merge(outs).o.unflatten(2, (-1, self.pseudo))
        if self.collapse.ndim == 2:
            return Out(torch.einsum("bhtpv,hp->bhtv", o, self.collapse))
        return Out(torch.einsum("bgtpv,hgp->bhtv", o, self.collapse))


def _interleave(x: Tensor, mixer: Tensor) -> Tensor:
    """`[B, m, N, d]` by `[m, h, P]` to `[B, h, N·P, d]`, the pseudo-tokens of a token side by side."""
    return mixed(x, mixer.flatten(1)).unflatten(1, mixer.shape[1:]).transpose(2, 3).flatten(2, 3)
