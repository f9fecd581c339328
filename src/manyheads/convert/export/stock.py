"""A layer in latent form as tensors of the stock class: norms that cannot be left out, widths, residual scale.

**Why a norm can be made constant.** The stock class puts an RMSNorm on every latent: ĉ = w ∘ c / √(mean(c²) + ε) with
ε = 1e-6. Scale the rows that make c by a tiny s: mean((s·c)²) vanishes beside ε, and the norm divides by √ε = 10⁻³
whatever the token. So ĉ = w·s·10³·c up to a relative error δ ≤ s²·mean(c²)/(2ε), with no bias and no extra channel.
mean(c²) is bounded for *every* input, because c reads a normalised x̂ = g ∘ (h / rms(h)) and ‖h / rms(h)‖² ≤ D. s and w
are powers of two, exact in float32 and bfloat16; what is left of w·s·10³ goes into the next projection. ε, not the
mean, sets the scale, so a latent may also be padded with zeros to any width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.convert.export.latent import Latent, Narrow, Widths

EPS = 1e-6
"""Of the stock class's latent norms, whatever its config says; other servers take the config's, so it must agree."""
LARGEST_ERROR = 2.0**-20
"""δ that the scale s is chosen for: below float32 rounding of the projections around it."""


def layer_tensors(layer: Latent, to: Widths, input_gain: Tensor, residual: float) -> tuple[dict[str, Tensor], float]:
    """The attention tensors of one layer, float32, and the certified relative error of its latents.

    Args:
        to: widths of the stock model; narrower layers are padded with zeros.
        input_gain: `[D]`, of the norm before the layer.
        residual: factor of everything that is added to the residual stream.
    """
    kv, kv_error = _normed(layer.kv, to.rank, input_gain)
    q, q_error = _queries(layer, to, input_gain)
    keys, values = kv.up.split([layer.nope, layer.kv.up.shape[1] - layer.nope], 1)
    up = torch.cat([_pad(keys, 1, to.nope), _pad(values, 1, to.v)], 1)
    assert kv.down is not None and kv.gain is not None
    tensors = {
        "kv_a_proj_with_mqa.weight": torch.cat([kv.down, layer.key]),
        "kv_a_layernorm.weight": kv.gain,
        "kv_b_proj.weight": up.flatten(0, 1),
        "o_proj.weight": _pad(layer.out, 2, to.v).flatten(1) * residual,
    }
    if to.bias:
        zeros = torch.zeros
        tensors |= {
            "kv_a_proj_with_mqa.bias": torch.cat([_or(kv.bias, zeros(to.rank)), _or(layer.key_bias, zeros(to.rope))]),
            "o_proj.bias": _or(layer.out_bias, zeros(len(layer.out))) * residual,
        }
    return tensors | q, max(kv_error, q_error)


def _queries(layer: Latent, to: Widths, input_gain: Tensor) -> tuple[dict[str, Tensor], float]:
    """Padded, and scaled against the stock (n + ρ)^-1/2; through a query latent when any layer of the model has one."""
    content, turned = (layer.q.up * math.sqrt(to.nope + to.rope)).split([layer.nope, to.rope], 1)
    narrow = layer.q._replace(up=torch.cat([_pad(content, 1, to.nope), turned], 1))
    if not to.q_rank:
        return {"q_proj.weight": narrow.up.flatten(0, 1)}, 0.0
    if narrow.down is None:
        narrow = narrow._replace(down=torch.eye(narrow.up.shape[-1]))
    narrow, error = _normed(narrow, to.q_rank, input_gain)
    assert narrow.down is not None and narrow.gain is not None
    tensors = {
        "q_a_proj.weight": narrow.down,
        "q_a_layernorm.weight": narrow.gain,
        "q_b_proj.weight": narrow.up.flatten(0, 1),
    }
    if to.bias:
        tensors["q_a_proj.bias"] = _or(narrow.bias, torch.zeros(to.q_rank))
    return tensors, error


def _normed(narrow: Narrow, width: int, input_gain: Tensor) -> tuple[Narrow, float]:
    """The same map with the stock norm in it, padded to `width`, and its relative error."""
    down, up, bias, gain, eps = narrow
    assert down is not None
    rank = len(down)
    if gain is None:
        mean = _mean_square(down, bias, input_gain) * rank / width
        s = 2.0 ** math.floor(math.log2(math.sqrt(2 * EPS * LARGEST_ERROR / mean))) if mean else 1.0
        w = 2.0 ** round(math.log2(math.sqrt(EPS) / s))
        gain, up = torch.full((rank,), w), up * (math.sqrt(EPS) / (s * w))
        error = s * s * mean / (2 * EPS)
    else:
        # Zeros lower the mean by rank / width; rows scaled by s undo that, and move eps to the stock one: exact.
        s = math.sqrt(width * EPS / (rank * eps))
        gain, error = gain * math.sqrt(rank / width), 0.0
    padded = Narrow(
        _pad(down * s, 0, width), _pad(up, 2, width), None if bias is None else _pad(bias * s, 0, width),
        F.pad(gain, (0, width - rank), value=1.0),
    )  # fmt: skip
    return padded, error


def _mean_square(down: Tensor, bias: Tensor | None, input_gain: Tensor) -> float:
    """The largest mean(c²) of c = down · x̂ + bias over all inputs: Cauchy-Schwarz row by row."""
    reach = (down.double() * input_gain.double()).norm(dim=1) * math.sqrt(down.shape[1])
    if bias is not None:
        reach = reach + bias.double().abs()
    return reach.square().mean().item()


def _pad(x: Tensor, dim: int, width: int) -> Tensor:
    """Zeros at the end of a dimension."""
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, width - x.shape[dim]])


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
