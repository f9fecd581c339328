"""Heads that are made to follow a pattern: they look at its keys alone, while the model runs or trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.core.flow import Flow
from manyheads.core.kernel import Call, attend
from manyheads.core.mask import Axis, Mask, Rule, causal
from manyheads.core.tap import Tap
from manyheads.inspect.ablate import Heads, chosen_heads
from manyheads.inspect.edit import Edit, check_maps, flags, programmed, standing_by
from manyheads.inspect.layers import Layer
from manyheads.inspect.measures.relevance import Pattern
from manyheads.inspect.measures.table import tokens_of

How = Literal["mask", "synthesize"]


@dataclass(frozen=True, eq=False)
class Patterned(Edit):
    heads: tuple[int, ...]
    rule: Rule
    q: Axis
    k: Axis
    how: How

    def __str__(self) -> str:
        return "a pattern"

    def _meant(self, visible: Tensor, rows: slice) -> Tensor:
        """The keys of the pattern, of a query that sees one; all that it sees, of others."""
        keys = self.k if visible.shape[-1] == self.k.length else self.k[: visible.shape[-1]]
        meant = self.rule(self.q[rows], keys) & visible
        return torch.where(meant.any(-1, keepdim=True), meant, visible)

    def before(self, scores: Tensor, visible: Tensor, rows: slice) -> Tensor:
        if self.how != "mask":
            return scores
        hidden = visible & ~self._meant(visible, rows) & flags(self.heads, scores.shape[1], scores.device)
        return scores.masked_fill(hidden, -torch.inf)

    def after(self, weights: Tensor, visible: Tensor, rows: slice) -> Tensor:
        if self.how == "mask":
            return weights
        meant = self._meant(visible, rows).to(weights.dtype)
        even = meant / meant.sum(-1, keepdim=True).clamp_min(1)
        return torch.where(flags(self.heads, weights.shape[1], weights.device), even, weights)


class _Tokens:
    """The ids of all keys, as passes bring them."""

    def __init__(self) -> None:
        self.newest: Tensor | None = None
        self.whole: Tensor | None = None

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.newest = tokens_of(kwargs) if kwargs.get("input_ids") is not None else tokens_of(args[0] if args else None)

    def of(self, keys: int) -> Tensor | None:
        new, old = self.newest, self.whole
        if new is not None:
            goes_on = old is not None and len(old) == len(new) and old.shape[1] + new.shape[1] == keys
            self.whole = torch.cat([old, new], 1) if goes_on and old is not None else new
            self.newest = None
        return self.whole if self.whole is not None and self.whole.shape[1] == keys else None


class _Inject(Tap):
    def __init__(self, layer: Layer, heads: list[int], pattern: Pattern, how: How, tokens: _Tokens) -> None:
        self.layer, self.heads, self.pattern, self.tokens = layer, heads, pattern, tokens
        self.how: How = how

    def ask(self, call: Call, flow: Flow | None) -> Call:
        q, k = call.mask.q, call.mask.k
        rule = self.pattern(self.tokens.of(k.length), k)
        return programmed(self.layer, call, flow, Patterned((*self.heads,), rule, q, k, self.how))


@contextmanager
def inject(model: nn.Module, heads: Heads, pattern: Pattern, how: How = "mask") -> Iterator[None]:
    """Fix heads to a pattern; blocks may be nested, one for each pattern, and the model may be trained inside.

    >>> with inject(model, {0: [0]}, measures.same_token), inject(model, {0: [1]}, measures.offset(-1), "synthesize"):
    ...     loss = model(ids, labels=ids).loss

    `mask`: scores outside the pattern are hidden, the head still learns its weights within. `synthesize`: weights are
    even over the pattern, whatever queries and keys are. A query that sees no key of the pattern sees all that it saw
    (evenly, when synthesised). (In the source -10^4 is added outside, which is the same where a key is inside; and
    scores of 1/√d inside, which changes nothing.)

    Args:
        heads: by layer; the published choice is 1 to 3 heads a layer and pattern.
        pattern: of `measures`: `same_token`, `same_sentence(ids)`, `offset(-1)`, or a function of your own.

    Source: Li et al. 2022, arXiv 2112.05364.
    """
    if how not in get_args(How):
        raise ValueError(f"how={how!r}; heads learn within a pattern (mask) or are even over it (synthesize)")
    some = chosen_heads(model, heads)
    check_maps([layer for layer, _ in some])
    tokens = _Tokens()
    hook = model.register_forward_pre_hook(tokens.enter, with_kwargs=True)

    def make(layer: Layer) -> Tap:
        return _Inject(layer, next(of for each, of in some if each is layer), pattern, how, tokens)

    try:
        with standing_by([layer for layer, _ in some], make):
            yield
    finally:
        hook.remove()


class PatternLayer(nn.Module):
    """Narrow attention whose heads follow patterns, to be put beside a block of a model: x + GELU(W_up A(W_down x)).

    W_down: D to D_p; one head of width D_p / n for each of n patterns, with W_Q, W_K, W_V `[D_p, D_p]`; W_up: D_p to D,
    0 at first, so that a model is what it was. 2 D D_p + 3 D_p² numbers.

    Args:
        patterns: one a head, each with how it is followed (see `inject`). causal: whether later keys are hidden.

    Source: Li et al. 2022, arXiv 2112.05364.
    """

    def __init__(self, dim: int, width: int, patterns: Sequence[tuple[Pattern, How]], *, causal: bool = False) -> None:
        super().__init__()
        check_whole(dim=dim, width=width)
        if not patterns or width % len(patterns) or any(how not in get_args(How) for _, how in patterns):
            raise ValueError(
                f"width={width} for {len(patterns)} patterns; a multiple of one or more, mask or synthesize"
            )
        self.patterns, self.causal = list(patterns), causal
        self.down, self.up = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor, ids: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """`[B, T, D]`, x added. ids `[B, T]`, where patterns ask for them; valid `[B, T]`, False on padding."""
        axis, heads, narrow = Axis(x.shape[1], 0, valid=valid, device=x.device), len(self.patterns), self.down(x)
        q, k, v = (
            f(narrow).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        program = tuple(
            Patterned((head,), pattern(ids, axis), axis, axis, how) for head, (pattern, how) in enumerate(self.patterns)
        )
        mask = Mask(axis, axis, (causal,) if self.causal else ())
        o = attend(Call(q, k, v, mask, q.shape[-1] ** -0.5, program=program)).o
        return x + F.gelu(self.up(o.transpose(1, 2).flatten(2)))


__all__ = ["PatternLayer", "inject"]
