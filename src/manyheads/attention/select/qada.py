"""QAdA: two moments of the far keys tell each head and query whether it needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Literal

import torch
from torch import Tensor

from manyheads.attention.chunks import gathered, of_heads
from manyheads.attention.windows import First, Near
from manyheads.core.check import is_number
from manyheads.core.cost import Cost
from manyheads.core.entries import State
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, Out
from manyheads.core.kernels.tiled import TILE_BYTES
from manyheads.core.mask import Axis, causal
from manyheads.core.moments import KeyMoments, enough, gaussian_lse, predicted_lse
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class QAdA(Part):
    """A head reads near keys alone where these are predicted to have a share of `least` of its softmax, else all keys.

    Near keys are a document's `first` tokens and the `window` newest ones (the query's own included), all others far.
    With scores z = s q·k: near alone iff lse_near(z) - (log n + s μᵀq + s² qᵀΣq / 2) ≥ log(least / (1 - least)), where
    n, μ and Σ are count, mean and covariance of the far keys, as they are rotated. least=0: near keys alone; 1: all
    keys. A local decision is off by 1 - ρ in total variation, ρ being the true near share.

    One new token of a sequence decides by n, μ `[G, E]` and Σ `[G, E, E]` that the cache keeps and that each key
    enters as it leaves the window; without gradients a key head whose query heads are all local, in every sequence of
    the batch, then reads none of its far keys. Longer passes, and masks that hide more than later tokens, take the same
    moments from the scores of far keys, so they save nothing. Every row is kept. No gradient goes through a decision.

    Options: least (τ), first, window. covariance: Σ, or its diagonal (E numbers a key head in place of E²).

    Choices: the moments are those of the far keys themselves (the abstract leaves open whether they are of others).
    Scores are products of queries and keys here, before a bias or a soft cap.

    Source: Donhauser et al. 2025, arXiv 2502.09647.
    """

    name: ClassVar[str] = "qada"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2502.09647"
    examples: ClassVar = (
        {"window": 2, "first": 1, "least": 0.55},
        {"window": 1, "first": 0, "least": 0.5, "covariance": "diagonal"},
    )

    least: float = 0.6
    first: int = 4
    window: int = 128
    covariance: Literal["full", "diagonal"] = "full"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"causal", "self", "head keys", "token keys", "one map", "adjacent keys"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"adjacent keys"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "alike heads", "values alone"})

    def layout(self, heads: Heads, site: Site) -> Heads:
        if not (is_number(self.least) and 0 <= self.least <= 1):
            raise OptionError(f"qada: least={self.least!r}; a share is 0 to 1")
        if self.first < 0 or self.window < 1:
            raise OptionError(f"qada: first={self.first}, window={self.window}; 0 tokens or more, and 1 key or more")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> QAdASelect:
        return QAdASelect(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        width = before.qk_width
        size = width + (width if self.covariance == "diagonal" else width**2)
        return Cost(state_floats=1 + before.kv * size, token_flops=2 * (before.kv + before.q) * size)


class QAdASelect(Piece):
    joins_by_lse = False

    def __init__(self, options: QAdA, heads: Heads) -> None:
        super().__init__()
        self.options, self.diagonal = options, options.covariance == "diagonal"
        near = Near((options.window,))
        self.near = First(options.first, near) if options.first else near
        width = heads.qk_width
        self.states = {
            "far count": State((1,)),
            "far mean": State((heads.kv, width)),
            "far covariance": State((heads.kv, width) if self.diagonal else (heads.kv, width, width)),
        }

    def split(self, call: Call, flow: Flow) -> Sequence[Call]:
        if flow.described:
            return [call]
        moments = self._keep(call, flow)
        if self.options.least == 1:
            return [call]
        one = call.q.shape[2] == 1 and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        if not one or moments is None or call.mask.rules != (causal,) or call.mask.k.segment is not None:
            return [self._masked(call, self.decide(call))]
        near = gathered(replace(call, mask=call.mask & self.near), self._near_rows(call))
        local = moments.local(_lse_of(near), call.q[:, :, 0].to(moments.mean), call.scale, self.options.least)
        return self._apart(call, near, local)

    def join(self, outs: list[Out], flow: Flow) -> Out:
        return outs[0] if len(outs) == 1 else Out(torch.cat([out.o for out in outs], 1))

    @torch.no_grad()
    def decide(self, call: Call) -> Tensor:
        """Which heads of which queries are local, bool `[B, H, T]`, by the moments of the far keys of each query."""
        wide = torch.promote_types(call.q.dtype, torch.float32)
        q, k = call.q.to(wide) * call.scale, call.k.to(wide)
        batch, heads, t, _ = q.shape
        k = k.repeat_interleave(heads // k.shape[1], 1)
        step, found = max(1, TILE_BYTES // max(1, batch * heads * k.shape[2] * k.element_size())), []
        for at in range(0, t, step):
            rows = slice(at, min(at + step, t))
            tile, scores = q[:, :, rows], q[:, :, rows] @ k.mT
            visible, near = call.mask.tile(rows), self.near(call.mask.q[rows], call.mask.k)
            far = visible & ~near
            if self.diagonal:
                n = far.sum(-1)
                share = far.to(wide) / n.clamp_min(1)[..., None]
                centre = share @ k
                spread = (tile.square() * (share @ k.square() - centre.square())).sum(-1)
                there = gaussian_lse(n, (share * scores).sum(-1), spread)
            else:
                there = predicted_lse(scores, far)
            here = scores.masked_fill(~(visible & near), -torch.inf).logsumexp(-1)
            found.append(enough(here, there, self.options.least))
        return torch.cat(found, 2)

    def _masked(self, call: Call, local: Tensor) -> Call:
        """The call in which local heads see near keys alone."""
        whole = call.mask.q

        def near_or_far(q: Axis, k: Axis) -> Tensor:
            return self.near(q, k) | ~local[:, :, q.within(whole), None]

        return replace(call, mask=call.mask & near_or_far)

    def _apart(self, call: Call, near: Call, local: Tensor) -> list[Call]:
        """Key heads that some query head needs whole, and the near keys of the others; `local` `[B, H]`."""
        slots = call.k.shape[1]
        by_slot = local.unflatten(1, (slots, -1))
        alone = by_slot.all(2).all(0)
        kinds = alone.tolist()
        if all(kinds):
            return [near]
        mixed = (by_slot.any(2).any(0) & ~alone).any()  # a head that is local beside one that is not
        whole = self._masked(call, local[..., None]) if mixed else call
        if not any(kinds):
            return [whole]
        runs = groupby(range(slots), kinds.__getitem__)  # side by side, so that their rows need no copy
        return [of_heads(near if kind else whole, [*run], slots) for kind, run in runs]

    def _near_rows(self, call: Call) -> Tensor:
        """The rows of near keys of one query, `[B, G, 1, N]`, -1 for none."""
        keys, length, count = call.mask.k, call.k.shape[2], self.options.first
        begins = max(length - self.options.window, 0)
        rows = torch.arange(begins, length, device=call.k.device).expand(len(call.q), -1)
        if count := min(count, begins):
            firsts = keys[:begins]
            found = (firsts.validity & (firsts.position < self.options.first)).long().topk(count, -1)
            first = found.indices.masked_fill(found.values == 0, -1)
            rows = torch.cat([first.expand(len(rows), -1), rows], 1)
        return rows[:, None, None].expand(-1, call.k.shape[1], -1, -1)

    @torch.no_grad()
    def _keep(self, call: Call, flow: Flow) -> KeyMoments | None:
        """The moments of keys that are far from the first new query, if cached; keeps those for the next pass."""
        assert flow.rows is not None
        if flow.rows.log is None:  # no cache
            return None
        names, stop = [*self.states], max(0, call.k.shape[2] - self.options.window + 1)
        old = None
        if names[0] in flow.state:
            count, mean, covariance = (flow.state[name] for name in names)
            old = KeyMoments(count[:, 0], mean, covariance)
        start = 0 if old is None else max(0, stop - call.q.shape[2])
        axis, k = call.mask.k[start:stop], call.k[:, :, start:stop]
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        counted = (axis.validity & (axis.position >= self.options.first)).expand(len(k), -1)
        new = KeyMoments.of(k, counted, self.diagonal)
        new = new if old is None else old.add(new)
        count = torch.as_tensor(new.n, device=k.device)[:, None].to(k.dtype)
        flow.new_state |= dict(zip(names, (count, new.mean, new.covariance), strict=True))
        return old


def _lse_of(call: Call) -> Tensor:
    """The log-sum-exp of one query's scores `[B, H]`, in float32 or wider."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    q = call.q[:, :, 0].to(wide).unflatten(1, (call.k.shape[1], -1)) * call.scale
    scores = (q @ call.k.to(wide).mT).flatten(1, 2)
    return scores.masked_fill(~call.mask.tile()[:, :, 0], -torch.inf).logsumexp(-1)
