"""Costs are sums of exact numbers."""

from fractions import Fraction

import pytest
import torch

import manyheads as mh
from manyheads.core.cost import Cost


def test_costs_add_field_by_field():
    a = Cost(1, Fraction(1, 2), 3, 4, 5)
    b = Cost(10, Fraction(3, 2), 30, 40, 50)
    assert a + b == Cost(11, Fraction(2), 33, 44, 55)
    assert a + Cost() == a


def test_cache_bytes_are_numbers_times_width():
    assert Cost(cache_floats=Fraction(9, 2), state_floats=6).cache_bytes(4, itemsize=2) == (18 + 6) * 2
    assert Cost().cache_bytes(100) == 0


SPECS = ["gqa", "gqa(kv_heads=2)", "gqa(kv_heads=1, head_dim=6, bias=qkvo)", "mla(rank=12, rope_dim=4, q_rank=8)"]
SPECS += ["mla", "mtla(stride=2)", "mfa", "gqa + window(5)", "gqa + window([3, 5, 2, 9])"]


@pytest.mark.parametrize("spec", SPECS)
def test_cost_is_what_is_counted(spec):
    """Parameters and cached bytes of a built layer, counted from its tensors."""
    layer, cache = mh.Attention(spec, 24, 4), mh.Cache()
    cost = mh.Spec.parse(spec).cost(24, 4)
    assert cost.parameters == sum(p.numel() for p in layer.parameters())
    with torch.no_grad():
        layer(torch.randn(3, 12, 24), cache=cache)
    assert cache.bytes() == 3 * cost.cache_bytes(12)


def test_a_spec_costs_the_sum_of_its_parts():
    spec = mh.Spec.parse("gqa(kv_heads=2) + qk-norm + moh(2)")
    site = mh.Site()
    parts = [part.cost(before, after, site) for part, before, after in spec.resolve(site).layouts(24, 4, site)]
    assert spec.cost(24, 4) == sum(parts[1:], parts[0])
