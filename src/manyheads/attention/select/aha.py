"""All-or-here attention: each head of each token looks everywhere, or only nearby."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.attention.windows import Far, Near
from manyheads.core.cost import Cost
from manyheads.core.flow import Flow
from manyheads.core.kernel import FEW_ROWS, Call, Out
from manyheads.core.mask import Axis, Rule, causal
from manyheads.core.part import Heads, OptionError, Part, Piece, Site
from manyheads.core.registry import register


@register
@dataclass(frozen=True)
class AHA(Part):
    """o_h = g_h o_h^all + (1 - g_h) o_h^here, g = 1[r > threshold], r = σ(x W_r + b) `[B, T, H]`.

    o^all attends to all that the layer's mask allows, o^here to those keys nearer than `window` (itself included), two
    softmaxes over the same q, k and v. g is straight-through, g + r - stopgrad(r), so that dr = <do, o^all - o^here>.
    The keys nearby and all others are two calls, and o^all is what merges them; without gradients few queries make one
    call, with a mask a head and query. Every row is kept, since a later token may look everywhere.

    In training the mean of r over tokens and heads goes to the auxiliary losses as `aha`; the authors weigh it by 3e-4.

    Options: window, threshold, start (b; W_r starts at zero, so every head looks everywhere: r = 0.98).

    Choices: step 3 and the start are second hand (the abstract's "toggle", the authors' later notes). A router trained
    on frozen weights is reported to collapse to "here"; train all weights.

    Source: All-or-Here Attention 2025, arXiv 2512.22562.
    """

    name: ClassVar[str] = "aha"
    stage: ClassVar = "select"
    paper: ClassVar[str] = "arXiv 2512.22562"
    examples: ClassVar = ({"window": 3}, {"window": 2, "threshold": 0.7})

    window: int = 256
    threshold: float = 0.5
    start: float = 4.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"one map", "own tokens"})

    @property
    def breaks(self) -> frozenset[str]:
        return frozenset({"one map", "alike heads"})

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset({"softmax"})  # near and far keys are joined by their log-sum-exp

    def layout(self, heads: Heads, site: Site) -> Heads:
        if self.window < 1:
            raise OptionError(f"aha: a window of {self.window} tokens sees nothing; the smallest is 1 (itself)")
        return heads

    def build(self, before: Heads, after: Heads, site: Site) -> AHASelect:
        return AHASelect(self, before)

    def cost(self, before: Heads, after: Heads, site: Site) -> Cost:
        return Cost((before.dim + 1) * before.q, token_flops=2 * before.dim * before.q)


class AHASelect(Piece):
    unhooked = ("router",)

    def __init__(self, options: AHA, heads: Heads) -> None:
        super().__init__()
        self.threshold, self.near = options.threshold, Near((options.window,))
        self.router = nn.Linear(heads.dim, heads.q)
        nn.init.zeros_(self.router.weight)
        nn.init.constant_(self.router.bias, options.start)

    def route(self, x: Tensor) -> Tensor:
        """r `[B, H, T]`, in float32 or wider: a threshold is no place for rounding."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.router.weight.to(wide), self.router.bias.to(wide))
        return logits.sigmoid().transpose(1, 2)

    def rules(self, flow: Flow) -> tuple[Rule, ...]:
        if self._apart(flow):
            return ()
        far = self.route(flow.x) > self.threshold

        def near_or_far(q: Axis, k: Axis) -> Tensor:
            return self.near(q, k) | far[:, :, q.within(flow.q), None]

        return (near_or_far,)

    @staticmethod
    def _apart(flow: Flow) -> bool:
        return torch.is_grad_enabled() or flow.q.length > FEW_ROWS

    def split(self, call: Call, flow: Flow) -> list[Call]:
        if not self._apart(flow):
            return [call]
        far = Far(self.near.sizes[0], causal in call.mask.rules)
        return [replace(call, mask=call.mask & rule) for rule in (self.near, far)]

    def join(self, outs: list[Out], flow: Flow) -> Out:
        if len(outs) == 1:
            return outs[0]
        here, far = outs
        assert here.lse is not None and far.lse is not None
        gap = far.lse - here.lse
        share = gap.masked_fill(gap.isnan(), -torch.inf).sigmoid()  # of the far keys in the softmax over all
        r = self.route(flow.x)
        if flow.training:
            tokens = flow.q.validity.expand(len(r), -1)[:, None]
            flow.add_loss("aha", (r * tokens).sum() / (tokens.sum() * r.shape[1]))
        gate = (r > self.threshold).to(r.dtype) + (r - r.detach())
        return Out(here.o.lerp(far.o, (gate * share)[..., None].to(far.o.dtype)))
