"""PoD: each layer's own attention to tokens nearby, and one attention to distant tokens for a group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from manyheads.attention.windows import After, Far, First, Near
from manyheads.core.cost import Cost, windows
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out, merge
from manyheads.core.mask import Axis
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class PoD(Part):
    """Layers come in groups; the first of a group leads, and the others hold no keys of distant tokens.

    Near query i are N_i = {j < first} ∪ {i - window < j ≤ i}, distant F_i = the tokens between, first ≤ j ≤ i - window.
    A leader attends as ever. In a follower of leader p, with logits

        s_ij = q_i · k_j · scale for j in N_i
        s_ij = q^p_i · k^p_j · scale (share=scores), or q_i · k^p_j · scale (share=keys), for j in F_i

    o_i = g o^N_i + (1 - g) o^F_i over its own values, g = Z_N / (Z_N + Z_F) from the sums of exp(s): one softmax over
    N_i ∪ F_i, computed as two calls. The leader learns from its followers. Of S tokens a leader caches 2·G·d·S numbers,
    a follower G·d·(S + min(S, window + first)): all values, and keys nearby.

    Options: group: layer l follows l - l mod group; leader: or the layer that is named (a leader names itself or, by
    group=1, none), for groups of unlike lengths. window, the query's own token included. first. share: the leader's
    scores (version 1 of the paper), or its keys alone (version 2). skip: where a head's F_i has less than this share
    of the weights, 1 - g, a follower leaves it out: an approximation with |error| ≤ 2 (1 - g) max |v|. Both calls are
    still computed here.

    Choices: no equations are public; the gate is read as the ratio of sums; window and first are not stated. The paper
    groups layers for each head by itself, which is not done: layers are grouped whole. The layers of a group have equal
    heads, and one rotation. As in the published count a row is kept that the next query no longer sees. Leaders never
    skip.

    Source: PoD 2024, arXiv 2412.02252.
    """

    name: ClassVar[str] = "pod"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2412.02252"
    examples: ClassVar = ({"window": 3, "first": 1}, {"window": 2, "first": 0, "share": "keys"})

    group: int = 2
    window: int = 4096
    first: int = 16
    share: Literal["scores", "keys"] = "scores"
    leader: int | None = None
    skip: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(
            {"causal", "self", "head keys", "cached heads", "token keys", "final rows", "own rows", "one map"}
            | {"bare scores", "plain scores", "softmax", "still values", "own tokens", "token queries"}
        )

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "alike heads", "values alone"})

    @property
    def spares(self) -> frozenset[str]:
        return frozenset({"bare scores"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"softmax", "bare scores", "plain scores"})  # joined by log-sum-exp; a leader's keys are all

    @property
    def hint(self) -> dict[str, str]:
        return {"cached heads": "gqa, whose keys and values are cached apart"}

    def follows(self, site: Site) -> int | None:
        """The leader of a follower; None for a leader."""
        leader = site.layer - site.layer % self.group if self.leader is None else self.leader
        return None if leader == site.layer else leader

    def agrees(self, before: Heads) -> str:
        return f"{before.q} heads over {before.kv} key heads of width {before.qk_width}"

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.group < 1 or min(self.window, self.first) < 0:
            raise OptionError(
                f"pod: group={self.group}, window={self.window} and first={self.first}; group is 1 or more, the others "
                "0 or more"
            )
        if not 0 <= self.skip <= 1:
            raise OptionError(f"pod: skip={self.skip}; a share of the weights, 0 to 1")
        if self.leader is not None and not 0 <= self.leader <= site.layer:
            raise OptionError(f"pod: leader={self.leader} of layer {site.layer}; it may be 0 to {site.layer}")
        if self.follows(site) is None:
            return heads
        return heads._replace(keep_keys=self.window + self.first, first=self.first)

    def build(self, before: Heads, after: Heads, site: Site) -> Piece:
        source = self.follows(site)
        return Leader(site.layer + 1 < site.layers) if source is None else Follower(self, source)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        keys = Fraction(before.kv * before.keys * before.qk_width)
        return Cost(windows=windows(after.keep_keys, keys))


class Distant(NamedTuple):
    """What a leader hands on: its q `[B, H, T, E]` and k `[B, G, S, E]` as they meet, their scale, the keys' axis."""

    q: Tensor
    k: Tensor
    scale: float
    axis: Axis


class Leader(Piece):
    def __init__(self, serves: bool) -> None:
        super().__init__()
        self.serves = serves

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        if self.serves and not flow.described:
            flow.links.handed[flow.layer] = Distant(call.q, call.k, call.scale, call.mask.k)
        return [call]


class Follower(Piece):
    def __init__(self, options: PoD, source: int) -> None:
        super().__init__()
        self.source, self.scores, self.skip = source, options.share == "scores", options.skip
        self.near = First(options.first, Near((options.window,))) if options.window or options.first else None
        self.far = Far(options.window, causal=True), After(options.first)

    def split(self, call: Call, flow: Flow) -> list[Call]:
        if flow.described:
            return [call, call]
        handed = self._handed(call, flow)
        mask = replace(call.mask, k=handed.axis)
        far = replace(call, k=handed.k, mask=replace(mask, rules=(*mask.rules, *self.far)))
        if self.scores:
            far = replace(far, q=handed.q, scale=handed.scale)
        if self.near is None:
            return [far]
        assert flow.rows is not None
        own = flow.rows.axes.get("k")
        if own is not None and own.rows is not None:  # values of the tokens whose keys are here
            call = replace(call, v=call.v.index_select(2, own.rows[0]), mask=replace(call.mask, k=own))
        return [replace(call, mask=call.mask & self.near), far]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        if self.skip and len(outs) == 2:
            near, far = outs
            assert near.lse is not None and far.lse is not None
            share = (far.lse - near.lse).sigmoid()
            outs = [near, replace(far, lse=far.lse.masked_fill(share < self.skip, -float("inf")))]
        return merge(outs)

    def _handed(self, call: Call, flow: Flow) -> Distant:
        handed = flow.links.handed.get(self.source)
        if not isinstance(handed, Distant):
            raise ValueError(
                f"pod in layer {flow.layer} follows layer {self.source}, of which links hold no keys: it is to lead"
            )
        theirs, ours = ((q.shape[1], k.shape[1], k.shape[3]) for q, k in ((handed.q, handed.k), (call.q, call.k)))
        if theirs != ours:
            said = ["{} heads over {} key heads of width {}".format(*each) for each in (theirs, ours)]
            raise ValueError(
                f"pod: layer {self.source} has {said[0]}, layer {flow.layer} has {said[1]}; they must agree"
            )
        return handed
