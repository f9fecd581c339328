"""What the oracle tests share: a layer with random weights, decoding, and attention written out."""

import torch
from torch import nn

from manyheads import Attention, Cache
from manyheads.core.position import angles, inverse_frequencies, rotate

DIM, HEADS, TOKENS = 24, 4, 9


def make(spec, dim=DIM, heads=HEADS, seed=0, **options):
    """A float64 layer whose every weight is drawn anew."""
    torch.manual_seed(seed)
    layer = Attention(spec, dim, heads, **options).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def twin(layer, spec, **changes):
    """A layer of another spec with the same weights where names agree, and `changes` to its state dict."""
    other = make(spec, layer.dim, layer.heads, site=layer.site)
    own = other.state_dict()
    state = layer.state_dict()
    taken = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    assert set(changes) <= set(own), sorted(set(changes) - set(own))
    other.load_state_dict(own | taken | changes)
    return other


def batch(tokens=TOKENS, dim=DIM, size=2):
    return torch.randn(size, tokens, dim, dtype=torch.float64)


def decoded(layer, x, block=1, cache=None):
    cache = Cache() if cache is None else cache
    with torch.no_grad():
        return torch.cat([layer(part, cache=cache) for part in x.split(block, 1)], 1)


def close(got, want, tolerance=1e-11):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def differ(got, want, least=1e-3):
    assert (got - want).abs().max() > least


def heads_of(x, heads):
    """`[B, T, H·d]` to `[B, H, T, d]`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rope(x, base=10000.0):
    """Rotate all channels of `[B, H, T, d]` by 0, 1, 2, …"""
    theta = inverse_frequencies(x.shape[-1], base)
    return rotate(x, *angles(torch.arange(x.shape[2])[None], theta, x.dtype), "half")


def triangle(tokens=TOKENS):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def weights(q, k, scale, mask=None):
    """softmax(q kᵀ · scale) over visible keys; as many key heads as query heads."""
    mask = triangle(q.shape[2]) if mask is None else mask
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf).softmax(-1)


def join(o, projection):
    """Head outputs `[B, H, T, d]` through W_O."""
    return projection(o.transpose(1, 2).flatten(2))
