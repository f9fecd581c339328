"""Clustered heads: heads that attend alike share one map, and keep their own values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyheads.attention.linkage import average_linkage
from manyheads.core.cost import Cost, windows
from manyheads.core.entries import Entry, State
from manyheads.core.flow import Flow
from manyheads.core.kernel import FEW_ROWS, Call, Out, merge
from manyheads.core.mask import Axis, Mask
from manyheads.core.part import Heads, OptionError, Part, Program, Project, Site
from manyheads.core.registry import register

RELEASED = ((3, 28), (15, 18), (17, 8))
"""Of 32 heads, the clusters of layers below 3, 15 and 17; deeper ones have 4."""


@register
@dataclass(frozen=True)
class CHAI(Part):
    """Multi-head attention whose heads, after the `first` tokens of a sequence, share the maps of C clusters.

    The first tokens attend with every head. Their causal maps softmax(q_h k_hᵀ / √d), row 0 left out (it is constant),
    are the features of a head; average linkage by cosine distance makes C clusters of the H heads, fixed from then on.
    The lowest head of a cluster represents it: o_h = softmax(q_r k_rᵀ / √d) v_h with r = rep(h), for every later query,
    over all keys. No parameters beyond those of `gqa`, whose weights it takes as they are; nothing is to be trained.

    Caches C keys and H values of width d a token, and for each sequence what its first tokens were (their q, k and v
    of all heads) and the representatives. Few queries compute C maps each; more of them go through fused attention,
    head by head, which costs the scores of all heads.

    Options: clusters C (default: the released list for 32 layers and heads, by layer, scaled to H). first. head_dim
    and bias as in `gqa`.

    Choices: features have the causal mask, and the first tokens exact outputs, so that no token depends on a later one;
    the released code has neither, and mixes positions and heads in a reshape. Queries and keys of heads that do not
    represent are computed and dropped. Membership is not learned, so no gradient passes through it.

    Source: Agarwal et al. 2024, arXiv 2403.08058.
    """

    name: ClassVar[str] = "chai"
    stage: ClassVar = "project"
    paper: ClassVar[str] = "arXiv 2403.08058"
    examples: ClassVar = ({"clusters": 2}, {"clusters": 1, "first": 3, "head_dim": 8, "bias": "qkvo"}, {})

    clusters: int | None = None
    first: int = 5
    head_dim: int | None = None
    bias: Literal["none", "qkv", "qkvo", "o"] = "none"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self"})

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({"head keys"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"alike heads", "one map", "softmax", "cached heads"})

    def groups(self, heads: int, site: Site) -> int:
        """C with the default filled in."""
        if self.clusters is not None:
            return self.clusters
        of_32 = next((count for below, count in RELEASED if site.layer < below), 4)
        return max(1, round(of_32 * heads / 32))

    def layout(self, heads: Heads, site: Site) -> Heads:
        clusters = self.groups(heads.q, site)
        if not 1 <= clusters <= heads.q:
            raise OptionError(f"chai: clusters={clusters} of {heads.q} heads; clusters may be 1 to {heads.q}")
        if self.first < 2:
            raise OptionError(f"chai: first={self.first} tokens tell no heads apart; at least 2")
        if site.kv_source is not None:
            raise OptionError("chai: a layer's clusters are its own, so it cannot read the rows of another")
        width = heads.head_width(self.name, self.head_dim)
        return Heads(heads.dim, heads.q, heads.q, width, width, heads.q, width, width**-0.5, slice(0, width))

    def build(self, before: Heads, after: Heads, site: Site) -> CHAIProject:
        return CHAIProject(self, after, self.groups(after.q, site))

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        heads, width, clusters = after.q, after.qk_width, self.groups(after.q, site)
        weights = after.dim * (3 * heads * width + after.out * after.out_width)
        biases = 3 * heads * width * ("qkv" in self.bias) + after.dim * (self.bias in ("o", "qkvo"))
        state = self.first * (3 * heads * width + 1) + heads if clusters < heads else 0
        pair, cached = 2 * (clusters + heads) * width, Fraction((clusters + heads) * width)
        return Cost(weights + biases, cached, state, 2 * weights, pair, windows(after.keep, cached))


class Request(NamedTuple):
    """What a pass knows of its sequences (several in a row of packed documents).

    rep: each token's representative of each head, slot: its place among the representatives, both `[B, T, H]`; reps
    `[B, T, C]`; without packed documents all tokens have the same, and T is 1. late `[B, T]`: whether a token comes
    after the first ones; begun `[B, 1]`: the newest time of first tokens in earlier passes. early: q, k and v of the
    first tokens side by side, `[B, H, n, 3d]`, on their axis, with the representatives there, `[B, n, H]`. document
    `[B, T]`. whole: the pass is a document from its first token on, known without looking at data.
    """

    rep: Tensor
    slot: Tensor
    reps: Tensor
    late: Tensor
    begun: Tensor
    early: Tensor
    axis: Axis
    early_rep: Tensor
    document: Tensor
    whole: bool


class CHAIProject(Project):
    def __init__(self, options: CHAI, heads: Heads, clusters: int) -> None:
        super().__init__()
        self.heads, self.width, self.clusters, self.first = heads.q, heads.qk_width, clusters, options.first
        self.scale, self.turns, self.shares = heads.scale, heads.rotary, clusters < heads.q
        qkv = "qkv" in options.bias
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(heads.dim, heads.q * self.width, bias=qkv) for _ in range(3))
        self.o_proj = nn.Linear(heads.out * heads.out_width, heads.dim, bias=options.bias in ("o", "qkvo"))
        self.entries = {"k": Entry(clusters, self.width, "k"), "v": Entry(heads.q, self.width, "v")}
        self.spread = Spread()
        if self.shares:
            self.states = {
                "first": State((heads.q, options.first, 3 * self.width)),
                "first time": State((options.first,), dtype=torch.long),
                "representative": State((heads.q,), dtype=torch.long),
            }

    def queries(self, flow: Flow) -> Tensor:
        return self._heads(self.q_proj(flow.x))

    def write(self, flow: Flow) -> dict[str, Tensor]:
        return {"k": self._heads(self.k_proj(flow.source)), "v": self._heads(self.v_proj(flow.source))}

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def settle(self, q: Tensor, rows: dict[str, Tensor], flow: Flow) -> dict[str, Tensor]:
        """Only the keys of representatives are kept. (First tokens' are in the state; their rows here are not read.)"""
        if not self.shares:
            return rows
        request = self._request((q, rows["k"], rows["v"]), flow)
        flow.memo["request"] = request
        return {"k": _pick(rows["k"], request.reps), "v": rows["v"]}

    def _request(self, new: tuple[Tensor, ...], flow: Flow) -> Request:
        """From the q, k and v of this pass's tokens, `[B, H, T, d]` each."""
        batch, n, device = len(new[0]), self.first, flow.q.time.device
        old = new[0].new_zeros(batch, self.heads, n, 3 * self.width), flow.q.time.new_full((batch, n), -1)
        if flow.state:
            old = flow.state["first"], flow.state["first time"]
        document, count = _count(flow.q, batch)
        documents = 1 if flow.q.segment is None else int(document.max()) + 1
        count = count + (document == 0) * (old[1] >= 0).sum(-1, keepdim=True)
        late = count >= n
        place = torch.where(flow.q.validity & ~late, document * n + count, documents * n)  # the last takes all others
        room = (documents - 1) * n + 1
        they = place.argsort(-1)[:, : documents * n]
        rows = torch.cat([x.gather(2, they[:, None, :, None].expand(-1, self.heads, -1, self.width)) for x in new], -1)
        to = place.gather(1, they)[:, None, :, None].expand_as(rows)
        early = nn.functional.pad(old[0], (0, 0, 0, room)).scatter(2, to, rows)
        time = nn.functional.pad(old[1], (0, room), value=-1)
        time = time.scatter(1, place, flow.q.time.expand(batch, -1))
        early, time = early[:, :, :-1], time[:, :-1]

        if documents == 1 and flow.state and bool((old[1] >= 0).all()):  # chosen in an earlier pass
            known = flow.state["representative"][:, None]
        else:
            known = average_linkage(self._features(early, time), self.clusters)
        rep = known if documents == 1 else known.gather(1, document[..., None].expand(-1, -1, self.heads))
        heads = torch.arange(self.heads, device=device)
        stands = rep == heads
        reps = torch.where(stands, heads, self.heads).sort(-1).values[..., : self.clusters]
        slot = (stands.long().cumsum(-1) - 1).gather(-1, rep)

        newest = document[:, -1:] * n + torch.arange(n, device=device)
        flow.new_state["first"] = early.gather(2, newest[:, None, :, None].expand(-1, self.heads, -1, early.shape[-1]))
        flow.new_state["first time"] = time.gather(1, newest)
        flow.new_state["representative"] = rep[:, -1]
        whose = torch.arange(documents, device=device).repeat_interleave(n)[None]
        number = torch.arange(n, device=device).repeat(documents)[None]
        axis = Axis(time.shape[1], None, number, time, whose, time >= 0, device=device)
        begun, whole = old[1].amax(-1, keepdim=True), flow.q.whole and not flow.state
        return Request(rep, slot, reps, late, begun, early, axis, known.repeat_interleave(n, 1), document, whole)

    @torch.no_grad()
    def _features(self, early: Tensor, time: Tensor) -> Tensor:
        """The maps of the first tokens without row 0, `[B, documents, H, (n - 1) n]`, zero where there is no token."""
        q, k, _ = early.unflatten(2, (-1, self.first)).transpose(1, 2).chunk(3, -1)
        there = (time >= 0).unflatten(1, (-1, self.first))[:, :, None]
        wide = torch.promote_types(q.dtype, torch.float32)
        seen = torch.ones(self.first, self.first, dtype=torch.bool, device=q.device).tril()
        scores = (q.to(wide) * self.scale) @ k.to(wide).transpose(-1, -2)
        maps = scores.masked_fill(~seen, -torch.inf).softmax(-1) * there[..., None]
        return maps[..., 1:, :].flatten(-2)

    def split(self, call: Call, flow: Flow) -> list[Call]:
        """Later queries over later keys, over first keys, and first queries over first keys with every head.

        The keys of representatives that this pass cached are those of its own clusters: where it begins the sequence
        later queries see all keys alike, in one call.
        """
        request: Request | None = flow.memo.get("request")
        if request is None:
            return [call]
        axis, keys = call.mask.q, call.mask.k
        far = self._far(call, request, flow)
        _, k, v = request.early.chunk(3, -1)
        if request.whole:
            first = slice(0, min(self.first, axis.length))
            mask = replace(call.mask, q=axis[first], k=keys[first])
            return [far, replace(call, q=call.q[:, :, first], k=k[:, :, first], v=v[:, :, first], mask=mask)]
        past = keys[: keys.length - axis.length].time.expand(len(call.q), -1) > request.begun
        later = torch.cat([past, request.late], 1)
        queries = replace(axis, valid=axis.validity & request.late)
        mask = Mask(queries, replace(keys, valid=keys.validity & later), call.mask.rules)
        origin = keys.time[:, :1] - (0 if keys.rows is None else keys.rows[:, :1])
        early = replace(request.axis, rows=(request.axis.time - origin).clamp_min(0))  # a given mask has their columns
        queries = replace(queries, segment=request.document)
        first = replace(queries, valid=axis.validity & ~request.late)
        near = replace(call, q=_pick(call.q, request.rep), k=_pick(k, request.early_rep), v=v)
        return [
            replace(far, mask=mask),
            replace(near, mask=Mask(queries, early, call.mask.rules)),
            replace(call, k=k, v=v, mask=Mask(first, early, call.mask.rules)),
        ]

    def _far(self, call: Call, request: Request, flow: Flow) -> Call:
        """Few queries: a map for each cluster, read by all its heads. Many: every head's q and k are its cluster's."""
        if call.q.shape[2] <= FEW_ROWS:
            return replace(call, q=_pick(call.q, request.reps), program=(self.spread.bind(flow),))
        slot = request.slot
        if slot.shape[1] > 1:
            slot = torch.cat([slot[:, :1].expand(-1, call.k.shape[2] - slot.shape[1], -1), slot], 1)
        return replace(call, q=_pick(call.q, request.rep), k=_pick(call.k, slot))

    def join(self, outs: list[Out], flow: Flow) -> Out:
        if len(outs) == 1:
            return outs[0]
        request: Request = flow.memo["request"]
        far, *others = outs
        if far.lse is not None and far.lse.shape[1] != self.heads:
            slot = request.slot.transpose(1, 2).expand(-1, -1, far.lse.shape[2])
            far = replace(far, lse=far.lse.gather(1, slot))
        if not request.whole:
            return merge([far, *others])
        first = others[0]
        assert far.lse is not None and first.lse is not None
        count = first.o.shape[2]
        pairs = ((first.o, far.o), (first.lse, far.lse))
        return Out(*(torch.cat([ours, x[:, :, count:]], 2) for ours, x in pairs))


class Spread(Program):
    """Weights of clusters `[B, C, t, S]`, read by the heads in them over values of their own."""

    def read(self, weights: Tensor, call: Call, rows: slice, flow: Flow) -> Tensor:
        slot = flow.memo["request"].slot
        slot = (slot[:, rows] if slot.shape[1] > 1 else slot).transpose(1, 2)[..., None]
        return weights.gather(1, slot.expand(-1, -1, *weights.shape[2:])) @ call.v


def _pick(x: Tensor, heads: Tensor) -> Tensor:
    """Of x `[B, H, T, d]` at each token the heads `[B, T, M]` (T of 1: the same at all), as `[B, M, T, d]`."""
    if heads.shape[1] == 1:
        rows = heads[:, 0] + torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
        return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape)
    return x.gather(1, heads.transpose(1, 2)[..., None].expand(-1, -1, -1, x.shape[-1]))


def _count(axis: Axis, batch: int) -> tuple[Tensor, Tensor]:
    """Each token's document in its row and its number there, counted in this pass without padding; `[B, T]` both."""
    valid = axis.validity.expand(batch, -1).long()
    count = valid.cumsum(-1)
    if axis.segment is None:
        return torch.zeros_like(count), count - 1
    segment = axis.segment.expand(batch, -1)
    begins = nn.functional.pad(segment[:, 1:] != segment[:, :-1], (1, 0))
    before = torch.where(begins, count - valid, 0).cummax(-1).values
    return begins.long().cumsum(-1), count - before - 1
