import pytest
import torch

from manyheads.core.part import OptionError
from manyheads.stack.ffn import FFNS, SwiGLU, make_ffn


@pytest.mark.parametrize("name", sorted(FFNS))
@pytest.mark.parametrize("hidden", [None, 10])
def test_shapes(name, hidden):
    ffn = make_ffn(name, 24, hidden)
    if name == "none":
        assert ffn is None
    else:
        assert ffn(torch.randn(2, 3, 24)).shape == (2, 3, 24)
        assert ffn.down_proj.in_features == (hidden or {"swiglu": 64, "gelu": 96}[name])


def test_swiglu_is_its_formula():
    ffn, x = SwiGLU(8, 12), torch.randn(3, 8)
    gate = x @ ffn.gate_proj.weight.T
    want = (gate * gate.sigmoid() * (x @ ffn.up_proj.weight.T)) @ ffn.down_proj.weight.T
    torch.testing.assert_close(ffn(x), want)


def test_refusals():
    with pytest.raises(OptionError, match="no feed-forward 'relu'; there are swiglu, gelu, none"):
        make_ffn("relu", 8)
    with pytest.raises(OptionError, match="hidden=0"):
        make_ffn("gelu", 8, 0)
