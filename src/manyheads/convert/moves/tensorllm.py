"""The weights of all heads of a layer as one tensor of low Tucker rank.

Query, key, value and (transposed) output weights of head h are the slices of T_h `[D, d, 4]`; all heads of one layer
make T `[D, d, 4, H]`, and T ≈ G ×₁ U₁ ×₂ U₂ ×₃ U₃ with orthonormal columns that the heads share and a core
`[R₁, R₂, R₃]` of each head's own. Fitted by alternating: each U holds the leading singular vectors of the tensor seen
through the others, from those of the tensor itself on. With fewer key heads than query heads there are two tensors of
two slices: queries with outputs, keys with values.

The move rebuilds the weights, as the authors do: the layer, its cache and its speed stay what they are, and what the
low rank leaves out is gone, which is the point (denoising). Nothing is trained; healing would put it back (`--heal
none`). Biases stay.

What is truncated depends on the gauge: maps between V and O that change nothing in the layer change the result.

Source: TensorLLM 2025, arXiv 2501.15674.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from manyheads.attention.project.gqa import GQA, GQAProject
from manyheads.convert.moves.common import like
from manyheads.convert.stats import AttentionStats
from manyheads.core.part import OptionError
from manyheads.core.spec import Spec
from manyheads.stack.seam import SeamAttention

TOLERANCE = 1e-4
"""Relative fall of the error below which sweeps end."""


class Tensorised(NamedTuple):
    """G `[R₁, R₂, R₃, H]` and U₁ `[D, R₁]`, U₂ `[d, R₂]`, U₃ `[slices, R₃]`; errors: |T - T̂|² after each sweep."""

    core: Tensor
    factors: tuple[Tensor, Tensor, Tensor]
    errors: tuple[float, ...] = ()

    @property
    def dense(self) -> Tensor:
        """T̂ `[D, d, slices, H]`."""
        return torch.einsum("abch,xa,yb,zc->xyzh", self.core, *self.factors)

    @property
    def numbers(self) -> int:
        return self.core.numel() + sum(factor.numel() for factor in self.factors)

    @property
    def maps(self) -> Tensor:
        """A = Σ_c U₃[s, c] G_h[:, :, c], `[slices, H, R₁, R₂]`: slice s of T_h is U₁ A U₂ᵀ.

        In this form z = U₁ᵀ x is computed once a token, and a head's query is U₂ (Aᵀ z).
        """
        return torch.einsum("abch,zc->zhab", self.core, self.factors[2])


def tensorise(tensor: Tensor, ranks: tuple[int, int, int], sweeps: int = 100) -> Tensorised:
    """The Tucker form of `[D, d, slices, H]` with the last mode free; ranks above what there is are clipped."""
    widths = [min(rank, size, tensor.numel() // size) for rank, size in zip(ranks, tensor.shape, strict=False)]
    factors = [_leading(tensor, mode, width) for mode, width in enumerate(widths)]
    total, errors = tensor.pow(2).sum().item(), []
    for _ in range(sweeps + 1):
        core = torch.einsum("xyzh,xa,yb,zc->abch", tensor, *factors)
        errors.append(max(0.0, total - core.pow(2).sum().item()))
        if len(errors) > 1 and errors[-2] - errors[-1] <= TOLERANCE * errors[-2]:
            break
        for mode in range(3) if len(errors) <= sweeps else ():
            others = [torch.eye(len(f)).to(f) if n == mode else f for n, f in enumerate(factors)]
            seen = torch.einsum("xyzh,xa,yb,zc->abch", tensor, *others)
            factors[mode] = _leading(seen, mode, widths[mode])
    return Tensorised(core, (factors[0], factors[1], factors[2]), tuple(errors))


def _leading(tensor: Tensor, mode: int, count: int) -> Tensor:
    """The leading left singular vectors of an unfolding."""
    rows = tensor.movedim(mode, 0).flatten(1)
    return torch.linalg.eigh(rows @ rows.T)[1].flip(-1)[:, :count]


def numbers(dim: int, width: int, heads: int, ranks: tuple[int, int, int], slices: int = 4) -> int:
    """D·R₁ + d·R₂ + slices·R₃ + H·R₁·R₂·R₃, against slices·D·d·H of the weights."""
    r1, r2, r3 = ranks
    return dim * r1 + width * r2 + slices * r3 + heads * math.prod(ranks)


@dataclass(frozen=True)
class ToTensor:
    """The move: `gqa` to itself, its weights of low rank; exact at ranks (min(D, 4·d·H), d, 4).

    ranks: None: half of x's channels, and all of the rest. layers, if given: those to change; others stay.
    """

    ranks: tuple[int, int, int] | None = None
    layers: tuple[int, ...] | None = None
    sweeps: int = 100

    def refusal(self, spec: Spec) -> str | None:
        """Why a layer with this spec cannot be converted, or None."""
        gqa = next((part for part in spec.parts if isinstance(part, GQA)), None)
        if gqa is None:
            return f"the tensor is made of the weights of gqa, not of {spec}"
        if gqa.v_dim not in (None, gqa.head_dim):
            return f"keys and values of one width make a tensor, and those of {spec} have two"
        return None

    def __call__(self, attention: SeamAttention, stats: AttentionStats | None = None) -> SeamAttention:
        """The layer of the same spec."""
        if why := self.refusal(attention.spec):
            raise OptionError(why)
        new = like(attention, attention.spec)
        new.load_state_dict(attention.state_dict())
        if self.layers is None or attention.site.layer in self.layers:
            ranks = (attention.dim // 2, attention.layout.qk_width, 4) if self.ranks is None else self.ranks
            for names, tensor in tensors_of(attention).items():
                dense = tensorise(tensor, ranks, self.sweeps).dense
                for name, slice_ in zip(names, dense.unbind(2), strict=True):
                    _put(new, name, slice_)
        return new


def tensors_of(attention: SeamAttention) -> dict[tuple[str, ...], Tensor]:
    """The tensors `[D, d, slices, heads]` of a layer by the letters of their slices: one of four, or two of two."""
    project, layout = cast(GQAProject, attention.project), attention.layout
    q, k, v = (
        linear.weight.detach().double().unflatten(0, (heads, -1)).permute(2, 1, 0)
        for linear, heads in ((project.q_proj, layout.q), (project.k_proj, layout.kv), (project.v_proj, layout.kv))
    )
    o = project.o_proj.weight.detach().double().unflatten(1, (layout.q, -1)).transpose(1, 2)
    if layout.q == layout.kv:
        return {("q", "k", "v", "o"): torch.stack([q, k, v, o], 2)}
    return {("q", "o"): torch.stack([q, o], 2), ("k", "v"): torch.stack([k, v], 2)}


@torch.no_grad()
def _put(attention: SeamAttention, name: str, heads: Tensor) -> None:
    """Heads `[D, d, heads]` as the weight of one projection."""
    linear = cast(torch.nn.Linear, getattr(attention.project, f"{name}_proj"))
    linear.weight.copy_((heads.transpose(1, 2) if name == "o" else heads.permute(2, 1, 0)).reshape(linear.weight.shape))
