"""A trunk with four unlike heads, and a batch in which labels are missing in every way."""

from __future__ import annotations

import math

import torch
from torch import nn

from manyheads.multi import MultiHead

HEADS = {
    "age": "regression",
    "kind": "classification(classes=3)",
    "tags": "multi-label(labels=2)",
    "grade": "ordinal(levels=4)",
}
NAN = math.nan


def trunk(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


def model(dtype: torch.dtype = torch.float64, seed: int = 0, **options) -> MultiHead:
    torch.manual_seed(seed)
    return MultiHead(trunk(), HEADS, **options).to(dtype)


def batch(rows: int = 12, seed: int = 1, dtype: torch.dtype = torch.float64):
    torch.manual_seed(seed)
    gaps = torch.rand(5, rows) < 0.4
    targets = {
        "age": torch.randn(rows, dtype=dtype).masked_fill(gaps[0], NAN),
        "kind": torch.randint(3, (rows,)).masked_fill(gaps[1], -100),
        "tags": torch.randint(2, (rows, 2)).to(dtype).masked_fill(gaps[2:4].T, NAN),
        "grade": torch.randint(4, (rows,)).masked_fill(gaps[4], -100),
    }
    return torch.randn(rows, 5, dtype=dtype), targets


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one, other, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        if value is not None:
            torch.testing.assert_close(
                value, other[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
