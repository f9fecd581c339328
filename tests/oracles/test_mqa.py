"""Oracles of `mqa`, which is `gqa(kv_heads=1)`."""

import pytest
import torch
from tests.oracles.reference import HEADS, TOKENS, batch, close, decoded, heads_of, join, make, rope, twin, weights

from manyheads import Cache, Site, Spec

SPEC, WIDTH = "gqa(kv_heads=1)", 6


def test_equals_mha_of_copies_and_gradients_sum():
    layer, x = make(SPEC), batch()
    copies = {f"project__{name}__weight": getattr(layer.project, name).weight.detach().repeat(HEADS, 1)
              for name in ("k_proj", "v_proj")}  # fmt: skip
    other = twin(layer, "gqa", **copies)
    close(layer(x), other(x))
    for each in (layer, other):
        each(x).pow(2).sum().backward()
    for name in ("k_proj", "v_proj"):
        copies = getattr(other.project, name).weight.grad.unflatten(0, (HEADS, WIDTH))
        close(getattr(layer.project, name).weight.grad, copies.sum(0), 1e-9)


def test_one_head_is_single_head_attention():
    layer, x = make(SPEC, dim=6, heads=1), batch(dim=6)
    assert torch.equal(twin(layer, "gqa")(x), layer(x))


def test_brute_force():
    """A double loop over heads and queries."""
    layer, x = make(SPEC), batch()
    p = layer.project
    q, k, v = rope(heads_of(p.q_proj(x), HEADS)), rope(p.k_proj(x)[:, None])[:, 0], p.v_proj(x)
    want = torch.zeros_like(x)
    for b in range(len(x)):
        for h in range(HEADS):
            for t in range(TOKENS):
                a = torch.softmax(k[b, : t + 1] @ q[b, h, t] / WIDTH**0.5, 0)
                want[b, t] += p.o_proj.weight[:, h * WIDTH : (h + 1) * WIDTH] @ (a @ v[b, : t + 1])
    close(layer(x), want)


def test_rotating_the_one_key_rotates_every_copy():
    layer, x = make(SPEC), batch()
    p = layer.project
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, 1), (p.v_proj, 1)))
    close(layer(x), join(weights(rope(q), rope(k.expand(-1, HEADS, -1, -1)), WIDTH**-0.5) @ v, p.o_proj))


def test_permuting_query_heads_with_the_output():
    layer, x, order = make(SPEC), batch(), torch.randperm(HEADS)
    q = layer.project.q_proj.weight.detach().unflatten(0, (HEADS, WIDTH))[order].flatten(0, 1)
    o = layer.project.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH))[:, order].flatten(1)
    close(twin(layer, SPEC, project__q_proj__weight=q, project__o_proj__weight=o)(x), layer(x))


def test_decode():
    layer, x = make(SPEC), batch()
    close(decoded(layer, x), layer(x))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_cache_bytes_do_not_depend_on_heads(heads):
    layer, cache = make(f"gqa(kv_heads=1, head_dim={WIDTH})", heads=heads), Cache()
    decoded(layer, batch(size=1), 4, cache)
    assert cache.bytes() == TOKENS * 2 * WIDTH * 8


def test_cross_attention_keeps_the_source():
    """Keys and values of a source are made once and read by every later step."""
    layer = make(SPEC, site=Site(cross=True, causal=False))
    x, source, cache = batch(), batch(5), Cache()
    full = layer(x, context=source)
    steps = [layer(step, context=source, cache=cache) for step in x.split(1, 1)]
    close(torch.cat(steps, 1), full)
    assert cache.bytes() == len(x) * 5 * 2 * WIDTH * 8


def test_the_names_people_type_first():
    assert str(Spec.parse("mqa + kha")) == "gqa(kv_heads=1) + kha" and str(Spec.parse("mha")) == "gqa"
    assert str(Spec.parse("mha(head_dim=16)")) == "gqa(head_dim=16)"
