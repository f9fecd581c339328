"""Some heads are made to look at one region rather than others, by a bias on their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from manyheads.core.flow import Flow
from manyheads.core.kernel import Call
from manyheads.core.mask import cols_of
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Heads, chosen_heads
from manyheads.inspect.edit import Edit, Tokens, check_maps, flags, places, programmed, standing_by
from manyheads.inspect.layers import Layer
from manyheads.inspect.measures.gaze import check_regions

Suppress = Literal["regions", "prompt", "all"]


@dataclass(frozen=True, eq=False)
class Biased(Edit):
    """bias `[B or 1, S]` is added to the scores of some heads."""

    heads: tuple[int, ...]
    bias: Tensor

    def __str__(self) -> str:
        return "biased attention"

    def before(self, scores: Tensor, visible: Tensor, rows: slice) -> Tensor:
        bias = cols_of(self.bias[:, : scores.shape[-1]]).to(scores.dtype)
        top = bias.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
        bias = bias - top.masked_fill(top == -torch.inf, 0)  # the same softmax; scores looked at keep their digits
        return torch.where(flags(self.heads, scores.shape[1], scores.device), scores + bias, scores)


class _LookAt(Tap):
    def __init__(
        self, layer: Layer, heads: list[int], regions: list[Tokens], schedule: list[tuple[int, int]], bias: float,
        suppress: Suppress, raised: bool, decode_only: bool,
    ) -> None:  # fmt: skip
        self.layer, self.heads, self.regions, self.schedule = layer, heads, regions, schedule
        self.bias, self.suppress, self.raised, self.decode_only = bias, suppress, raised, decode_only
        self.step, self.prompt = -1, 0

    def ask(self, call: Call, flow: Flow | None) -> Call:
        q, k = call.mask.q, call.mask.k
        goes_on = k.length > q.length or int(q.time.amin()) > 0
        self.step = self.step + 1 if goes_on else 0
        self.prompt = self.prompt if goes_on and self.prompt else int(k.time.amax()) + 1
        due = [target for step, target in self.schedule if step <= self.step]
        if not due or not self.bias or (self.decode_only and not goes_on):
            return call
        inside = [places(region, k) for region in self.regions]
        any_region = torch.stack([x.expand(max(map(len, inside)), -1) for x in inside]).any(0)
        wanted = inside[due[-1]]
        low = {"regions": any_region, "prompt": any_region | (k.time < self.prompt)}.get(self.suppress)
        low = torch.ones_like(any_region) if low is None else low
        bias = torch.where(low & ~wanted, -self.bias, 0.0) + torch.where(wanted, self.bias * self.raised, 0.0)
        return programmed(self.layer, call, flow, Biased((*self.heads,), bias))


@contextmanager
def look_at(
    model: nn.Module, heads: Heads, regions: Sequence[Tokens], target: int | Sequence[tuple[int, int]], *,
    bias: float = 10_000.0, suppress: Suppress = "regions", raised: bool = True, decode_only: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Make heads look at one region rather than others, while the model runs.

    >>> with look_at(model, found.heads(100), regions, target=2):
    ...     model.generate(**inputs)

    Adds +bias to the scores of the target's tokens and -bias to those of the other regions: odds of target against text
    grow by e^bias, against other regions by e^(2 bias). All other heads keep their maps, of the first such layer at
    least; later ones see what it wrote.

    Args:
        heads: by layer, see `measures.gaze`. regions: sets of tokens.
        target: which region; or (step, region) pairs: from that pass on, 0 the prompt, n the n-th token written. Before
            the first of them nothing is changed.
        bias: 0 changes nothing; at the default nothing else is looked at.
        suppress: what gets -bias: other `regions`; also the rest of the `prompt`; or `all` tokens, written ones too.
        raised: whether the target gets +bias. decode_only: leave the prompt's own pass alone.

    Raises:
        ValueError: heads, regions or steps that do not exist, layers without one map a head.

    Source: arXiv 2606.14703.
    """
    sets, some = check_regions(regions), chosen_heads(model, heads)
    check_maps([layer for layer, _ in some])
    schedule = [(0, target)] if isinstance(target, int) else sorted((int(s), int(r)) for s, r in target)
    if not schedule or any(s < 0 or not 0 <= r < len(sets) for s, r in schedule):
        raise ValueError(
            f"target={target!r}; a region from 0 to {len(sets) - 1}, or (step, region) pairs, steps from 0 on"
        )
    if bias < 0 or suppress not in get_args(Suppress):
        raise ValueError(f"bias={bias}, suppress={suppress!r}; 0 or more, and one of {', '.join(get_args(Suppress))}")

    def make(layer: Layer) -> Tap:
        of = next(of for each, of in some if each is layer)
        return _LookAt(layer, of, sets, schedule, bias, suppress, raised, decode_only)

    with standing_by([layer for layer, _ in some], make):
        yield


__all__ = ["look_at"]
