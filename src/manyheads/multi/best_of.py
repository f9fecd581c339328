"""Several outputs of one network, their averages too, of which only the best of each sample learns.

n heads give y_i; y_ij = (y_i + y_j) / 2 for j <= i are K = n (n + 1) / 2 outputs without a parameter more. A winning
average teaches both its heads, so none starves.

    L = mean_b (10 / ln 10) ln(min_k mse[b, k] + 1e-8)        the negative PSNR of the best
    L = mean_b min_k [ mean √(d² + 1e-6) + 0.05 mean √(edge(d)² + 1e-6) ]        charbonnier, d the difference

edge(d) is what a Laplacian pyramid leaves: d less its blur, taken to every second pixel, spread to four times it and
blurred.

Source: the code of Liu-SD/multi-output-deblur (2023).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.core.check import OptionError, check_whole
from manyheads.multi.heads.hypotheses import choose


def averages(heads: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
    """`[K, n]`, rows (e_i + e_j) / 2, j <= i: outputs of all pairs are this times the heads."""
    check_whole(heads=heads)
    i, j = torch.tril_indices(heads, heads, device=device)
    one = torch.eye(heads, dtype=dtype, device=device)
    return (one[i] + one[j]) / 2


def best_output(
    outputs: Tensor, target: Tensor, *, combined: bool = True, loss: str = "psnr", relaxed: float = 0.0,
    temperature: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """L, and which output is best `[B]`, of outputs `[B, n, …]` of n heads for a target `[B, …]`.

    combined: averages are outputs too. loss: `psnr` or `charbonnier`, the latter of images `[…, height, width]`.
    relaxed, temperature: losers learn too, as in `choose` (the source: no).
    """
    shapes: list[tuple[int, ...]] = [tuple(getattr(each, "shape", ())) for each in (outputs, target)]
    if len(shapes[0]) < 3 or 0 in shapes[0] or (shapes[0][0], *shapes[0][2:]) != shapes[1]:
        raise ValueError(
            f"outputs are [B, heads, …] and the target [B, …], none of them 0, not {' and '.join(map(str, shapes))}"
        )
    if not 0 <= relaxed <= 1 or not temperature >= 0:
        raise OptionError(f"relaxed={relaxed} is from 0 to 1, temperature={temperature} from 0 on")
    if loss not in ("psnr", "charbonnier"):
        raise OptionError(f"loss={loss!r} is neither 'psnr' nor 'charbonnier'")
    if loss == "charbonnier" and target.dim() < 4:
        raise ValueError(f"charbonnier is of images [B, channels, height, width], not {list(target.shape)}")
    if combined:
        mix = averages(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        outputs = torch.einsum("kn,bn...->bk...", mix, outputs)
    gap = outputs - target[:, None]
    if loss == "psnr":
        best, which = choose(gap.square().flatten(2).mean(-1), relaxed, temperature)
        return (10 / math.log(10) * (best + 1e-8).log()).mean(), which
    errors = (gap.square() + 1e-6).sqrt().flatten(2).mean(-1)
    errors = errors + 0.05 * (edge(gap).square() + 1e-6).sqrt().flatten(2).mean(-1)
    best, which = choose(errors, relaxed, temperature)
    return best.mean(), which


def edge(image: Tensor) -> Tensor:
    """The residual of one level of a Laplacian pyramid, of images `[…, height, width]`."""
    spread = torch.zeros_like(image)
    spread[..., ::2, ::2] = 4 * _blur(image)[..., ::2, ::2]
    return image - _blur(spread)


def _blur(image: Tensor) -> Tensor:
    taps = torch.tensor([0.05, 0.25, 0.4, 0.25, 0.05], dtype=image.dtype, device=image.device)
    padded = F.pad(image.reshape(-1, 1, *image.shape[-2:]), (2, 2, 2, 2), mode="replicate")
    return F.conv2d(F.conv2d(padded, taps.view(1, 1, 5, 1)), taps.view(1, 1, 1, 5)).view(image.shape)
