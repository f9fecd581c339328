"""Rows kept in few bits."""

import pytest
import torch

from manyheads.core.cache import Cache
from manyheads.core.entries import Entry
from manyheads.core.mask import Axis
from manyheads.core.packing import Packing
from manyheads.core.part import OptionError

PACKINGS = [
    Packing.of("x", (8, 4, None)),
    Packing.of("x", (6, 4, 3), (4, 8, None)),
    Packing.of("x", (7, 2, None), (5, 16, None)),
    Packing.of("x", (5, 8, 5)),
]


def rows(packing, dtype=torch.float64, tokens=9):
    width = sum(cut.width for cut in packing.cuts)
    return torch.randn(2, 3, tokens, width, dtype=dtype, generator=torch.Generator().manual_seed(0))


def back(packing, x):
    return packing.unpack(packing.pack(x), x.dtype)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_laws_of_the_quantiser(packing, dtype):
    x = rows(packing, dtype)
    packed = packing.pack(x)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == packing.bytes and back(packing, x).dtype == dtype
    assert not back(packing, torch.zeros_like(x)).any()
    one = packing.pack(x[1:, :, 4:5])
    assert torch.equal(packed[1:, :, 4:5], one), "a row depends on its neighbours"
    if dtype != torch.bfloat16:  # whose own rounding comes on top
        assert torch.equal(packing.pack(back(packing, x)), packed), "what came back is stored with a loss"
        assert torch.equal(back(packing, 4 * x), 4 * back(packing, x))
    first = 0
    for cut in packing.cuts:
        part, got = (each[..., first : first + cut.width].double() for each in (x, back(packing, x)))
        first += cut.width
        if cut.bits == 16:
            assert torch.equal(got, part.bfloat16().double())
            continue
        most = part.unflatten(-1, (-1, cut.block)).abs().amax(-1, keepdim=True)
        step = (most / (2 ** (cut.bits - 1) - 1)).expand(*most.shape[:-1], cut.block).flatten(-2)
        slack = 1.01 if dtype == torch.bfloat16 else 1.004  # the scale is rounded to eight bits
        assert ((part - got).abs() <= step / 2 * slack + (part.abs() * 2**-8 if dtype == torch.bfloat16 else 0)).all()
        assert (part - got).abs().max() > 0


def test_bits_are_where_they_should_be():
    packing = Packing.of("x", (4, 4, None))
    packed = packing.pack(torch.tensor([[7.0, -7.0, 1.0, 0.4]]))
    assert packed[0, :2].tolist() == [15 | 1 << 4, 9 | 8 << 4] and packed.shape == (1, 4)
    assert packing.unpack(packed, torch.float32).tolist() == [[7, -7, 1, 0]]


def test_the_gradient_is_the_identity():
    packing, x = PACKINGS[1], rows(PACKINGS[1]).requires_grad_()
    y = packing.through(x)
    assert torch.equal(y, back(packing, x.detach()))
    weight = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    assert torch.equal(gradient, weight)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_a_cache_holds_bytes_and_gives_rows(packing):
    x, cache = rows(packing), Cache()
    entries = {"a": Entry(3, x.shape[-1], packing=packing)}
    for first in range(0, 9, 3):
        seen = cache.write(0, {"a": x[:, :, first : first + 3]}, entries, Axis(3, first))["a"]
        assert torch.equal(seen, back(packing, x[:, :, : first + 3])) and seen.dtype == x.dtype
    assert cache.bytes() == 2 * 3 * 9 * packing.bytes
    fork = cache.fork(torch.tensor([1, 1, 0]))
    cache.rollback(2)
    seen = cache.write(0, {"a": x[:, :, :1]}, entries, Axis(1, 7))["a"]
    assert torch.equal(seen, back(packing, torch.cat([x[:, :, :7], x[:, :, :1]], 2)))
    more = x[[1, 1, 0], :, :1].requires_grad_()
    seen = fork.write(0, {"a": more}, entries, Axis(1, 9))["a"]
    assert torch.equal(seen.detach(), back(packing, torch.cat([x[[1, 1, 0]], x[[1, 1, 0], :, :1]], 2)))
    seen.sum().backward()
    assert torch.equal(more.grad, torch.ones_like(more)), "rows of this pass learn"
    with pytest.raises(ValueError, match="the cache holds 3 x"):
        fork.write(0, {"a": torch.zeros(3, 3, 1, 99)}, entries, Axis(1, 10))


def test_refusals():
    with pytest.raises(OptionError, match="x: rows of 3 bits a number; they may have 2, 4, 8 or 16"):
        Packing.of("x", (8, 3, None))
    with pytest.raises(OptionError, match=r"x: blocks of 3 do not divide 8 channels; they may have \[1, 2, 4, 8\]"):
        Packing.of("x", (8, 4, 3))
