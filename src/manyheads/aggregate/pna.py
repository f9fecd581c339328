"""Principal neighbourhood aggregation: several statistics of a set, each scaled by functions of its size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Options, Pooled, Streamed, counted, register_aggregator
from manyheads.aggregate.running import Moments, merge_moments, moments
from manyheads.core.check import check_whole, is_number

EPS = 1e-5


def _mean(x: Tensor, counts: Tensor) -> Tensor:
    weight = counts[..., None]
    return (weight * x).sum(-2) / weight.sum(-2).clamp(min=torch.finfo(x.dtype).tiny)


def _soft(sign: float, x: Tensor, counts: Tensor) -> Tensor:
    return ((sign * x + counts.log()[..., None]).softmax(-2) * x).sum(-2)


def moment(order: int, x: Tensor, counts: Tensor) -> Tensor:
    """sign(c) (|c| + 1e-5)^(1/order), c = mean (x - mean x)^order, over the tokens of x `[…, N, F]`."""
    c = _mean((x - _mean(x, counts)[..., None, :]) ** order, counts)
    return c.sign() * (c.abs() + EPS) ** (1 / order)


OF_MOMENTS = {
    "mean": lambda m: m.mean,
    "max": lambda m: m.largest,
    "min": lambda m: m.smallest,
    "std": lambda m: (m.spread / m.count.clamp(min=1e-30) + EPS).sqrt(),
    "var": lambda m: m.spread / m.count.clamp(min=1e-30),
    "sum": lambda m: m.mean * m.count,
}
"""Statistics that follow from a state."""

OF_TOKENS = {
    "softmax": lambda x, counts: _soft(1.0, x, counts),
    "softmin": lambda x, counts: _soft(-1.0, x, counts),
}
"""Those that need the tokens; so do moments of any order, `moment3`."""

SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse")


@register_aggregator("pna")
@dataclass(frozen=True)
class PNA(Options):
    """U([q; concat over scalers s of concat over statistics of s(d)·stat_n(m_n)]), m_n = M([q; x_n]), d the set's size.

    x `[B, N, D]`; a `query` q `[B, M, D]` is the node whose neighbours x are, and there is one where `centre` says so.
    Out `[B, M, D]`, M = 1 without a query. Statistics of each channel: mean, max, min, std = sqrt(var + 1e-5), sum,
    var, softmax and softmin (Σ softmax(±m) m), moment<n>. Scalers: identity; amplification ln(d + 1)/δ; attenuation
    δ/ln(d + 1); linear d/d̄; inverse d̄/d. δ and d̄, the means of ln(d + 1) and d over training sets, are buffers, which
    `fit` sets. Variances are centred before they are squared, in float32 at least. An empty set gives 0. Blocks give
    what one pass gives for the first six statistics, without a query.

    Args:
        statistics, scalers: in their order. towers: groups of channels with M and U of their own; behind several comes
            linear and LeakyReLU over all. learned: false for neither M nor U, out `[B, M, S·A·D]`.
        centre: whether there is a query. delta, degree: δ and d̄ until `fit`.

    Source: Corso et al. (arXiv 2004.05718). A public dense form reduces maxima over another axis than means; not here.
    """

    takes = frozenset({"query"})
    statistics: tuple[str, ...] = ("mean", "max", "min", "std")
    scalers: tuple[str, ...] = ("identity", "amplification", "attenuation")
    towers: int = 1
    learned: bool = True
    centre: bool = False
    delta: float = 1.0
    degree: float = 1.0

    def __post_init__(self) -> None:
        check_whole(towers=self.towers)
        for each in self.statistics:
            known = each in OF_MOMENTS or each in OF_TOKENS or re.fullmatch(r"moment[2-9]", each)
            self.ask(bool(known), f"no statistic {each!r}; {', '.join([*OF_MOMENTS, *OF_TOKENS])}, moment2 to moment9")
        for each in self.scalers:
            self.ask(each in SCALERS, f"no scaler {each!r}; {', '.join(SCALERS)}")
        self.ask(bool(self.statistics and self.scalers), "it needs a statistic and a scaler")
        for name in ("delta", "degree"):
            value = getattr(self, name)
            self.ask(is_number(value) and value > 0, f"{name}={value}; a number above 0")
        self.ask(self.learned or self.towers == 1, "towers are of learned maps; learned=false has none")
        self.ask(self.learned or not self.centre, "a query enters by learned maps; learned=false has none")

    def build(self, width: int) -> PNAPool:
        self.ask(width % self.towers == 0, f"towers={self.towers} do not divide a width of {width}")
        return PNAPool(self, width)

    @classmethod
    def examples(cls) -> tuple[PNA, ...]:
        others = ("sum", "var", "softmax", "softmin", "moment3")
        return (
            cls(learned=False),
            cls(others, SCALERS, towers=2, delta=1.7, degree=4.0),
            cls(("sum", "std"), ("linear", "inverse"), towers=4),
        )


class Towers(nn.Module):
    """A linear map `[…, in] → […, out]` of each of several equal groups of channels."""

    def __init__(self, towers: int, inner: int, outer: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inner)
        self.weight = nn.Parameter(torch.empty(towers, inner, outer).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(towers, outer).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """x: `[…, towers, in]`."""
        return torch.einsum("...ti,tio->...to", x, self.weight) + self.bias


class PNAPool(Streamed):
    options: PNA
    delta: Tensor
    degree: Tensor

    def __init__(self, options: PNA, width: int) -> None:
        super().__init__(options, width)
        self.register_buffer("delta", torch.tensor(options.delta))
        self.register_buffer("degree", torch.tensor(options.degree))
        each, several = width // options.towers, len(options.statistics) * len(options.scalers)
        self.message = self.update_map = self.mixer = None
        if options.learned:
            self.message = Towers(options.towers, each * (1 + options.centre), each)
            self.update_map = Towers(options.towers, each * (several + options.centre), each)
        if options.towers > 1:
            self.mixer = nn.Sequential(nn.Linear(width, width), nn.LeakyReLU())

    def fit(self, sizes: Iterable[float] | Tensor) -> None:
        """Set δ and d̄ from the sizes of the training sets."""
        sizes = torch.as_tensor(sizes if isinstance(sizes, Tensor) else list(sizes), dtype=torch.float64)
        if not len(sizes) or not bool((sizes > 0).any()):
            raise ValueError("pna: δ and d̄ are means over training sets, of which one at least has a token")
        self.delta.fill_((sizes + 1).log().mean().item())
        self.degree.fill_(sizes.mean().item())

    @property
    def exact(self) -> bool:
        return not self.options.centre and all(each in OF_MOMENTS for each in self.options.statistics)

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        if (query is not None) != self.options.centre:
            raise ValueError(f"pna: centre={str(self.options.centre).lower()}, and the query is {type(query).__name__}")
        messages, counts = self._messages(x, query), counted(mask, size, _wide(x))[:, None]
        state, found = moments(messages, counts), {}
        for each in self.options.statistics:
            if each in OF_TOKENS:
                found[each] = OF_TOKENS[each](messages, counts)
            elif each not in OF_MOMENTS:
                found[each] = moment(int(each[-1]), messages, counts)
        return self._finish(state, found, query, x.dtype)

    def observe(self, x: Tensor, mask: Tensor, size: Tensor | None = None) -> Moments:
        if not self.exact:
            raise ValueError(f"pna: blocks are for {', '.join(OF_MOMENTS)} without a query, not for {self.options}")
        return moments(self._messages(x, None), counted(mask, size, _wide(x))[:, None])

    def merge(self, a: Moments, b: Moments) -> Moments:
        return merge_moments(a, b)

    def finalize(self, state: Moments) -> Pooled:
        dtype = state.mean.dtype if self.update_map is None else self.update_map.weight.dtype
        out = self._finish(state, {}, None, dtype).out
        return Pooled(torch.where(state.count > 0, out, 0.0))

    def _messages(self, x: Tensor, query: Tensor | None) -> Tensor:
        """`[B, M, N, D]`."""
        x = x[:, None]
        if self.message is not None:
            parts = [x] if query is None else [query[:, :, None].expand(-1, -1, x.shape[2], -1), x]
            x = self.message(self._grouped([part.expand(-1, parts[0].shape[1], -1, -1) for part in parts])).flatten(-2)
        return x.to(_wide(x))

    def _grouped(self, parts: list[Tensor]) -> Tensor:
        """Of tensors `[…, D]`, `[…, towers, parts·D/towers]`."""
        return torch.cat([part.unflatten(-1, (self.options.towers, -1)) for part in parts], -1)

    def _finish(self, state: Moments, found: dict[str, Tensor], query: Tensor | None, dtype: torch.dtype) -> Pooled:
        empty = state.count == 0
        count = state.count.masked_fill(empty, 1.0)
        logs = (count + 1).log()
        scales = {
            "identity": 1.0, "amplification": logs / self.delta, "attenuation": self.delta / logs,
            "linear": count / self.degree, "inverse": self.degree / count,
        }  # fmt: skip
        values = [
            found[each] if each in found else OF_MOMENTS[each](state).masked_fill(empty, 0.0)
            for each in self.options.statistics
        ]
        parts = [cast(Tensor, scales[scaler] * value).to(dtype) for scaler in self.options.scalers for value in values]
        if self.update_map is None:
            return Pooled(torch.cat(parts, -1))
        out = self.update_map(self._grouped(parts if query is None else [query, *parts])).flatten(-2)
        return Pooled(out if self.mixer is None else self.mixer(out))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
