"""States of sets that come in blocks: sums of exponentials, and moments. Two states merge exactly into one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Exponentials(NamedTuple):
    """Σ e^{s_n} f_n as e^top · each of `sums`, so that nothing overflows. top: without gradient; -inf of no token."""

    top: Tensor
    sums: tuple[Tensor, ...]


def scale(top: Tensor) -> Tensor:
    """What scores are lessened by: `top`, and 0 where there is none."""
    return top.masked_fill(top.isneginf(), 0.0)


def merge_exponentials(a: Exponentials, b: Exponentials) -> Exponentials:
    """The state of both. A sum may have more axes than `top`, at its end."""
    top = torch.maximum(a.top, b.top)
    base = scale(top)
    shares = [(each.top - base).exp() for each in (a, b)]

    def joined(one: Tensor, two: Tensor) -> Tensor:
        more = (...,) + (None,) * (one.dim() - top.dim())
        return one * shares[0][more] + two * shares[1][more]

    return Exponentials(top, tuple(joined(one, two) for one, two in zip(a.sums, b.sums, strict=True)))


class Moments(NamedTuple):
    """Of each channel: count `[…, 1]`, mean, sum of squared distances from it, largest, smallest `[…, F]`."""

    count: Tensor
    mean: Tensor
    spread: Tensor
    largest: Tensor
    smallest: Tensor


def moments(x: Tensor, counts: Tensor) -> Moments:
    """Moments over the tokens of x `[…, N, F]`, each of which stands for `counts` `[…, N]`; 0: it is not there."""
    weight, seen = counts[..., None], (counts > 0)[..., None]
    count = weight.sum(-2)
    mean = (weight * x).sum(-2) / count.clamp(min=torch.finfo(x.dtype).tiny)
    spread = (weight * (x - mean[..., None, :]) ** 2).sum(-2)
    return Moments(
        count, mean, spread, x.masked_fill(~seen, -math.inf).amax(-2), x.masked_fill(~seen, math.inf).amin(-2)
    )


def merge_moments(a: Moments, b: Moments) -> Moments:
    """The moments of both, about the common mean (Chan, Golub and LeVeque 1979): no large sums are subtracted."""
    count = a.count + b.count
    share = b.count / count.clamp(min=torch.finfo(count.dtype).tiny)
    apart = b.mean - a.mean
    return Moments(
        count, a.mean + apart * share, a.spread + b.spread + apart**2 * a.count * share,
        torch.maximum(a.largest, b.largest), torch.minimum(a.smallest, b.smallest),
    )  # fmt: skip
