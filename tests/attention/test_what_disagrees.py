"""What does not fit a layer is said at once, with the numbers that disagree and what would fit."""

import pytest
import torch

import manyheads as mh


@pytest.fixture
def layer():
    return mh.Attention("gqa(kv_heads=2)", 64, 8)


X = torch.randn(2, 10, 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mask": torch.ones(3, 10, dtype=torch.bool)}, r"mask \[3, 10\] has 3 batch, not 2"),
        ({"mask": torch.ones(2, 3, 10, 10, dtype=torch.bool)}, "has 3 heads, not 8"),
        ({"mask": torch.ones(2, 1, 9, 10, dtype=torch.bool)}, "has 9 queries, not 10"),
        ({"mask": torch.ones(2, 1, 10, 7, dtype=torch.bool)}, "is about 7 keys; there are 10"),
        ({"mask": torch.ones(2, 10)}, "a mask is bool"),
        ({"positions": torch.zeros(3, 10, dtype=torch.long)}, "positions of 3 sequences do not fit a batch of 2"),
        ({"positions": torch.zeros(1, 9, dtype=torch.long)}, "about the tokens of x"),
    ],
)
def test_masks_and_positions(layer, arguments, said):
    with pytest.raises(ValueError, match=said):
        layer(X, **arguments)


def test_a_pass_without_tokens(layer):
    with pytest.raises(ValueError, match="x has no tokens"):
        layer(X[:, :0])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mla(rank=32, rope_dim=8)", "holds rows k, v here; this layer writes latent"),
        ("gqa(kv_heads=4)", "holds 2 x 8 numbers of 'k' a token; this layer has 4 x 8"),
    ],
)
def test_the_cache_of_another_layer(layer, spec, said):
    cache = mh.Cache()
    with torch.no_grad():
        layer(X, cache=cache)
        held = cache.bytes()
        with pytest.raises(ValueError, match=said):
            mh.Attention(spec, 64, 8)(X[:, :1], cache=cache)
    assert cache.bytes() == held


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_another_batch_in_the_middle_of_decoding(layer, first, then):
    cache = mh.Cache()
    with torch.no_grad():
        layer(X[:first], cache=cache)
        with pytest.raises(ValueError, match=f"holds a batch of {first}; this pass has {then} sequences"):
            layer(X[:then, :1], cache=cache)


@pytest.mark.parametrize("line", [None, 3, [], b"gqa"])
def test_a_spec_is_a_line_of_text(line):
    with pytest.raises(mh.SpecError, match="a spec is a line of text"):
        mh.Spec.parse(line)


@pytest.mark.parametrize("options", ["base=0.0", "base=-1.0", "factor=0.0"])
def test_rotations_that_cannot_be(options):
    with pytest.raises(mh.OptionError, match="must be positive numbers"):
        mh.Attention(f"gqa + rope({options})", 64, 8)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gqa(kv_heads=3)", r"kv_heads may be \[1, 2, 4, 8\]"),
        ("mla(rank=16, rope_dim=3)", "use 2 or 4"),
        ("gqa + window(0)", "window"),
        ("gqa + moh(top=9)", "top may be 1 to 8"),
        ("gqa + moh(top=2) + mae", "router"),
        ("mla(view=absorbed) + qk-norm", "head keys"),
        ("gqa + dhvt", "bidirectional"),
        ("super-attention(length=4) + dhvt", "bidirectional"),
        ("kah", "did you mean kha"),
        ("xyzzy", "manyheads list"),
    ],
)
def test_impossible_layers(spec, said):
    with pytest.raises(mh.OptionError, match=said):
        mh.Attention(spec, 64, 8)


def test_a_context_beyond_a_part_of_fixed_length():
    layer = mh.Attention("super-attention(length=12)", 64, 8)
    with pytest.raises(ValueError, match="12"):
        layer(torch.randn(1, 13, 64))
