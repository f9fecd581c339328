"""Attention-free transformer: each channel weighs the tokens by itself."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, decoded, differ, heads_of, make, twin

from manyheads import Attention, Cache, OptionError, Site, Spec
from manyheads.core.scan import Stream
from manyheads.core.selective import running_mean

FORMS = (
    "aft", "aft(form=conv, window=3)", "aft(form=full, context=32, rank=5)",
    "aft(form=local, window=4, context=32, rank=5)",
)  # fmt: skip


def projected(layer, x):
    project = layer.project
    return (heads_of(each(x), HEADS) for each in (project.q_proj, project.k_proj, project.v_proj))


def direct(layer, x, w):
    """The definition, all pairs for each channel; w `[H or 1, T, T]`."""
    q, k, v = projected(layer, x)
    logits = k[:, :, None] + w[None, ..., None]  # [B, H, T, S, d]
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None, ..., None]
    o = torch.sigmoid(q) * (logits.masked_fill(~seen, -torch.inf).softmax(3) * v[:, :, None]).sum(3)
    return layer.project.o_proj(o.transpose(1, 2).flatten(2))


def biases(layer, tokens):
    scan, distance = layer.scan, torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    if hasattr(scan, "bias"):
        near = scan.bias.flatten(1)[distance.clamp(0, scan.window - 1)].movedim(-1, 0)
        return torch.where((distance < scan.window)[None], near, 0.0)
    if not hasattr(scan, "a"):
        return torch.zeros(1, tokens, tokens, dtype=torch.float64)
    w = (scan.a[:tokens] @ scan.b[:tokens].T)[None]
    return w if scan.window is None else torch.where((distance < scan.window)[None], w, 0.0)


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("tokens", [1, TOKENS, 31])
def test_the_definition(spec, tokens):
    layer, x = make(spec), batch(tokens)
    close(layer(x), direct(layer, x, biases(layer, tokens)))


def test_halves_of_the_rows():
    layer, x = make("aft(form=full, context=100, rank=5)"), batch(75)
    close(layer(x), direct(layer, x, biases(layer, 75)))
    for block in (1, 40):
        close(decoded(layer, x, block), layer(x))


def test_constant_keys_give_the_running_mean():
    layer, x = make("aft"), batch()
    with torch.no_grad():
        layer.project.k_proj.weight.zero_()
    q, _, v = projected(layer, x)
    mean = v.cumsum(2) / torch.arange(1, TOKENS + 1)[:, None]
    close(layer(x), layer.project.o_proj((torch.sigmoid(q) * mean).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("spec", FORMS)
def test_a_constant_on_all_keys_changes_nothing(spec):
    layer, x = make(f"gqa(bias=qkv) + {spec}"), batch()
    shift = torch.randn_like(layer.project.k_proj.bias)
    other = twin(layer, layer.spec, project__k_proj__bias=layer.project.k_proj.bias + shift)
    close(other(x), layer(x))


def test_a_window_that_sees_all_is_full():
    full = make("aft(form=full, context=32, rank=5)")
    x = batch()
    close(twin(full, f"aft(form=local, window={TOKENS}, context=32, rank=5)")(x), full(x))
    differ(twin(full, f"aft(form=local, window={TOKENS - 1}, context=32, rank=5)")(x), full(x), 1e-6)


@pytest.mark.parametrize(
    "spec", ["aft(form=conv, window=3)", "aft(form=full, context=32)", "aft(form=local, context=32)"]
)
def test_no_bias_is_simple(spec):
    simple, x = make("aft"), batch()
    layer = twin(simple, spec)
    with torch.no_grad():
        for parameter in layer.scan.parameters():
            parameter.zero_()
    close(layer(x), simple(x))


@pytest.mark.parametrize("rise", [-300.0, 300.0])
def test_keys_of_any_size_in_single_precision(rise):
    """Sums that under- or overflow on their own: the maximum is a running one."""
    torch.manual_seed(0)
    k = torch.linspace(0, rise, 80)[None, None, :, None] + torch.randn(1, 2, 80, 3)
    v = torch.randn(1, 2, 80, 3)
    for document in (None, (torch.arange(81) > 40).long()[None]):
        mean, state = running_mean(k, v, Stream(None, None, document))
        seen = torch.ones(80, 80, dtype=torch.bool).tril()
        if document is not None:
            seen &= document[:, 1:, None][0] == document[:, None, 1:][0]
        weights = k.double()[:, :, None].masked_fill(~seen[None, None, ..., None], -torch.inf).softmax(3)
        close(mean.value.double(), (weights * v.double()[:, :, None]).sum(3), 1e-4)
        assert torch.isfinite(state).all()


def test_the_state_has_a_gradient():
    k, v = (torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    whole, last = running_mean(k, v, Stream(None, None, None))
    first, state = running_mean(k[:, :, :4], v[:, :, :4], Stream(None, None, None))
    then, end = running_mean(k[:, :, 4:], v[:, :, 4:], Stream(state, None, None))
    close(torch.cat([first.value, then.value], 2), whole.value)
    close(end, last)
    weight = torch.randn_like(whole.value)
    wants = torch.autograd.grad((whole.value * weight).sum() + last.sum(), (k, v))
    gots = torch.autograd.grad((torch.cat([first.value, then.value], 2) * weight).sum() + end.sum(), (k, v))
    for got, want in zip(gots, wants, strict=True):
        close(got, want)


def test_cost():
    channels, window = DIM, 3
    cache = Cache()
    decoded(make("aft"), batch(TOKENS, size=1), cache=cache)
    assert cache.bytes() == 8 * 2 * channels
    cache = Cache()
    decoded(make(f"aft(form=conv, window={window})"), batch(TOKENS, size=1), cache=cache)
    assert cache.bytes() == 8 * (2 * channels + window * (2 * channels + 1))
    cost = Spec.parse("aft(form=full, context=32, rank=5)").cost(DIM, HEADS)
    assert cost.parameters == 4 * DIM**2 + 2 * 32 * 5
    assert cost.state_floats == 0 and cost.cache_floats == 2 * DIM


@pytest.mark.parametrize("spec", FORMS[:2])
def test_padding_leaves_the_state_as_it_is(spec):
    layer, x, cache = make(spec), batch(7), Cache()
    with torch.no_grad():
        layer(x, cache=cache)
        before = {name: state.clone() for name, state in cache.state(0).items()}
        layer(100 * batch(3), cache=cache, mask=torch.zeros(2, 3, dtype=torch.bool))
    for name, state in cache.state(0).items():
        assert torch.equal(state, before[name]), name


def test_a_length_that_is_too_long():
    with pytest.raises(OptionError, match="context=8 is shorter than the 9 tokens"):
        Attention("aft(form=full, context=8)", DIM, HEADS, site=Site(max_len=9))
    layer, cache = make("aft(form=local, context=8)", site=Site(max_len=8)), Cache()
    with pytest.raises(ValueError, match="position 8"):
        layer(batch(9))
    layer(batch(6), cache=cache)
    with pytest.raises(ValueError, match="position 8"):
        layer(batch(3), cache=cache)
    for spec in ("aft", "aft(form=conv)"):
        Attention(spec, DIM, HEADS, site=Site(max_len=10**6))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gqa(v_dim=3) + aft", "as wide"),
        ("aft(form=conv, window=0)", "at least 1"),
        ("aft(form=full, rank=0)", "at least 1"),
        ("aft + alibi", "bare scores"),
    ],
)
def test_refusals(spec, says):
    with pytest.raises(OptionError, match=says):
        Attention(spec, DIM, HEADS)
