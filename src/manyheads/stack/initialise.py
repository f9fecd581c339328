"""First weights of a model that is trained from scratch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.core.experts import Experts

TO_RESIDUAL = ("o_proj", "down_proj", "merge_proj")
"""Linear maps whose output is added to the residual stream, by name."""


def initialise(root: nn.Module, layers: int, std: float = 0.02) -> None:
    """Linear, expert and embedding weights from N(0, std²), those of `TO_RESIDUAL` from N(0, std²/2L); biases zero.

    What a part starts at zero or at the identity, and every parameter that is not a linear or embedding weight, stays.
    """
    for name, module in root.named_modules():
        if isinstance(module, Experts) and not module.up_proj.is_meta:
            module.reset(std, std * (2 * layers) ** -0.5 if module.to_residual else std)
        if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.is_meta or _chosen(module.weight):
            continue
        scale = (2 * layers) ** -0.5 if any(word in TO_RESIDUAL for word in name.split(".")) else 1.0
        nn.init.normal_(module.weight, std=std * scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _chosen(weight: Tensor) -> bool:
    """Zero or the identity: no random draw, so the part meant it."""
    weight = weight.detach()
    return not weight.any() or (
        weight.shape[0] == weight.shape[1] and torch.equal(weight, torch.eye(len(weight)).to(weight))
    )


def mark_started(root: nn.Module) -> None:
    """Tell transformers that these weights have their first values, so that it draws none."""
    if not any(parameter.is_meta for parameter in root.parameters()):
        for module in root.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]


@torch.no_grad()
def start_missing(attention: Attention, layers: int, std: float = 0.02) -> None:
    """Give parameters that a loaded checkpoint lacks what their parts start with (often what does nothing yet)."""
    missing = [n for n, p in attention.named_parameters() if not getattr(p, "_is_hf_initialized", False)]
    if missing:
        fresh = Attention(attention.spec, attention.dim, attention.heads, site=attention.site)
        initialise(fresh, layers, std)
        for name in missing:
            attention.get_parameter(name).copy_(fresh.get_parameter(name))
