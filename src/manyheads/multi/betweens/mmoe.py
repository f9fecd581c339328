"""Experts that heads share, with a gate for each head; some experts may belong to one head, or be closed to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.core.part import OptionError
from manyheads.multi.between import Between, Each, Share, Views, channels, pooled_rows, register_between


@register_between("mmoe")
@dataclass(frozen=True, kw_only=True)
class MMoE(Between):
    """Head k reads s_k = Σ_e g_k[e] f_e(x), g_k = softmax(x W_k + b_k) over the E experts `[B, E]`.

    x is a row; tokens and maps go through the experts place by place, and their gates read the mean over them, so that
    a gate speaks of a sample. An expert that no wanted head may use does not run.

    Some experts, ⌊alpha E⌋ drawn by `seed`, have a head each, drawn too. `exclusivity`: this head alone may use the
    expert; `exclusion`: all but this head may. A closed gate is exactly 0, and so is the gradient through it.

    Options: experts. width: of an expert's output (default: the features'). layers: of an expert, each linear with a
        ReLU; 0 is one linear map. recurrent: `gru` or `lstm` reads the tokens in place of layers. exclusive: `none` is
        MMoE. bias: s_k gets a vector of its own. leaky: a closed gate has the logit 0, as in the authors' code, which
        still lets the expert through.

    Choices: for sequences the authors flatten x for the gate, which ties it to one length; here it is the mean.
    A head added later may use every expert that belongs to nobody else.

    Source: Ma et al. 2018 (MMoE); Aoki, Tung and Oliveira 2021, arXiv 2106.10595 (MMoEEx).
    """

    experts: int = 4
    width: int | None = None
    layers: int = 1
    recurrent: Literal["none", "gru", "lstm"] = "none"
    exclusive: Literal["none", "exclusivity", "exclusion"] = "none"
    alpha: float = 0.5
    seed: int = 0
    bias: bool = False
    leaky: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(
            self.experts > 0 and self.layers >= 0, f"experts={self.experts}, layers={self.layers}; from 1 and 0 on"
        )
        self.ask(self.width is None or self.width > 0, f"width={self.width}; at least 1")
        self.ask(0 <= self.alpha <= 1, f"alpha={self.alpha} is not in [0, 1]")
        self.ask(len(self.taps) < 2, f"taps={list(self.taps)}; it reads one")

    def owners(self, heads: int) -> list[int | None]:
        """Of each expert the head that was drawn for it, by number."""
        chosen: list[int | None] = [None] * self.experts
        if self.exclusive != "none":
            generator = torch.Generator().manual_seed(self.seed)
            some = torch.randperm(self.experts, generator=generator)[: math.floor(self.alpha * self.experts)]
            for expert, head in zip(
                some.tolist(), torch.randint(heads, (len(some),), generator=generator).tolist(), strict=True
            ):
                chosen[expert] = head
        return chosen

    def build(self, widths: Sequence[int], names: Sequence[str]) -> MMoEViews:
        return MMoEViews(self, widths[0], names)


class Gate(nn.Module):
    def __init__(self, options: MMoE, width: int, outputs: int, is_open: list[bool]) -> None:
        super().__init__()
        self.leaky = options.leaky
        self.proj = nn.Linear(width, options.experts)
        self.register_buffer("open", torch.tensor(is_open))
        self.bias = nn.Parameter(torch.zeros(outputs)) if options.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Weights `[B, E]`."""
        closed = ~self.get_buffer("open")
        return self.proj(x).masked_fill(closed, 0.0 if self.leaky else -math.inf).softmax(-1)


class MMoEViews(Views):
    def __init__(self, options: MMoE, width: int, names: Sequence[str]) -> None:
        super().__init__()
        self.options, self.given, self.width = options, width, options.width or width
        owners = options.owners(len(names))
        self.owned = [owner is not None for owner in owners]
        self.experts = nn.ModuleList([self._expert() for _ in owners])
        self.gates = Each()
        for number, name in enumerate(names):
            mine = [owner is None or (owner == number) == (options.exclusive == "exclusivity") for owner in owners]
            if not any(mine):
                raise OptionError(
                    f"mmoe: head {name!r} may use none of experts={options.experts}; another seed, more experts or a "
                    f"smaller alpha than {options.alpha} would leave it one"
                )
            self.gates.put(name, Gate(options, width, self.width, mine))

    def _expert(self) -> nn.Module:
        options = self.options
        if options.recurrent != "none":
            kind = nn.GRU if options.recurrent == "gru" else nn.LSTM
            return kind(self.given, self.width, max(1, options.layers), batch_first=True)
        widths = [self.given] + [self.width] * max(1, options.layers)
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), *([nn.ReLU()] if options.layers else [])]
        return nn.Sequential(*blocks)

    def add(self, name: str) -> None:
        free = [not owned or self.options.exclusive == "exclusion" for owned in self.owned]
        if not any(free):
            raise ValueError("every expert belongs to another head")
        self.gates.put(name, Gate(self.options, self.given, self.width, free))

    def keep(self, names: Sequence[str]) -> None:
        self.gates.keep(names)

    def gate(self, name: str) -> Gate:
        found = self.gates.of(name)
        assert isinstance(found, Gate)
        return found

    def weights(self, x: Tensor, name: str, mask: Tensor | None = None) -> Tensor:
        """A head's gate `[B, E]`."""
        return self.gate(name)(pooled_rows(x, mask))

    def said(self, x: Tensor, experts: Sequence[int]) -> Tensor:
        """Outputs of some experts, `[E', B, …, U]`, places of a map as tokens."""
        x = x.flatten(2).mT if x.dim() == 4 else x
        if self.options.recurrent != "none" and x.dim() != 3:
            raise ValueError(f"mmoe: recurrent={self.options.recurrent} reads tokens [B, T, D], not {list(x.shape)}")
        made = [self.experts[each](x) for each in experts]
        return torch.stack([each[0] if isinstance(each, tuple) else each for each in made])

    def forward(
        self, features: Sequence[Tensor], names: list[str], share: Share, mask: Tensor | None
    ) -> dict[str, Tensor]:
        (x,) = features
        used = torch.stack([self.gate(name).get_buffer("open") for name in names]).any(0)
        used = used | self.options.leaky
        run = used.nonzero().flatten().tolist()
        views = {}
        for name, said in share(self.said(x, run), names).items():
            gate = self.weights(x, name, mask)[:, run]
            view = torch.einsum("be,eb...->b...", gate, said)
            bias = self.gate(name).bias
            view = view if bias is None else view + bias
            views[name] = view.mT.unflatten(2, x.shape[2:]) if channels(x) == 1 else view
        return views


def diversity(said: Tensor) -> float:
    """How unlike experts are: mean over pairs of the distance of their outputs, over the largest, in [0, 1].

    said: outputs on unseen data, `[E, …]`, E at least 2. Source: arXiv 2106.10595.
    """
    if len(said) < 2:
        raise ValueError(f"diversity is of at least 2 experts, not {len(said)}")
    distances = torch.pdist(said.flatten(1).double())
    largest = distances.max()
    return float((distances / largest).mean()) if largest > 0 else 0.0
