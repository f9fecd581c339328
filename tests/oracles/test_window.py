"""What `window` promises; it has no paper of its own."""

import pytest
import torch
from tests.oracles.reference import HEADS, TOKENS, batch, close, decoded, make, triangle, twin

from manyheads import Attention, Cache, OptionError, Site

back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_is_a_band(size):
    layer, x = make(f"gqa(kv_heads=2) + window({size})"), batch()
    plain = twin(layer, "gqa(kv_heads=2)")
    close(layer(x), plain(x, mask=(triangle() & (back < size))[None, None]))
    if size >= TOKENS:
        close(layer(x), plain(x))


def test_a_window_for_each_head():
    sizes = (2, 3, 9, 4)
    layer, x = make(f"gqa + window({[*sizes]})"), batch()
    mask = torch.stack([triangle() & (back < size) for size in sizes])[None]
    close(layer(x), twin(layer, "gqa")(x, mask=mask))
    with pytest.raises(OptionError, match="3 sizes for 4 heads"):
        Attention("gqa + window([1, 2, 3])", 24, HEADS)


def test_bidirectional_windows_reach_to_both_sides():
    site = Site(causal=False)
    layer, x = make("gqa + window(3)", site=site), batch()
    close(layer(x), twin(layer, "gqa")(x, mask=(back.abs() < 3)[None, None]))


@pytest.mark.parametrize(("size", "kept"), [("5", 4), ("[2, 7, 3, 1]", 6), ("1", 1), ("50", TOKENS)])
def test_cache_keeps_what_a_later_query_can_see(size, kept):
    layer, x, cache = make(f"gqa + window({size})"), batch(), Cache()
    close(decoded(layer, x, 2, cache), layer(x))
    row = 2 * 24 * 8
    assert cache.bytes() == len(x) * kept * row
    assert layer.spec.cost(24, HEADS).cache_bytes(TOKENS, 8) == kept * row


def test_two_windows_keep_what_the_narrower_one_sees():
    """What either hides is never needed."""
    layer, x, cache = make("gqa + window(5) + window(3)"), batch(), Cache()
    close(decoded(layer, x, 1, cache), twin(layer, "gqa + window(3)")(x))
    assert cache.bytes() == len(x) * 2 * 2 * 24 * 8


def test_padding_does_not_use_the_window_up():
    layer, x = make("gqa + window(3)"), batch()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    close(layer(x, mask=valid)[1, 4:], layer(x[1:, 4:])[0])


def test_sees_something():
    with pytest.raises(OptionError, match="sees nothing"):
        Attention("gqa + window(0)", 24, HEADS)
