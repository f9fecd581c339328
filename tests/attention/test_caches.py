"""What a layer reads from a cache is its own: other sequences, other layers and refused passes leave no trace."""

import pytest
import torch

import manyheads as mh

DIM, HEADS = 32, 4
CROSS = mh.Site(cross=True, causal=False)
SCANS = ("retnet", "linear-attention", "mhla_layer", "mamba", "mamba2", "gated_delta_net", "gqa + aft", "gqa + conv")


def layer_of(spec: str, site: mh.Site | None = None, heads: int = HEADS) -> mh.Attention:
    return mh.Attention(spec, DIM, heads, site=site or mh.Site()).double().eval()


@pytest.mark.parametrize("spec", SCANS)
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 3)])
def test_states_of_another_batch_are_refused(spec: str, first: int, then: int):
    layer, cache = layer_of(spec), mh.Cache()
    layer(torch.randn(first, 5, DIM).double(), cache=cache)
    with pytest.raises(ValueError, match=f"the cache holds a batch of {first}; this pass has {then} sequences"):
        layer(torch.randn(then, 1, DIM).double(), cache=cache)


@pytest.mark.parametrize(("spec", "other"), [("retnet", "mamba"), ("mamba", "gqa"), ("gqa + conv", "gqa + retention")])
def test_states_of_another_layer_are_refused(spec: str, other: str):
    cache, x = mh.Cache(), torch.randn(1, 5, DIM).double()
    layer_of(spec)(x, cache=cache)
    with pytest.raises(ValueError, match=r"the cache holds .* this layer"):
        layer_of(other)(x, cache=cache)


def test_a_state_of_another_width_is_refused():
    cache, x = mh.Cache(), torch.randn(1, 5, DIM).double()
    layer_of("retnet", heads=4)(x, cache=cache)
    with pytest.raises(ValueError, match="the cache holds a state 'scan' of"):
        layer_of("retnet", heads=2)(x, cache=cache)


@pytest.mark.parametrize("spec", ["gqa + rope", "gqa + alibi", "gqa + window(size=3)", "mla(rank=16, rope_dim=4)"])
@pytest.mark.parametrize("steps", [(6,), (1,) * 6, (2, 3, 1)])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_that_read_a_context_count_on(spec: str, steps: tuple[int, ...], padded: bool):
    """A cross-attention layer by itself, in steps, against one pass."""
    layer, cache = layer_of(spec, CROSS), mh.Cache()
    x, context = torch.randn(2, 6, DIM).double(), torch.randn(2, 7, DIM).double()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = not padded
    whole = layer(x, context=context, mask=mask)
    parts = zip(x.split(steps, 1), mask.split(steps, 1), strict=True)
    o = torch.cat([layer(part, context=context, mask=some, cache=cache) for part, some in parts], 1)
    assert torch.allclose(o[mask], whole[mask], atol=1e-10)


def test_reading_a_context_can_be_taken_back():
    layer, cache = layer_of("gqa + rope", CROSS), mh.Cache()
    x, context = torch.randn(2, 6, DIM).double(), torch.randn(2, 7, DIM).double()
    whole = layer(x, context=context)
    layer(x[:, :4], context=context, cache=cache)
    cache.site(0).crop(-2)
    assert torch.allclose(layer(x[:, 2:], context=context, cache=cache), whole[:, 2:], atol=1e-10)


@pytest.mark.parametrize("spec", ["gqa + mhla(block=4, blocks=2)", "super-attention(length=8)"])
def test_a_pass_beyond_a_fixed_length_leaves_the_cache_as_it_was(spec: str):
    layer, cache, x = layer_of(spec), mh.Cache(), torch.randn(1, 10, DIM).double()
    whole = layer(x[:, :8])
    layer(x[:, :6], cache=cache)
    with pytest.raises(ValueError, match=r"position \d+ is beyond"):
        layer(x[:, 6:], cache=cache)
    assert cache.length() == 6
    assert torch.allclose(layer(x[:, 6:8], cache=cache), whole[:, 6:], atol=1e-10)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2.0])
def test_dropout_is_a_probability(dropout: float):
    with pytest.raises(mh.OptionError, match="below 1"):
        mh.Attention("gqa", DIM, HEADS, dropout=dropout)


@pytest.mark.parametrize("spec", ["retnet", "mamba", "gqa + aft"])
def test_a_scan_has_no_weights_to_drop(spec: str):
    with pytest.raises(mh.OptionError, match="drops attention weights"):
        mh.Attention(spec, DIM, HEADS, dropout=0.1)


@pytest.mark.parametrize(
    "spec", ["window(size=3)", "window(size=[2, 4, 8, 99])", "multi_window(windows=[2, 5, 40, 0])"]
)
def test_windows_compile_at_any_length(spec: str):
    layer, x = mh.Attention(spec, DIM, HEADS).eval(), torch.randn(1, 70, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), layer(x), atol=1e-5)
