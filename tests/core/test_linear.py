"""The product of few rows is the plain one, whatever path it takes."""

import pytest
import torch
from torch import nn

from manyheads.core.linear import FEW_ROWS, Linear, quicken


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (2, 5), (1, FEW_ROWS), (1, FEW_ROWS + 1), (0, 4), ()])
def test_equals_a_plain_linear(shape, bias, dtype):
    plain = nn.Linear(24, 7, bias=bias).to(dtype)
    quick = Linear(24, 7, bias=bias).to(dtype)
    quick.load_state_dict(plain.state_dict())
    x = torch.randn(*shape, 24, dtype=dtype)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    want, got = plain(a), quick(b)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want)
    want.sum().backward()
    got.sum().backward()
    torch.testing.assert_close(b.grad, a.grad)
    torch.testing.assert_close(quick.weight.grad, plain.weight.grad)


def test_under_autocast_the_dtype_is_autocast_s():
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(8, 8)(torch.randn(1, 8)).dtype == torch.bfloat16


def test_quicken_keeps_names_parameters_and_subclasses():
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(Own(4, 4), nn.ReLU())})
    before = dict(model.named_parameters())
    quicken(model)
    assert type(model["a"]) is Linear and type(model["b"][0]) is Own
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
