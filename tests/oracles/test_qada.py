"""Oracles of `qada`."""

import math

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    TOKENS,
    batch,
    close,
    decoded,
    differ,
    heads_of,
    join,
    make,
    rope,
    triangle,
    twin,
    weights,
)

from manyheads import Attention, Cache, OptionError
from manyheads.core.moments import KeyMoments

WIDTH = DIM // HEADS
BACK = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)


def near_of(window, first):
    return triangle() & ((window > BACK) | (torch.arange(TOKENS) < first))


def decided(q, k, near, least, diagonal):
    """Which heads of which queries are local, one query at a time, by `torch.cov` of its far keys."""
    local = torch.zeros(q.shape[:3], dtype=torch.bool)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        one, far = q[b, h, t] * WIDTH**-0.5, triangle()[t] & ~near[t]
        here = (k[b, h, near[t]] @ one).logsumexp(0)
        if not far.any():
            local[b, h, t] = True
            continue
        keys = k[b, h, far]
        sigma = torch.cov(keys.T, correction=0).reshape(WIDTH, WIDTH)
        sigma = sigma.diagonal().diag() if diagonal else sigma
        there = math.log(len(keys)) + keys.mean(0) @ one + one @ sigma @ one / 2
        local[b, h, t] = here - there >= math.log(least / (1 - least))
    return local


@pytest.mark.parametrize(("kind", "first", "window"), [("full", 1, 2), ("diagonal", 0, 3), ("full", 2, 1)])
def test_written_out_and_decoded(kind, first, window):
    """Every pass decides by the moments of each query's own far keys: all at once, in blocks, one by one."""
    layer = make(f"gqa + qada(least=0.5, first={first}, window={window}, covariance={kind})")
    layer.project.q_proj.weight.data *= 3
    x, p = batch(), layer.project
    q, k, v = (heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))
    q, k = rope(q), rope(k)
    near = near_of(window, first)
    local = decided(q, k, near, 0.5, kind == "diagonal")
    assert 0.1 < local[:, :, window + first :].double().mean() < 0.9
    seen = torch.where(local[..., None], near, triangle())
    want = join(weights(q, k, WIDTH**-0.5, seen) @ v, p.o_proj)
    close(layer(x), want)
    for block in (1, 4):
        close(decoded(layer, x, block), want)


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)"])
def test_ends_of_the_threshold(base):
    layer, x = make(f"{base} + qada(least=0, first=2, window=3)"), batch()
    near, dense = (twin(layer, f"{base}{more}")(x) for more in (" + window(3, first=2)", ""))
    differ(near, dense)
    for block in (1, 4, TOKENS):
        close(decoded(layer, x, block), near)
        close(decoded(twin(layer, f"{base} + qada(least=1, first=2, window=3)"), x, block), dense)


def test_padding_changes_nothing():
    layer, x = make("gqa(kv_heads=2) + qada(least=0.5, first=1, window=2)"), batch(size=1)
    padded = torch.cat([torch.randn(1, 3, DIM).double(), x], 1)
    valid = torch.arange(TOKENS + 3)[None] >= 3
    want, cache = layer(x), Cache()
    close(layer(padded, mask=valid)[:, 3:], want)
    with torch.no_grad():
        parts = [layer(padded[:, t : t + 1], mask=valid[:, t : t + 1], cache=cache) for t in range(TOKENS + 3)]
    close(torch.cat(parts, 1)[:, 3:], want)


@pytest.mark.parametrize(("variances", "sizes"), [((-1e9, -1e9), [(2, 3)]), ((1e9, -1e9), [(1, TOKENS + 1), (1, 3)])])
def test_a_step_of_local_heads_reads_no_far_key(variances, sizes):
    """Key heads without mass afar, by the moments in the cache, bring their three near keys alone."""
    layer, x = make("gqa(kv_heads=2) + qada(least=0.5, first=1, window=2)"), batch(size=1)
    cache, select, seen = Cache(), layer.selects[0], []
    decoded(layer, x, TOKENS, cache)
    state = cache.state(0)
    for slot, variance in enumerate(variances):
        state["far covariance"][:, slot] = variance * torch.eye(WIDTH)
    split = select.split

    def spy(call, flow):
        calls = split(call, flow)
        seen.extend((each.k.shape[1], each.k.shape[2]) for each in calls)
        return calls

    select.split = spy
    with torch.no_grad():
        layer(x[:, :1], cache=cache)
    assert seen == sizes


def test_moments_in_the_cache_are_those_of_all_far_keys():
    layer, x = make("gqa(kv_heads=2) + qada(first=1, window=3)"), batch()
    one, many = Cache(), Cache()
    decoded(layer, x, 1, one)
    decoded(layer, x, TOKENS, many)
    k = rope(heads_of(layer.project.k_proj(x), 2))[:, :, 1 : TOKENS - 2]
    for cache in (one, many):
        state = cache.state(0)
        assert state["far count"].flatten().tolist() == [k.shape[2]] * 2
        close(state["far mean"], k.mean(2))
        close(state["far covariance"][1, 1], torch.cov(k[1, 1].T, correction=0))


@pytest.mark.parametrize("diagonal", [False, True])
def test_moments(diagonal):
    torch.manual_seed(0)
    keys, q = torch.randn(2, 1, 4000, 16).double(), torch.randn(2, 3, 16).double()
    whole = KeyMoments.of(keys, diagonal=diagonal)
    true = (q @ keys[:, 0].mT / 4).logsumexp(-1)
    close(whole.lse(q, 0.25), true, 0.02 if not diagonal else 0.1)
    steps = KeyMoments.of(keys[:, :, :0], diagonal=diagonal).add(keys[:, :, :10]).add(keys[:, :, 10:])
    close(steps.lse(q, 0.25), whole.lse(q, 0.25))
    counted = torch.arange(4000).expand(2, -1) < torch.tensor([[10], [30]])
    close(KeyMoments.of(keys, counted, diagonal).mean[1], keys[1, :, :30].mean(1))
    c = torch.randn(16).double()
    close(KeyMoments.of(keys + c, diagonal=diagonal).lse(q, 0.25) - whole.lse(q, 0.25), q @ c / 4)
    equal = KeyMoments.of(keys[:, :, :1].expand(-1, -1, 50, -1), diagonal=diagonal)
    close(equal.lse(q, 0.25), (q @ keys[:, 0, 0, :, None])[..., 0] / 4 + math.log(50))


def test_cost():
    layer, plain = make("gqa(kv_heads=2) + qada"), make("gqa(kv_heads=2)")
    cost, base = (each.spec.cost(DIM, HEADS) for each in (layer, plain))
    assert cost.state_floats - base.state_floats == 1 + 2 * (WIDTH + WIDTH**2)
    assert cost.cache_floats == base.cache_floats and cost.windows == () and cost.parameters == base.parameters


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("qada(window=0)", "qada: first=4, window=0; 0 tokens or more, and 1 key or more"),
        ("qada(first=-1)", "qada: first=-1, window=128"),
        ("qada(least=1.5)", "qada: least=1.5; a share is 0 to 1"),
        ("qada + talking_heads", "'talking_heads' needs 'one map' .*, which 'qada' breaks"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(OptionError, match=said):
        Attention(spec, DIM, HEADS)
