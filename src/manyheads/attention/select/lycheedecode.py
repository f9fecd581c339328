"""LycheeDecode: a few heads look at everything and choose keys; the others read what the layer below chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention.chunks import Chosen, gathered, of_heads, weights_of
from manyheads.attention.hardkuma import HardKuma
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out
from manyheads.core.mask import Rule, cols_of, rows_of
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register

NEVER = 1 << 40
"""More rows back than there are: no key."""


@register
@dataclass(frozen=True)
class LycheeDecode(Part):
    """Slots (key heads) are of two kinds, and hand a set S_g of at most `budget` keys to the same slot one layer up.

    retrieval: o = softmax(q K_gᵀ s) V_g over all visible keys; S_g = the keys of the largest weights.
    sparse: o = softmax(q K_gᵀ s) V_g over S_g of the layer below alone, which is handed on as it came.

    Every query has sets of its own, made anew in each pass from layer 0 on, where all slots retrieve; nothing is
    evicted. With one new token a sparse slot gathers its keys. The own token and the first `sinks` positions are always
    in a set and count.

    learn: a `HardKuma` gate z for each slot (not in layer 0). In training o = z o_retrieval + (1 - z) o_sparse, the set
    handed on is the full map's, and the expected number of open gates Σ P(z ≠ 0) goes to the auxiliary losses as
    `lycheedecode`, to be weighed by a multiplier (`hardkuma.ascend`). Otherwise a slot retrieves if E z > 1/2.

    Options: budget. retrieval: the slots that retrieve in this layer. group: how the weights of the query heads of a
    slot are joined. sinks. prefill: `full` is the published inference, passes of more than one token attend to
    everything; such a pass and the same tokens one by one differ, so it is not the default. learn. handover: `gated`
    hands on the full map's set only where z > 1/2.

    Choices: slots are key heads; the weight of a key is the largest of the group's; sinks, and gates from -0.1 to 1.1,
    are not stated. Weights are compared before a soft cap.

    Source: LycheeDecode 2026, arXiv 2602.04541.
    """

    name: ClassVar[str] = "lycheedecode"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2602.04541"
    chains: ClassVar[bool] = True
    examples: ClassVar = ({"budget": 3}, {"budget": 2, "retrieval": (0,), "group": "mean", "sinks": 0})

    budget: int = 4096
    retrieval: tuple[int, ...] = ()
    group: Literal["max", "mean"] = "max"
    sinks: int = 1
    prefill: Literal["sparse", "full"] = "sparse"
    learn: bool = False
    handover: Literal["full_map", "gated"] = "full_map"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "token keys", "one map"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "alike heads", "values alone"})

    def follows(self, site: Site) -> int | None:
        """The layer below."""
        return site.layer - 1 if site.layer else None

    def agrees(self, before: Heads) -> str:
        return f"{before.kv} key heads"

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.sinks < 0 or self.budget <= self.sinks:
            raise OptionError(
                f"lycheedecode: budget={self.budget} keys with sinks={self.sinks}; at least {max(self.sinks, 0) + 1}, "
                "with the token itself"
            )
        if any(not 0 <= slot < heads.kv for slot in self.retrieval):
            raise OptionError(
                f"lycheedecode: retrieval={[*self.retrieval]} of {heads.kv} key heads; they are 0 to {heads.kv - 1}"
            )
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> LycheeSelect:
        return LycheeSelect(self, before, site)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost(2 * before.kv if self.learn and site.layer else 0)


class LycheeSelect(Piece):
    joins_by_lse = False

    def __init__(self, options: LycheeDecode, heads: Heads, site: Site) -> None:
        super().__init__()
        self.options, self.slots, self.heads, self.layer = options, heads.kv, heads.q, site.layer
        self.hands_on = site.layer + 1 < site.layers
        self.gates = HardKuma(heads.kv) if options.learn and site.layer else None

    def retrieves(self) -> list[bool]:
        """Of each slot, whether it looks at everything."""
        if self.layer == 0:
            return [True] * self.slots
        if self.gates is not None:
            return (self.gates.mean() > 0.5).tolist()
        return [slot in self.options.retrieval for slot in range(self.slots)]

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        options = self.options
        full = options.prefill == "full" and call.q.shape[2] > 1 and not flow.training
        if flow.described or full:  # or not decoding yet
            return [call]
        given = self._given(flow)
        if given is not None and self.gates is not None and flow.training:
            return self._both(call, flow, given, self.gates)
        kinds = self.retrieves()
        if self.hands_on:
            flow.links.handed[flow.layer] = self._hand_on(call, given, kinds)
        if given is None or all(kinds):
            return [call]
        if call.q.shape[2] > 1:
            return [replace(call, mask=call.mask & self._rule(call, given, kinds))]
        looking, reading = ([slot for slot, kind in enumerate(kinds) if kind is which] for which in (True, False))
        flow.memo["lycheedecode"] = looking + reading
        rows = (call.k.shape[2] - 1 - given[:, reading]).clamp_min(-1)
        sparse = gathered(of_heads(call, reading, self.slots), rows)
        return [of_heads(call, looking, self.slots), sparse] if looking else [sparse]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        if "gates" in flow.memo:
            z = flow.memo["gates"].repeat_interleave(self.heads // self.slots)[:, None, None].to(outs[0].o.dtype)
            return Out(z * outs[0].o + (1 - z) * outs[1].o)
        if "lycheedecode" not in flow.memo:
            return outs[0]
        order = flow.memo["lycheedecode"]
        o = torch.cat([out.o for out in outs], 1).unflatten(1, (self.slots, -1))
        return Out(o[:, sorted(range(self.slots), key=order.__getitem__)].flatten(1, 2))

    def _both(self, call: Call, flow: Flow, given: Tensor, gates: HardKuma) -> list[Call]:
        """Both kinds of every slot, for `join` to mix."""
        z = flow.memo["gates"] = gates()
        flow.add_loss("lycheedecode", (1 - gates.zero()).sum())
        if self.hands_on:
            kinds = [True] * self.slots if self.options.handover == "full_map" else (z > 0.5).tolist()
            flow.links.handed[flow.layer] = self._hand_on(call, given, kinds)
        return [call, replace(call, mask=call.mask & self._rule(call, given, [False] * self.slots))]

    def _given(self, flow: Flow) -> Tensor | None:
        """The sets of the layer below `[B, slots, T, n]`: how many rows before the newest one each key is."""
        if self.layer == 0:
            return None
        given = flow.links.handed.get(self.layer - 1)
        if not isinstance(given, Tensor) or given.shape[1] != self.slots:
            found = "hold none" if given is None else "hold others"
            raise ValueError(
                f"lycheedecode in layer {self.layer} reads the sets that {self.slots} key heads of layer "
                f"{self.layer - 1} choose with the same part; the links of this pass {found}"
            )
        return given

    def _rule(self, call: Call, given: Tensor, kinds: list[bool]) -> Rule:
        """Given keys for sparse slots, all for the others."""
        keys = call.k.shape[2]
        ages = torch.arange(keys - 1, -1, -1, device=given.device)[None]
        chosen = Chosen(given, ages, keys, call.mask.q, call.mask.k, self.heads)
        looks = torch.tensor(kinds, device=given.device).repeat_interleave(self.heads // self.slots)[:, None, None]
        return lambda q, k: chosen(q, k) | looks

    @torch.no_grad()
    def _hand_on(self, call: Call, given: Tensor | None, kinds: list[bool]) -> Tensor:
        if given is None:
            return self._largest(call, self.slots)
        looking = [slot for slot, kind in enumerate(kinds) if kind]
        if not looking:
            return given
        chosen = self._largest(of_heads(call, looking, self.slots), len(looking))
        wide = max(given.shape[3], chosen.shape[3])
        old, new = (F.pad(each, (0, wide - each.shape[3]), value=NEVER) for each in (given, chosen))
        return old.index_copy(1, torch.tensor(looking, device=old.device), new)

    def _largest(self, call: Call, slots: int) -> Tensor:
        """The keys of the largest weights, the token itself and the sinks first, `[B, slots, T, ≤ budget]`."""
        options, keys, tiles = self.options, call.mask.k, []
        for rows, weights, visible in weights_of(call):
            by_slot = weights.unflatten(1, (slots, -1))
            weight = by_slot.amax(2) if options.group == "max" else by_slot.mean(2)
            always = (cols_of(keys.time) == rows_of(call.mask.q[rows].time)) | (cols_of(keys.position) < options.sinks)
            visible = visible.expand(-1, call.q.shape[1], -1, -1).unflatten(1, (slots, -1)).any(2)
            weight = weight.masked_fill(always & visible, 2.0)  # more than any weight
            tiles.append(weight.topk(min(options.budget, keys.length), -1).indices)
        return keys.length - 1 - torch.cat(tiles, 2)
