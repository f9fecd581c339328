"""Oracles of `multi-scale-heads`."""

import itertools

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, decoded, make, triangle, twin

from manyheads import Attention, Cache, OptionError, Site
from manyheads.attention.select.multi_scale_heads import apportion, shares

ENCODER = Site(causal=False)
back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)


def spec(radius, extra=""):
    return f"gqa + multi-scale-heads(radius={[*radius]}{extra})"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("radius", [(0, 1, 3, 100), (2, 2, 5, 0)])
def test_is_a_band_for_each_head(radius, causal):
    site = Site(causal=causal)
    layer, x = make(spec(radius), site=site), batch()
    mask = torch.stack([(back.abs() <= w) & (triangle() if causal else True) for w in radius])[None]
    close(layer(x), twin(layer, "gqa")(x, mask=mask))


@pytest.mark.parametrize("causal", [True, False])
def test_wide_radii_are_plain_attention(causal):
    layer, x = make(spec([TOKENS - 1] * HEADS), site=Site(causal=causal)), batch()
    close(layer(x), twin(layer, "gqa")(x))


def test_radius_zero_returns_the_value():
    layer, x = make(spec([0] * HEADS), site=ENCODER), batch()
    close(layer(x), layer.project.o_proj(layer.project.v_proj(x)))


def test_gradient_band_and_receptive_field():
    """A head sees its band and nothing else; two layers see at most the sum of their widest radii."""
    radius = (0, 1, 2, 3)
    first, second = make(spec(radius), site=ENCODER), make(spec([1, 1, 2, 0]), seed=1, site=ENCODER)
    for head in range(HEADS):
        one, x = make(spec([radius[head]] * HEADS), site=ENCODER), batch().requires_grad_()
        (gradient,) = torch.autograd.grad(one(x)[:, 4].sum(), x)
        assert ((gradient != 0).any(-1)[0] == (back[4].abs() <= radius[head])).all()
    x = batch().requires_grad_()
    (gradient,) = torch.autograd.grad(second(first(x))[:, 0].sum(), x)
    assert (gradient[:, 6:] == 0).all() and (gradient[:, 5] != 0).any()


def test_moves_with_the_tokens():
    """Without positions, inside the sequence, a shift of the input is a shift of the output."""
    layer, x = make(spec([1, 0, 2, 1]), site=ENCODER), batch()
    close(layer(x)[:, 3:-3], layer(x.roll(1, 1))[:, 4:-2])


def test_permuting_heads_with_their_radii():
    radius, order = (0, 1, 3, 2), [2, 0, 3, 1]
    layer, x = make(spec(radius)), batch()
    state = dict(layer.state_dict())
    for name in "qkv":
        weight = state[f"project.{name}_proj.weight"]
        state[f"project.{name}_proj.weight"] = weight.unflatten(0, (HEADS, -1))[order].flatten(0, 1)
    state["project.o_proj.weight"] = state["project.o_proj.weight"].unflatten(1, (HEADS, -1))[:, order].flatten(1)
    other = make(spec([radius[h] for h in order]))
    other.load_state_dict(state)
    close(other(x), layer(x))


def test_published_shares():
    """alpha = 0.5, five scales, the first two layers."""
    for layer, want in ((1, [0.429, 0.260, 0.158, 0.096, 0.058]), (2, [0.310, 0.241, 0.188, 0.146, 0.114])):
        assert shares(5, 0.5, layer, 12) == pytest.approx(want, abs=6e-4)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("heads", [4, 10, 12])
def test_allocation(heads, alpha):
    for layer in range(1, 7):
        each = shares(5, alpha, layer, 6)
        counts = apportion(heads, each)
        assert sum(counts) == heads and sum(each) == pytest.approx(1)
        assert all(abs(count - heads * share) < 1 for count, share in zip(counts, each, strict=True))
        step = 1.0 if layer == 6 else torch.tensor(alpha / layer).exp().item()
        assert [a / b for a, b in itertools.pairwise(each)] == pytest.approx([step] * 4, rel=1e-5)
    assert apportion(10, shares(5, alpha, 6, 6)) == [2] * 5


def test_radii_of_a_stack():
    """Small radii below, the same count of each at the top; shares of the length are rounded up."""

    def radii(layer):
        return Attention("multi-scale-heads(length=100)", 40, 10, site=Site(layer, 6)).selects[0].radii

    assert radii(0) == (1,) * 4 + (3,) * 3 + (7, 13, 25)
    assert radii(5) == (1, 1, 3, 3, 7, 7, 13, 13, 25, 25)


def test_a_class_token_sees_and_is_seen():
    layer, x = make(spec([0, 1, 2, 0], ", class_token=true"), site=ENCODER), batch()
    at = torch.arange(TOKENS)
    mask = torch.stack([(back.abs() <= w) | (at == 0) | (at[:, None] == 0) for w in (0, 1, 2, 0)])[None]
    close(layer(x), twin(layer, "gqa")(x, mask=mask))
    causal, cache = make(spec([0, 1, 2, 0], ", class_token=true")), Cache()
    close(decoded(causal, x, 2, cache), causal(x))
    assert cache.length() == TOKENS and causal.layout.keep is None


def test_cost():
    """Parameters of MHA; the cache keeps the rows that the widest head can still see."""
    layer, x, cache = make(spec([0, 1, 3, 2])), batch(size=1), Cache()
    decoded(layer, x, 1, cache)
    cost = layer.spec.cost(DIM, HEADS)
    assert cost.parameters == make("gqa").spec.cost(DIM, HEADS).parameters
    assert cache.bytes() == cost.cache_bytes(TOKENS, 8) == 3 * 2 * DIM * 8


def test_refusals():
    with pytest.raises(OptionError, match=r"multi-scale-heads: 2 radii for 4 heads; give one for each"):
        Attention("multi-scale-heads(radius=[1, 2])", DIM, HEADS)
    with pytest.raises(OptionError, match=r"multi-scale-heads: .*unknown length; give length"):
        Attention("multi-scale-heads", DIM, HEADS)
    Attention("multi-scale-heads", DIM, HEADS, site=Site(max_len=64))
    with pytest.raises(OptionError, match=r"multi-scale-heads: radii \[1, -2\]"):
        Attention("multi-scale-heads(scales=[1, -2])", DIM, HEADS)
