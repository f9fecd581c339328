"""Group generalized mean pooling: a power mean with one learned exponent for each group of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyheads.aggregate.aggregator import Options, Pooled, Streamed, counted, register_aggregator
from manyheads.aggregate.running import Exponentials, merge_exponentials, scale
from manyheads.core.check import check_whole


@register_aggregator("ggem")
@dataclass(frozen=True)
class GGeM(Options):
    """y_c = (1/N Σ_n max(x_nc, eps)^{p_g})^{1/p_g}, g the group of channel c, p_g learned and above 0.

    x `[B, N, D]`, out `[B, 1, D]`. p = 1 is the mean, p → ∞ the maximum, p → 0 the geometric mean. Computed as
    exp((ln Σ_n e^{p ln x} - ln N)/p), in float32 at least, which does not overflow. Blocks give exactly what one pass
    gives. Give the tokens without the class token, behind the last norm of the model (ASSUMED); `norm=true` puts one in
    front. Groups may follow heads only before an output projection mixes them.

    Args:
        groups: of D / groups channels. start: of p. eps: see above.
        negatives: `clamp` is the published form, in which what lies below eps (behind a norm, half of all) gets no
            gradient. `signed`: Σ_n sign(x) max(|x|, eps)^p, with its sign. `shift`: x + s_g, s learned from 0, first.

    Source: Ko et al., Group Generalized Mean Pooling for Vision Transformer (arXiv 2212.04114).
    """

    groups: int = 8
    start: float = 3.0
    eps: float = 1e-6
    negatives: Literal["clamp", "signed", "shift"] = "clamp"
    norm: bool = False

    def __post_init__(self) -> None:
        check_whole(groups=self.groups)
        self.ask(self.start > 0, f"start={self.start}; an exponent is above 0")
        self.ask(self.eps > 0, f"eps={self.eps}; above 0")

    def build(self, width: int) -> GGeMPool:
        self.ask(width % self.groups == 0, f"groups={self.groups} do not divide {width} channels")
        return GGeMPool(self, width)

    @classmethod
    def examples(cls) -> tuple[GGeM, ...]:
        return (cls(2, negatives="signed", norm=True), cls(4, start=1.0, negatives="shift"))


class GGeMPool(Streamed):
    options: GGeM

    def __init__(self, options: GGeM, width: int) -> None:
        super().__init__(options, width)
        self.p = nn.Parameter(torch.full((options.groups,), options.start))
        self.shift = nn.Parameter(torch.zeros(options.groups)) if options.negatives == "shift" else None
        self.norm = nn.LayerNorm(width) if options.norm else None

    def _by_channel(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.width // self.options.groups)

    def exponents(self) -> Tensor:
        """p of each channel, `[D]`."""
        return self._by_channel(self.p.clamp(min=1e-6))

    def pool(
        self, x: Tensor, mask: Tensor, size: Tensor | None, *, query: Tensor | None, cond: Tensor | None
    ) -> Pooled:
        found = self.finalize(self.observe(x, mask, size))
        return found._replace(out=found.out.to(x.dtype))

    def observe(self, x: Tensor, mask: Tensor, size: Tensor | None = None) -> tuple[Tensor, Exponentials]:
        if self.norm is not None:
            x = self.norm(x)
        x = x if x.dtype == torch.float64 else x.float()
        if self.shift is not None:
            x = x + self._by_channel(self.shift)
        signed = self.options.negatives == "signed"
        power = self.exponents() * (x.abs() if signed else x).clamp(min=self.options.eps).log()
        power = power.masked_fill(~mask[..., None], -torch.inf)
        top = power.amax(1).detach()
        weight = counted(mask, size, x.dtype)[..., None]
        terms = weight * (power - scale(top)[:, None]).exp() * (x.sign() if signed else 1.0)
        return weight.sum(1), Exponentials(top, (terms.sum(1),))

    def merge(
        self, a: tuple[Tensor, Exponentials], b: tuple[Tensor, Exponentials]
    ) -> tuple[Tensor, Exponentials]:  # fmt: skip
        return a[0] + b[0], merge_exponentials(a[1], b[1])

    def finalize(self, state: tuple[Tensor, Exponentials]) -> Pooled:
        count, (top, (total,)) = state
        least = torch.finfo(total.dtype).tiny
        mean = scale(top) + total.abs().clamp(min=least).log() - count.clamp(min=least).log()
        out = total.sign() * (mean / self.exponents()).exp()
        return Pooled(torch.where(count > 0, out, 0.0)[:, None])
