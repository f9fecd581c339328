"""Oracles of `longheads`."""

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    batch,
    close,
    decoded,
    differ,
    heads_of,
    join,
    make,
    twin,
)

from manyheads import Attention, Cache, Links, OptionError, Site
from manyheads.core.position import angles, inverse_frequencies, rotate
from manyheads.stack import Stack

WIDTH, TOKENS = DIM // HEADS, 23


def turned(x, position):
    """Rotate `[..., N, d]` by the positions `[N]`."""
    theta = inverse_frequencies(x.shape[-1], 10000.0)
    cos, sin = angles(position[None], theta, x.dtype)
    return rotate(x, cos[0, 0], sin[0, 0], "half")


def projected(layer, x):
    p = layer.project
    return [heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj)]


def chunk_key(q, k, v, scale=WIDTH**-0.5):
    """c `[d]` of a chunk `[w, d]` by the paper's three steps."""
    place = torch.arange(len(q))
    q, k = turned(q, place), turned(k, place)
    u = ((q @ k.T * scale).softmax(-1) @ v).mean(0)
    return (u @ k.T * scale).softmax(-1) @ k


def written_out(layer, x, w, taken, start, choices=None):
    """One query and head at a time."""
    q, k, v = projected(layer, x)
    o, at = torch.zeros_like(v), torch.arange(x.shape[1])
    for b in range(len(x)):
        for h in range(HEADS):
            for t in range(x.shape[1]):
                own = t // w
                if t < start:
                    rows, new, last = at[: t + 1], at[: t + 1], t
                else:
                    free = range(1, own - 1)
                    score = {c: q[b, h, t] @ chunk_key(*(y[b, h, c * w : c * w + w] for y in (q, k, v))) for c in free}
                    best = sorted(free, key=lambda c: -score[c])[: taken - 3]
                    chosen = sorted({0, max(own - 1, 0), own, *best})
                    rows = torch.cat([at[c * w : c * w + w] for c in chosen])
                    new, last = torch.arange(len(rows)), (len(chosen) - 1) * w + t % w
                    rows, new = rows[: last + 1], new[: last + 1]
                    if choices is not None:
                        choices.append((t, chosen, last))
                scores = turned(q[b, h, t][None], torch.tensor([last])) @ turned(k[b, h, rows], new).T * WIDTH**-0.5
                o[b, h, t] = scores.softmax(-1) @ v[b, h, rows]
    return join(o, layer.project.o_proj)


SIZES = [(2, 4, 8), (3, 4, 0), (1, 5, 5), (4, 3, 14), (2, 5, 13)]


@pytest.mark.parametrize(("w", "taken", "start"), SIZES)
def test_written_out(w, taken, start):
    choices = []
    layer, x = make(f"gqa + longheads(chunk={w}, chunks={taken}, start={start})"), batch(TOKENS)
    close(layer(x), written_out(layer, x, w, taken, start, choices))
    for t, chosen, last in choices:
        own = t // w
        assert {0, own} | ({own - 1} if own else set()) <= set(chosen) and len(chosen) <= taken and last < w * taken
    differ(layer(x), twin(layer, "gqa")(x))


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "mla(view=expanded, rank=10, rope_dim=2, v_dim=8)"])
@pytest.mark.parametrize(("w", "taken", "start"), SIZES)
def test_decoding_equals_the_full_pass(w, taken, start, base):
    layer, x = make(f"{base} + longheads(chunk={w}, chunks={taken}, start={start})"), batch(TOKENS)
    for block in (1, 4, 9):
        close(decoded(layer, x, block), layer(x), 1e-9)


def test_grouped_heads_choose_each_for_itself():
    """Grouped key heads equal as many key heads that are copies."""
    layer, x = make("gqa(kv_heads=2) + longheads(chunk=2, chunks=4)"), batch(TOKENS)
    copies = {
        f"project__{n}_proj__weight": getattr(layer.project, f"{n}_proj")
        .weight.detach().unflatten(0, (2, WIDTH)).repeat_interleave(2, 0).flatten(0, 1)
        for n in "kv"
    }  # fmt: skip
    close(twin(layer, "gqa + longheads(chunk=2, chunks=4)", **copies)(x), layer(x))


def test_up_to_the_start_it_is_the_base_layer_bit_for_bit():
    layer, x = make("gqa(kv_heads=2) + longheads(chunk=2, chunks=4)"), batch(8)
    plain = twin(layer, "gqa(kv_heads=2)")
    assert torch.equal(layer(x), plain(x))
    differ(layer(batch(12)), plain(batch(12)))


@pytest.mark.parametrize(("w", "taken"), [(4, 6), (3, 8), (1, 23)])
def test_while_every_chunk_is_chosen_it_is_full_attention(w, taken):
    layer, x = make(f"gqa + longheads(chunk={w}, chunks={taken}, start=0)"), batch(TOKENS)
    close(layer(x), twin(layer, "gqa")(x))


def keys_of(layer, x):
    """Chunk keys `[B, H, chunks, d]` after a pass."""
    links = Links()
    layer(x, links=links)
    return links.handed[0]


def test_chunk_keys():
    layer, x = make("gqa + longheads(chunk=4, chunks=3)"), batch(TOKENS)
    q, k, v = projected(layer, x)
    keys = keys_of(layer, x)
    assert keys.shape == (2, HEADS, 6, WIDTH) and (keys[:, :, 5] == 0).all()  # the last chunk has 3 tokens
    for c in range(5):
        want = torch.stack([chunk_key(*(y[1, h, 4 * c : 4 * c + 4] for y in (q, k, v))) for h in range(HEADS)])
        close(keys[1, :, c], want)
        local = turned(k[1, 0, 4 * c : 4 * c + 4], torch.arange(4))
        assert (keys[1, 0, c] <= local.amax(0)).all() and (keys[1, 0, c] >= local.amin(0)).all()


def test_chunks_of_one_are_their_own_keys():
    layer, x = make("gqa + longheads(chunk=1, chunks=4)"), batch(TOKENS)
    close(keys_of(layer, x), projected(layer, x)[1])


def test_chunk_keys_do_not_know_their_place():
    layer, x = make("gqa + longheads(chunk=4, chunks=3)"), batch(20)
    order = torch.tensor([2, 0, 4, 1, 3])
    moved = x.unflatten(1, (5, 4))[:, order].flatten(1, 2)
    close(keys_of(layer, moved), keys_of(layer, x)[:, :, order])


def test_an_unchosen_chunk_in_the_middle_changes_nothing():
    """What no head chooses may as well not be there: the others join up all the same."""
    layer, x = make("gqa + longheads(chunk=2, chunks=3, start=0)"), batch(16)
    longer = torch.cat([x[:, :6], batch(4), x[:, 6:]], 1)
    close(layer(longer)[:, -2:], layer(x)[:, -2:])


def test_a_planted_needle_is_chosen():
    """The chunk whose keys point along the query gets the largest score of its head."""
    layer, x = make("gqa + rope(none) + longheads(chunk=4, chunks=4, start=0)"), batch(32, size=1)
    p = layer.project
    p.o_proj.weight.data[:, WIDTH:] = 0  # head 0 alone
    query = p.q_proj(x[0, -1])[:WIDTH]
    x[0, 12:16] = torch.linalg.lstsq(p.k_proj.weight[:WIDTH], 9 * query[:, None]).solution[:, 0]
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[0, -1].sum(), x)
    seen = (gradient[0] != 0).any(-1).unflatten(0, (8, 4)).all(-1)
    assert seen.nonzero()[:, 0].tolist() == [0, 3, 6, 7]


def test_chunks_follow_each_sequences_own_positions():
    layer, x = make("gqa + longheads(chunk=3, chunks=4, start=0)"), batch(TOKENS)
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    close(layer(x, mask=valid)[1, 4:], layer(x[1:, 4:])[0], 1e-9)


@pytest.mark.parametrize("offset", [1, 3, 300])
def test_positions_may_start_anywhere(offset):
    layer, x = make("gqa + longheads(chunk=3, chunks=4, start=0)"), batch(TOKENS)
    positions, cache = torch.arange(offset, offset + TOKENS)[None], Cache()
    parts = [
        layer(x[:, a : a + n], positions=positions[:, a : a + n], cache=cache) for a, n in ((0, 4), (4, 1), (5, 18))
    ]
    close(torch.cat(parts, 1), layer(x, positions=positions), 1e-9)


def test_few_queries_at_a_time_give_the_same(monkeypatch):
    layer, x = make("gqa(kv_heads=2) + longheads(chunk=2, chunks=4, start=5)"), batch(TOKENS)
    want = layer(x)
    monkeypatch.setattr("manyheads.attention.select.longheads.TILE_BYTES", 1)
    close(layer(x), want)


def test_a_reader_uses_the_chunk_keys_of_the_rows_it_reads():
    spec = "gqa(kv_heads=2) + longheads(chunk=2, chunks=4)"
    first, second = make(spec, site=Site(0, 2)), make(spec, site=Site(1, 2, kv_source=0))
    x, links = batch(TOKENS), Links()
    y = first(x, links=links)
    assert torch.isfinite(second(y, links=links)).all()
    with pytest.raises(ValueError, match="reads the rows of layer 0, which links do not hold"):
        second(y)


def test_its_rows_are_those_of_any_layer():
    """Cached rotated: a plain layer may read them, and they equal a plain layer's."""
    plain, spec, x = "gqa(kv_heads=2)", "gqa(kv_heads=2) + longheads(chunk=2, chunks=4, start=0)", batch(TOKENS)
    layer = make(spec)
    caches = Cache(), Cache()
    for each, cache in zip((layer, twin(layer, plain)), caches, strict=True):
        each(x, cache=cache)
    for ours, theirs in zip(*(cache.site(0).growing.values() for cache in caches), strict=True):
        assert torch.equal(ours.rows(), theirs.rows())
    assert torch.isfinite(Stack([spec, plain], DIM, HEADS, kv_source=[None, 0])(torch.randn(1, TOKENS, DIM))).all()


@pytest.mark.parametrize("w", [1, 2, 4])
def test_cache(w):
    """The base rows, a key a chunk begun, and the queries of w - 1 tokens."""
    layer, cache = make(f"gqa(kv_heads=2) + longheads(chunk={w}, chunks=4)"), Cache()
    for n, token in enumerate(batch(TOKENS, size=1).split(1, 1), 1):
        layer(token, cache=cache)
        floats = n * 2 * 2 * WIDTH + (-(-n // w)) * HEADS * WIDTH + (w - 1) * HEADS * WIDTH
        assert cache.bytes() == 8 * floats
        if n % w == 0:
            assert layer.spec.cost(DIM, HEADS).cache_bytes(n, 8) == 8 * floats
    assert layer.spec.cost(DIM, HEADS).parameters == make("gqa(kv_heads=2)").spec.cost(DIM, HEADS).parameters
    with pytest.raises(ValueError, match="keeps no history"):
        cache.rollback(1)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gqa + longheads(chunks=2)", "longheads: chunks=2 of chunk=256 tokens; at least 3"),
        ("gqa + longheads(chunk=0)", "longheads: chunks=16 of chunk=0 tokens"),
        ("mla(view=expanded) + longheads", "longheads: .*values of width 6 with keys of width 8"),
        ("mla + longheads", r"'longheads' needs 'head keys' .*nearest legal: mla\(view=expanded\)"),
        ("mtla + longheads", "'longheads' needs 'head keys'"),
        ("gqa + alibi + longheads", "'longheads' needs 'alike heads' .*, which 'alibi' breaks"),
        ("gqa + longheads + talking_heads", "'talking_heads' needs 'one map' .*, which 'longheads' breaks"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(OptionError, match=said):
        Attention(spec, DIM, HEADS)
    with pytest.raises(OptionError, match="needs 'causal'"):
        Attention("gqa + longheads", DIM, HEADS, site=Site(causal=False))
