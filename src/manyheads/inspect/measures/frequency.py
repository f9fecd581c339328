"""What layers do to features as images and to the loss as a landscape: frequencies, variance, curvature.

Source: Park and Kim 2022 (How Do Vision Transformers Work?), arXiv 2202.06709.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from manyheads.core.check import check_whole
from manyheads.inspect.ablate import Inputs, batches_of, run
from manyheads.inspect.measures.grid import Grid


def amplitudes(z: Tensor) -> Tensor:
    """Δ log amplitude `[K]` by frequency from 0 to π, of features `[B, C, h, w]` (or `[B, C, n]` of a text).

    log(|FFT(z)| + 10⁻⁶), the mean over batch and channels, along the diagonal from frequency 0 to the highest, less
    its first value. The last is what is left of the highest frequency; attention lowers it, convolution raises it.
    """
    if z.ndim not in (3, 4):
        raise ValueError(f"features [B, C, h, w] or [B, C, n], not {[*z.shape]}")
    dims = list(range(2, z.ndim))
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    found = (torch.fft.fftn(wide, dim=dims).abs() + 1e-6).log().mean((0, 1))
    count = min(side // 2 for side in found.shape) + 1
    for _ in dims:  # along the diagonal; sides of different lengths each in steps of their own
        side = found.shape[0]
        at = torch.linspace(0, side // 2, count).round().long()
        found = found.index_select(0, at.to(found.device)).movedim(0, -1)
    line = found if len(dims) == 1 else found.diagonal()
    return line - line[0]


def position_variance(z: Tensor) -> float:
    """Var over positions of features `[B, C, …]`, unbiased, the mean over batch and channels. Attention lowers it."""
    return float(z.flatten(2).to(torch.promote_types(z.dtype, torch.float32)).var(-1).mean())


@dataclass(frozen=True, eq=False)
class Spectra:
    """By module's name, in the order in which they ran: `amplitudes` `[K]`, `position_variance` of what they return."""

    amplitudes: dict[str, Tensor]
    variance: dict[str, float]

    @property
    def highest(self) -> dict[str, float]:
        """Δ log amplitude at the highest frequency."""
        return {name: float(line[-1]) for name, line in self.amplitudes.items()}


def spectra(
    model: nn.Module, inputs: Inputs | Sequence[Inputs], grid: Grid, modules: Iterable[str] | None = None
) -> Spectra:  # fmt: skip
    """The frequencies of what modules return for tokens on a grid; special tokens are dropped.

    Args:
        modules: by name; default all in a list of layers (blocks), such as `encoder.layer.3`.
    """
    named = dict(model.named_modules())
    lists = [name for name, module in named.items() if isinstance(module, nn.ModuleList)]
    wanted = [f"{name}.{n}" for name in lists for n in range(len(named[name]))] if modules is None else list(modules)  # type: ignore[arg-type]
    missing = [name for name in wanted if name not in named]
    if missing or not wanted:
        raise ValueError(
            f"there is no module {missing[0]!r}" if missing else f"a {type(model).__name__} has no list of layers"
        )
    lines: dict[str, list[Tensor]] = {}
    variances: dict[str, list[float]] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] < grid.first + grid.size:
                return
            z = x[:, grid.first : grid.first + grid.size].mT.unflatten(-1, grid.shape)
            lines.setdefault(name, []).append(amplitudes(z).double().cpu())
            variances.setdefault(name, []).append(position_variance(z))

        return see

    if len(grid.shape) > 2:
        raise ValueError(f"frequencies are of grids of one or two sides, not {grid.shape}")
    with torch.no_grad(), ExitStack() as stack:
        for name in wanted:
            stack.callback(named[name].register_forward_hook(hook(name)).remove)
        for batch in batches_of(inputs):
            run(model, batch)
    if not lines:
        raise ValueError(
            f"none of {len(wanted)} modules returned [B, T, D] of the {grid.first + grid.size} tokens of {grid}"
        )
    return Spectra({name: torch.stack(each).mean(0) for name, each in lines.items()},
                   {name: sum(each) / len(each) for name, each in variances.items()})  # fmt: skip


Parameters = Sequence[Tensor]


def direction(
    parameters: Parameters, *, per: Literal["filter", "axis"] = "filter", seed: int = 0
) -> list[Tensor]:  # fmt: skip
    """A random direction in which each filter is as long as the weights' own; 0 for vectors (norms, biases).

    per: `filter`, one norm for each output, over all other axes; `axis`, norms along the first axis, as released code
    has them.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for p in parameters:
        d = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        if p.ndim < 2:
            found.append(torch.zeros_like(p))
            continue
        dims = list(range(1, p.ndim)) if per == "filter" else [0]
        own, length = (x.square().sum(dims, keepdim=True).sqrt() for x in (p.detach(), d))
        found.append(d * own / length.clamp_min(1e-12))
    return found


def landscape(
    loss: Callable[[], Tensor], parameters: Parameters, directions: Sequence[Parameters], *, points: int = 11,
    reach: float = 1.0,
) -> Tensor:  # fmt: skip
    """The loss on a grid along one or two directions, `[points]` or `[points, points]`, from -reach to reach.

    loss: what was trained, on augmented data and with its weight decay if that is what was done. Parameters are as
    before afterwards.
    """
    check_whole(2, points=points)
    if len(directions) not in (1, 2):
        raise ValueError(f"{len(directions)} directions; a line or a plane")
    start = [p.detach().clone() for p in parameters]
    at = torch.linspace(-reach, reach, points, dtype=torch.float64)
    found = torch.empty([points] * len(directions), dtype=torch.float64)
    try:
        with torch.no_grad():
            for index in (
                torch.cartesian_prod(*[torch.arange(points)] * len(directions)).reshape(-1, len(directions)).tolist()
            ):
                for n, p in enumerate(parameters):
                    moved = sum(float(at[i]) * d[n] for i, d in zip(index, directions, strict=True))
                    p.copy_(start[n] + moved)
                found[tuple(index)] = float(loss())
    finally:
        with torch.no_grad():
            for p, old in zip(parameters, start, strict=True):
                p.copy_(old)
    return found


def curvature(
    loss: Callable[[], Tensor], parameters: Parameters, *, count: int = 5, steps: int = 30, seed: int = 0
) -> Tensor:  # fmt: skip
    """The eigenvalues of the loss's Hessian that are largest in size, `[count]`, by Lanczos iteration.

    Another backward pass for each step. Call it on several batches for the distribution of the largest, and the share
    below 0. Exact where steps reach the number of parameters.
    """
    check_whole(count=count, steps=steps)
    with torch.enable_grad():
        grads = torch.autograd.grad(loss(), list(parameters), create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    generator = torch.Generator().manual_seed(seed)
    steps = min(steps, flat.numel())

    def product(v: Tensor) -> Tensor:
        each = torch.autograd.grad(flat, list(parameters), v.to(flat), retain_graph=True, materialize_grads=True)
        return torch.cat([h.flatten() for h in each]).double()

    v = torch.randn(flat.numel(), generator=generator, dtype=torch.float64).to(flat.device)
    basis, rows = [v / v.norm()], []
    for step in range(steps):
        w = product(basis[-1]) if flat.requires_grad else torch.zeros_like(v)
        every = torch.stack(basis)
        rows.append(every @ w)
        for _ in range(2):  # once more for rounding
            w = w - every.T @ (every @ w)
        if step + 1 == steps or w.norm() <= 1e-10 * max(1e-300, float(rows[0].norm())):
            break
        basis.append(w / w.norm())
    n = len(rows)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for j, row in enumerate(rows):
        matrix[: len(row), j] = row.cpu()
        matrix[j, : len(row)] = row.cpu()
    values = torch.linalg.eigvalsh(matrix)
    return values[values.abs().argsort(descending=True)][:count]


__all__ = ["Spectra", "amplitudes", "curvature", "direction", "landscape", "position_variance", "spectra"]
