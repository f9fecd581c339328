"""An energy that is the sum over atoms, of one of several quantum-chemical methods; forces are its slope."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyheads.multi.head import register_head
from manyheads.multi.heads.regression import Regression


@register_head("energy")
@dataclass(frozen=True)
class Energy(Regression):
    """E = Σ_i (scale · r(f_i) + shift) over atoms that are no padding, of features `[B, atoms, width]`; labels `[B]`.

    A head is a method, on one trunk. Outputs `[B, 2]`: E, and how many atoms; the loss is ((E - label) / atoms)², the
    metrics are of E. r has one hidden layer where `hidden` says so. Padding of any value adds exactly nothing.

    Most of what methods differ by is a constant an element: take `composition @ element_energies(…)` off the labels of
    each method first. With `shift` and `scale` of what is left over an atom, r starts near its target.

    ASSUMED: the paper's heads are those of MACE, one network a method, with losses over atoms.

    Source: Gardner et al. 2025, Understanding Multi-Fidelity Training of Machine-Learned Force-Fields.
    """

    reads = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ask(
            self.size == 1 and self.loss == "squared" and not self.uncertainty, "it is one number with loss=squared"
        )

    def output(self, net: nn.Module, features: Tensor, mask: Tensor | None) -> Tensor:
        kept = features.new_ones(features.shape[:2], dtype=torch.bool) if mask is None else mask
        each = net(features.masked_fill(~kept[..., None], 0)).squeeze(-1) * self.scale + self.shift
        return torch.stack([each.masked_fill(~kept, 0).sum(1), kept.sum(1).to(each.dtype)], -1)

    def losses(self, output: Tensor, target: Tensor, known: Tensor) -> Tensor:
        energy, atoms = output[known].unbind(-1)
        return ((energy - target[known]) / atoms.clamp(min=1)) ** 2

    def predict(self, output: Tensor) -> Tensor:
        return output[:, 0]


def element_energies(composition: Tensor, energies: Tensor) -> Tensor:
    """e0 `[Z]` of one method, by least squares: composition `[S, Z]`, atoms of each element, times e0 are the energies.

    energies: `[S]`, NaN where that method has none. Elements that never occur get 0.

    Raises:
        ValueError: no energy is known, or the shapes do not fit.
    """
    if composition.dim() != 2 or energies.shape != composition.shape[:1]:
        raise ValueError(
            f"composition is {list(composition.shape)} and energies are {list(energies.shape)}; [S, Z] and [S]"
        )
    known = ~energies.isnan()
    if not known.any():
        raise ValueError("no energy is known")
    left = composition[known].double()
    found = torch.linalg.pinv(left) @ energies[known].double()
    return found.to(energies.dtype)


def forces(energy: Tensor, positions: Tensor, *, train: bool = False) -> Tensor:
    """-dE/dr `[B, atoms, 3]` of the energies `[B]` of one head. train: with a graph, for a loss of forces."""
    if not positions.requires_grad:
        raise ValueError("positions need requires_grad_() before the pass")
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=train, retain_graph=True)
    return -slope


def force_losses(found: Tensor, target: Tensor) -> Tensor:
    """Of each sample the mean of |Δ| over components that are known (not NaN), `[B]`; NaN where none is."""
    gap = (found - target).abs().flatten(1)
    known = ~gap.isnan()
    return torch.where(known.any(1), gap.nan_to_num().sum(1) / known.sum(1).clamp(min=1), math.nan)
