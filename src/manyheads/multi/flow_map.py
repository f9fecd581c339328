"""Two heads on one denoiser: the velocity of a flow, and the map that goes along it in one step.

A pass is net(x_t, t, r) -> (v, u), each as x `[B, …]`; t and r `[B]`, 0 <= r <= t <= 1, noise at 1. On
x_t = (1 - t) x + t z, with v* = z - x, every sample teaches both heads:

    L_v = mean (v - v*)²,   L_u = mean (u + (t - r) stop(du/dt) - v*)²,   L = L_v + L_u by sample, averaged

u is the mean velocity between t and r, so x_r = x_t - (t - r) u is a step of any length. du/dt is along
(dx, dt, dr) = (stop v, 1, 0), or (v*, 1, 0) with `tangent="path"`; exactly (`derivative="forward"`: forward mode, which
fused attention lacks) or as a symmetric difference of width 2 eps (`"difference"`; the authors' earlier code clamps it
to 1, and goes along the path of the same x and z).

Choices: the identity u = v - (t - r) du/dt is MeanFlow's (arXiv 2505.13447); loss weights, and L / (stop L + 0.01) by
sample as the one way of weighting (`adaptive`), are ASSUMED. Which r are trained is the caller's: 0 for whole steps.

Source: DuMo (arXiv 2602.17682), as far as its abstract and introduction say it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import jvp

from manyheads.core.check import OptionError

Net = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def flow_map_loss(
    net: Net, x: Tensor, z: Tensor, t: Tensor, r: Tensor, *, tangent: str = "velocity",
    derivative: str = "forward", eps: float = 0.005, clamp: float | None = None, adaptive: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """L, and the means of L_v and L_u. x and z `[B, …]`: data and noise."""
    if derivative not in ("forward", "difference"):
        raise OptionError(f"derivative={derivative!r} is neither 'forward' nor 'difference'")
    if tangent not in ("velocity", "path"):
        raise OptionError(f"tangent={tangent!r} is neither 'velocity' nor 'path'")
    if x.shape != z.shape or t.shape != (len(x),) or r.shape != t.shape:
        raise ValueError(
            f"x {list(x.shape)}, z {list(z.shape)}, t {list(t.shape)}, r {list(r.shape)}: x and z alike, t, r [B]"
        )
    if bool((r > t).any()) or bool((r < 0).any()) or bool((t > 1).any()):
        raise ValueError("times are 0 <= r <= t <= 1")
    wanted, at = z - x, _mixed(x, z, t)
    v, u = net(at, t, r)
    along = v.detach() if tangent == "velocity" else wanted
    if derivative == "forward":
        with torch.no_grad():
            moved = (along, torch.ones_like(t), torch.zeros_like(r))
            slope = jvp(lambda at, t, r: net(at, t, r)[1], (at, t, r), moved)[1]
    else:
        with torch.no_grad():
            ahead, behind = ((t + eps).clamp(max=1), (t - eps).maximum(r))
            pairs = [net(at + _by(moved - t, x) * along, moved, r)[1] for moved in (ahead, behind)]
            slope = (pairs[0] - pairs[1]) / _by((ahead - behind).clamp_min(torch.finfo(x.dtype).tiny), x)
    slope = slope if clamp is None else slope.clamp(-clamp, clamp)
    by_v = (v - wanted).square().flatten(1).mean(1)
    by_u = (u + _by(t - r, x) * slope.detach() - wanted).square().flatten(1).mean(1)
    if adaptive:
        total = sum(each / (each.detach() + 0.01) for each in (by_v, by_u))
    else:
        total = by_v + by_u
    return torch.as_tensor(total).mean(), by_v.mean(), by_u.mean()


@torch.no_grad()
def sample_flow(net: Net, z: Tensor, steps: int | Sequence[float] = 1, *, head: str = "map") -> Tensor:
    """Noise z `[B, …]` brought to data by so many even steps, or at these times from 1 down to 0.

    head: `map` steps by u, of any length; `velocity` are Euler steps by v.
    """
    times = [1 - step / steps for step in range(steps + 1)] if isinstance(steps, int) and steps > 0 else steps
    if (
        isinstance(times, int)
        or len(times) < 2
        or times[0] != 1
        or times[-1] != 0
        or sorted(times, reverse=True) != list(times)
    ):
        raise ValueError(f"steps={steps}: a number from 1 on, or times from 1 down to 0")
    if head not in ("map", "velocity"):
        raise OptionError(f"head={head!r} is neither 'map' nor 'velocity'")
    for here, there in pairwise(times):
        t, r = (z.new_full((len(z),), each) for each in (here, there))
        v, u = net(z, t, r if head == "map" else t)
        z = z - (here - there) * (u if head == "map" else v)
    return z


def _mixed(x: Tensor, z: Tensor, t: Tensor) -> Tensor:
    return x + _by(t, x) * (z - x)


def _by(t: Tensor, x: Tensor) -> Tensor:
    return t.view(-1, *[1] * (x.dim() - 1))
