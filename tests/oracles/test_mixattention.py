"""Oracles of the layouts that mix windows with shared keys and values: `mixattention` and `yoco`."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, heads_of, join, rope, triangle, weights
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack

from manyheads import Cache
from manyheads.stack import Stack
from manyheads.stack.maps import read_map, sources_of

WIDTH = DIM // HEADS
MIX = "mixattention(window=4, period=3, runs=[2])"


def written_out(stack, x, sources, windows):
    t, rows = x.shape[1], {}
    near = torch.arange(t)[:, None] - torch.arange(t)
    for layer, block in enumerate(stack.blocks):
        n, p = block.attention_norm(x), block.attention.project
        if sources[layer] is None:
            rows[layer] = rope(heads_of(p.k_proj(n), HEADS)), heads_of(p.v_proj(n), HEADS)
        k, v = rows[layer if sources[layer] is None else sources[layer]]
        mask = triangle(t) if windows[layer] is None else triangle(t) & (near < windows[layer])
        x = x + join(weights(rope(heads_of(p.q_proj(n), HEADS)), k, WIDTH**-0.5, mask) @ v, p.o_proj)
    return x


def test_22_layers_of_ma_pairs():
    pairs = read_map("mixattention(window=1024, reuse=2)")
    owners = [0, 1, 1, 3, 3, 3, 0, 7, 7, 9, 9, 9, 12, 13, 13, 15, 15, 15, 12, 19, 19, 19]
    assert [s if s is not None else i for i, s in enumerate(pairs.sources(22))] == owners
    windowed = ["window" in line for line in pairs.specs(["gqa"] * 22)]
    assert [i for i, near in enumerate(windowed) if not near] == [0, 6, 12, 18]
    assert {owner for owner in owners if not windowed[owner]} == {0, 12}
    assert {owner for owner in owners if windowed[owner]} == {1, 3, 7, 9, 13, 15, 19}
    with torch.device("meta"):
        stack = Stack("gqa(kv_heads=1)", 64, 2, 22, ffn="none", kv_source=pairs)
        alone = Stack("gqa(kv_heads=1)", 64, 2, 22, ffn="none")
    assert stack.cost.cache_bytes(32768) / alone.cost.cache_bytes(32768) == pytest.approx(0.101, abs=5e-4)


def test_owners_of_the_offset_layout():
    sources = sources_of("mixattention(offset=2, reuse=1)", 9)
    assert [s if s is not None else i for i, s in enumerate(sources)] == [0, 0, 2, 3, 3, 5, 5, 5, 8]


def test_written_out():
    stack, x = make_stack("gqa", 6, kv_source=MIX), batch(11)
    close(stack(x), written_out(stack, x, [None, None, 1, 0, None, 4], [None, 4, 4, None, 4, 4]))


@pytest.mark.parametrize("line", [MIX, "yoco(window=4)"])
def test_laws(line):
    hold_to_the_laws("gqa(kv_heads=2)", 5, kv_source=line)


@pytest.mark.parametrize("tokens", [3, 4, 5, 17])
def test_rings_hold_no_more_than_a_window(tokens):
    stack, x, cache = make_stack("gqa", 6, kv_source=MIX), batch(tokens, size=1), Cache()
    with torch.no_grad():
        outs = [stack(x[:, cut], cache=cache) for cut in (slice(0, -2), slice(-2, -1), slice(-1, None))]
    close(torch.cat(outs, 1), stack(x), 1e-9)
    held = [cache.site(layer).growing["k"].rows().shape[2] if cache.site(layer).growing else 0 for layer in range(6)]
    assert held == [tokens, min(tokens, 3), 0, 0, min(tokens, 3), 0], "a window of 4 is the query and three rows"
    assert cache.bytes() == stack.cost.cache_bytes(tokens, 8)


def test_wide_windows_are_full_attention_and_no_windows_are_key_sharing():
    x = batch(9)
    wide = make_stack("gqa", 6, kv_source="mixattention(window=9, period=3, runs=[2])")
    bare = make_stack("gqa", 6, kv_source="mixattention(period=3, runs=[2])")
    close(wide(x), bare(x))
    close(bare(x), make_stack("gqa", 6, kv_source=[None, None, 1, 0, None, 4])(x))


def test_receptive_field():
    """Only windowed layers: nothing older than L (W - 1) tokens is felt; one full layer feels it."""
    x = batch(14, size=1).requires_grad_()
    for line, felt in (("mixattention(window=3, period=6, runs=[5], offset=5)", False), (MIX, True)):
        (gradient,) = torch.autograd.grad(make_stack("gqa", 4, kv_source=line)(x)[:, -1].sum(), x)
        assert (gradient[:, : 14 - 1 - 4 * 2] != 0).any() == felt


# --- yoco


def test_yoco_written_out():
    stack, x = make_stack("gqa", 6, kv_source="yoco(window=4)"), batch(11)
    close(stack(x), written_out(stack, x, [None] * 4 + [3, 3], [4, 4, 4, None, None, None]))


def test_yoco_over_retention():
    hold_to_the_laws(["retention", "retention", "gqa(kv_heads=2)", "gqa(kv_heads=2)"], 4, kv_source="yoco")


def test_yoco_caches_once():
    stack, x, cache = make_stack("gqa(kv_heads=2)", 6, kv_source="yoco(window=4)"), batch(9, size=1), Cache()
    close(decoded(stack, x, 1), stack(x), 1e-9)
    with torch.no_grad():
        stack(x, cache=cache)
    held = [cache.site(layer).growing["k"].rows().shape[2] if cache.site(layer).growing else 0 for layer in range(6)]
    assert held == [3, 3, 3, 9, 0, 0]


@pytest.mark.parametrize("context, whole, shared", [(262144, 10240, 522), (16384, 640, 42)])
def test_published_mib(context, whole, shared):
    """20 layers, 512 numbers for keys and for values, window 512, 16 bit; the window holds one row less here."""
    with torch.device("meta"):
        plain = Stack("gqa(kv_heads=4, head_dim=128)", 512, 4, 20, ffn="none")
        once = Stack("gqa(kv_heads=4, head_dim=128)", 512, 4, 20, ffn="none", kv_source="yoco(window=513)")
    assert plain.cost.cache_bytes(context, 2) == whole * 2**20
    assert once.cost.cache_bytes(context, 2) == shared * 2**20
    parameters = [sum(p.numel() for p in stack.parameters()) for stack in (plain, once)]
    assert parameters[0] - parameters[1] == 9 * 2 * 512 * 512
