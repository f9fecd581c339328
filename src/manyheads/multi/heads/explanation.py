"""Classes with the reason: which tokens or places spoke for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.part import OptionError
from manyheads.multi.head import register_head
from manyheads.multi.heads.classification import Classification
from manyheads.multi.model import MultiHead, naming, pooled
from manyheads.multi.tree import named


class Gate(nn.Module):
    """G = σ(W₂ relu(W₁ F)) ∘ F for features F `[…, width]`, through width // reduction channels; residual: F + G."""

    def __init__(self, width: int, reduction: int = 16, *, residual: bool = False) -> None:
        super().__init__()
        inner = max(1, width // reduction)
        self.down, self.up, self.residual = nn.Linear(width, inner), nn.Linear(inner, width), residual

    def forward(self, features: Tensor) -> Tensor:
        gated = self.up(self.down(features).relu()).sigmoid() * features
        return features + gated if self.residual else gated


class _Folded(nn.Module):
    """Logits of gated positions, by two linear maps with nothing between them."""

    def __init__(self, width: int, classes: int, inner: int, reduction: int) -> None:
        super().__init__()
        self.gate = Gate(width, reduction) if reduction else nn.Identity()
        self.project, self.classify = nn.Linear(width, inner, bias=False), nn.Linear(inner, classes)

    def matrix(self) -> Tensor:
        return self.classify.weight @ self.project.weight

    def forward(self, features: Tensor, mask: Tensor | None) -> Tensor:
        return self.classify(self.project(pooled(self.gate(features), "mean", mask)))


@register_head("explanation")
@dataclass(frozen=True)
class Explanation(Classification):
    """Logits `[B, classes]` of features at positions `[B, P, width]`, and a score of each position for each class.

    G = gate(F) (`Gate`), o[c] = mean_p M[c]·G[p] + b[c], M = K P `[classes, width]`; K and P are learned apart.
    `evidence` is M[c]·G[p], whose mean is the logit less b. `multi.exits("kind", Explanation(3), at=[...])` puts one at
    every depth, each with its share of the loss; `leave_early` takes them too.

    Args:
        inner: width between P and K. reduction: of the gate's channels; 0: no gate, plain class activation.

    A gate that changes the trunk too is a module of it, `Gate(width, residual=True)` behind a block, and reduction is
    0.

    Choices: shapes of the gate, its place and the weights of early heads (1/L) are ASSUMED.

    Source: MHEX (arXiv 2501.01311).
    """

    reads = "tokens"
    inner: int = 64
    reduction: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(self.inner > 0, f"inner={self.inner}; at least 1")
        self.ask(self.reduction >= 0, f"reduction={self.reduction} is negative")
        self.ask(not self.hidden and not self.dropout, "hidden and dropout would stand between maps that are folded")

    def build(self, width: int) -> nn.Module:
        return _Folded(width, self.classes, self.inner, self.reduction)

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        return net(features, mask)

    def evidence(self, net: nn.Module, features: Tensor, classes: Tensor | None = None) -> Tensor:
        """M[c]·G[p] `[B, P, classes]`; of one class a row, classes `[B]`, `[B, P]`."""
        if classes is not None:
            if classes.shape != features.shape[:1] or classes.is_floating_point():
                raise ValueError(
                    f"classes are whole numbers {list(features.shape[:1])}, not {classes.dtype} {list(classes.shape)}"
                )
            wrong = classes[(classes < 0) | (classes >= self.classes)]
            if len(wrong):
                raise ValueError(f"class {int(wrong[0])} is none of 0 to {self.classes - 1}")
        folded = cast(_Folded, net)
        found = folded.gate(features) @ folded.matrix().T
        if classes is None:
            return found
        return found.gather(-1, classes.long()[:, None, None].expand(*found.shape[:2], 1)).squeeze(-1)


@torch.no_grad()
def explain(
    model: MultiHead, *inputs: Any, heads: str | Sequence[str], classes: Tensor | None = None,
    mask: Tensor | None = None, grids: Sequence[tuple[int, int]] | None = None, **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What spoke for a class of each row, `[B, P]` from 0 to 1 over all depths (`saliency`), and the classes `[B]`.

    One pass, no gradients. heads: names of explanation heads, the last of them says the class where none is given.
    """
    seen: dict[str, Tensor] = {}
    heads = named(heads)
    for name in heads:
        with naming(name):
            if not isinstance(model.heads.get(name), Explanation):
                raise ValueError(f"it is no explanation head; there are {', '.join(map(repr, model.heads))}")
    if not heads:
        raise ValueError("name at least one explanation head")

    def keep(name: str) -> Any:
        return lambda net, given: seen.__setitem__(name, given[0])

    handles = [model.net(name).register_forward_pre_hook(keep(name)) for name in heads]
    try:
        outputs = model(*inputs, heads=heads, mask=mask, **more).outputs
    finally:
        for handle in handles:
            handle.remove()
    of = outputs[heads[-1]].argmax(-1) if classes is None else classes
    found = []
    for name in heads:
        with naming(name):
            found.append(cast(Explanation, model.heads[name]).evidence(model.net(name), seen[name], of))
    mask = more.get("attention_mask") if mask is None else mask
    return saliency(found, None if mask is None else mask.bool(), grids), of


def saliency(
    evidence: Sequence[Tensor], mask: Tensor | None = None, grids: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """One map of those of several depths, `[B, P_l]` each: relu, from 0 to 1 by row, the mean over depths.

    A row without any evidence is zero. Maps of unlike numbers of positions are stretched to the longest, or, with each
    one's (height, width) in `grids`, to the largest grid. mask: bool `[B, P]`, False on padding, which gets 0.
    """
    if not evidence or (grids is not None and [h * w for h, w in grids] != [each.shape[1] for each in evidence]):
        raise OptionError(f"grids {grids} are not of maps with {[each.shape[1] for each in evidence]} positions")
    maps = []
    size = max(each.shape[1] for each in evidence)
    largest = None if grids is None else max(grids, key=lambda grid: grid[0] * grid[1])
    for place, each in enumerate(evidence):
        here = each.clamp_min(0)
        if mask is not None and here.shape == mask.shape:
            least = here.masked_fill(~mask, torch.inf).amin(1, keepdim=True)
            here = (here - least).masked_fill(~mask, 0)
        else:
            here = here - here.amin(1, keepdim=True)
        here = here / here.amax(1, keepdim=True).clamp_min(torch.finfo(here.dtype).tiny)
        if grids is not None and grids[place] != largest:
            here = F.interpolate(here.unflatten(1, grids[place])[:, None], largest, mode="bilinear").flatten(1)
        elif here.shape[1] != size:
            here = F.interpolate(here[:, None], size, mode="linear").flatten(1)
        maps.append(here)
    return torch.stack(maps).mean(0)
