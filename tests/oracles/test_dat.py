"""Oracles of `dat`."""

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
    rope,
    triangle,
    twin,
)
from tests.oracles.reference import weights as softmax

from manyheads import Attention, Cache, Links, OptionError, Site, SpecError
from manyheads.attention.project import dat as module
from manyheads.core.kernel import using
from manyheads.core.mask import Axis
from manyheads.stack import Stack
from manyheads.stack.block import Block

WIDTH, TOKENS = 6, 9
ACTS = {"identity": lambda r: r, "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


def symbolic(p, x):
    """The symbols of `SymbolicAttention`, one symbol head after the other."""
    s, found = p.symbols, []
    for q, t, v in zip(*(rows.chunk(s.heads, -1) for rows in (s.query(x), s.templates, s.symbols)), strict=True):
        found.append((q @ t.T / q.shape[-1] ** 0.5).softmax(-1) @ v)
    return torch.cat(found, -1)


def relations(layer, x):
    """r `[B, n_r, T, T]` before the act."""
    p = layer.project
    q, k = (heads_of(f(x), p.relations) for f in (p.relation_q_proj, p.relation_k_proj or p.relation_q_proj))
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def grouped(layer, rows):
    return heads_of(rows, rows.shape[-1] // WIDTH).repeat_interleave(HEADS // layer.layout.kv, 1)


def maps(layer, x):
    q, k = heads_of(layer.project.q_proj(x), HEADS), grouped(layer, layer.project.k_proj(x))
    return softmax(rope(q), rope(k), WIDTH**-0.5)


def written_out(layer, x, act="identity", s=None):
    """Every relation of every pair of tokens, mapped by W_r before the average, step by step."""
    p = layer.project
    a, r = maps(layer, x), ACTS[act](relations(layer, x))
    s = symbolic(p, x) if s is None else s
    pairs = torch.einsum("brij,nrd->bnijd", r, p.relation_out)  # r_ij W_r
    relational = (a[:, p.sensory :, ..., None] * pairs).sum(3) + a[:, p.sensory :] @ grouped(layer, p.symbol_proj(s))
    if p.v_proj is None:
        return join(relational, p.o_proj[0])
    sensory = a[:, : p.sensory] @ grouped(layer, p.v_proj(x))
    return torch.cat([join(o, proj) for o, proj in zip((sensory, relational), p.o_proj, strict=True)], -1)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    "options", ["", "relational=4, ", "relational=1, relations=3, ", "kv_heads=2, symmetric=true, "]
)
def test_written_out(act, options):
    """Averages of relation keys, or of the acts of all pairs, are the dense form; no sensory head is needed."""
    layer, x = make(f"dat({options}act={act})"), batch()
    close(layer(x), written_out(layer, x, act))


def test_identity_is_fused_in_chunks(monkeypatch):
    layer, x = make("dat"), batch()
    want = layer(x)
    with using("sdpa"):
        close(layer(x), want)
    monkeypatch.setattr(module, "WIDEST", 5)
    close(layer(x), want)
    with using("sdpa"), pytest.raises(ValueError, match="Relations works on the scores"):
        make("dat(act=relu)")(x)
    assert layer.explain(100).kernel == "sdpa" and layer.explain(1).kernel == "sdpa"


def test_sensory_heads_are_gqa():
    layer, x = make("dat(kv_heads=2)"), batch()
    p, half = layer.project, DIM // 2
    plain = make("gqa(kv_heads=1, head_dim=6)", heads=2)
    o = torch.cat([p.o_proj[0].weight, torch.zeros(half, half).double()])
    weights = {"q": p.q_proj.weight[:half], "k": p.k_proj.weight[:WIDTH], "v": p.v_proj.weight, "o": o}
    plain.load_state_dict({f"project.{name}_proj.weight": weight.detach() for name, weight in weights.items()})
    close(layer(x)[..., :half], plain(x)[..., :half])


def test_without_relations_it_is_attention_over_symbols_and_without_symbols_it_is_relations():
    layer, x = make("dat(relational=4)"), batch()
    p, a = layer.project, maps(layer, x)
    zero = torch.zeros_like(p.relation_out)
    only = twin(layer, str(layer.spec), project__relation_out=zero)
    close(only(x), join(a @ heads_of(p.symbol_proj(symbolic(p, x)), HEADS), p.o_proj[0]))
    only = twin(layer, str(layer.spec), project__symbol_proj__weight=torch.zeros(DIM, DIM).double())
    routed = torch.einsum("bnij,brij->bnir", a, relations(layer, x))
    close(only(x), join(routed @ p.relation_out, p.o_proj[0]))


def test_symmetric_relations():
    x = batch()
    r = relations(make("dat(symmetric=true, relations=3)"), x)
    close(r, r.transpose(-1, -2))
    r = relations(make("dat(relations=3)"), x)
    differ(r, r.transpose(-1, -2))


def test_relations_scale_with_their_queries():
    layer, x = make("dat(relational=4)"), batch()
    none, tripled = (
        twin(layer, str(layer.spec), project__relation_q_proj__weight=c * layer.project.relation_q_proj.weight.detach())
        for c in (0, 3)
    )
    close(tripled(x) - none(x), 3 * (layer(x) - none(x)))


def test_relations_have_no_positions():
    """With uniform weights over all tokens nothing is left that knows a place: permuting tokens permutes y."""
    layer, x = make("dat + rope", site=Site(causal=False)), batch()
    order = torch.randperm(TOKENS)
    differ(layer(x[:, order]), layer(x)[:, order])
    even = twin(layer, str(layer.spec), project__q_proj__weight=torch.zeros(DIM, DIM).double())
    close(even(x[:, order]), even(x)[:, order])
    close(even(x, positions=7 * torch.arange(TOKENS)[None]), even(x))


def test_a_constant_on_all_symbols_is_a_constant_on_all_relational_heads():
    layer, x, shift = make("dat(symbols=position, symbol_count=12)"), batch(), torch.randn(DIM).double()
    p = layer.project
    moved = twin(layer, str(layer.spec), project__symbols__table=p.symbols.table.detach() + shift)
    both = p.o_proj[1](p.symbol_proj(shift))
    close((moved(x) - layer(x))[..., DIM // 2 :], both.expand(2, TOKENS, -1))
    close(moved(x)[..., : DIM // 2], layer(x)[..., : DIM // 2])


def test_position_symbols():
    layer, x = make("dat(symbols=position, symbol_count=40)"), batch()
    table = layer.project.symbols.table
    close(layer(x), written_out(layer, x, s=table[:TOKENS].expand(2, -1, -1)))
    moved = layer(x, positions=torch.arange(30, 30 + TOKENS)[None])
    close(moved, written_out(layer, x, s=table[30 : 30 + TOKENS].expand(2, -1, -1)), 1e-9)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_symbols_by_brute_force(causal):
    """A loop over pairs; distances beyond the table take its ends."""
    position = " + rope"
    layer = make(f"dat(symbols=relative, symbol_count=3, kv_heads=2){position}", site=Site(causal=causal))
    x, p = batch(), layer.project
    q, k = rope(heads_of(p.q_proj(x), HEADS)), rope(grouped(layer, p.k_proj(x)))
    a = softmax(q, k, WIDTH**-0.5, triangle() if causal else torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    r, s = relations(layer, x), p.relative.symbol_proj(p.relative.table)
    o = torch.zeros(2, 2, TOKENS, WIDTH).double()
    for i in range(TOKENS):
        for j in range(TOKENS):
            symbol = s[min(max(j - i, -3), 3) + 3]
            for h in range(2):
                o[:, h, i] += a[:, 2 + h, i, j, None] * (r[:, :, i, j] @ p.relation_out[h] + symbol)
    close(layer(x)[..., DIM // 2 :], join(o, p.o_proj[1]))


@pytest.mark.parametrize("options", ["kv_heads=2", "act=relu", "symbols=relative, symbol_count=2", "symbols=position"])
def test_decode(options):
    layer, x = make(f"dat({options})"), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


def test_symbols_read_the_stream_before_the_norm():
    """As a block hands it on; a layer called alone has only x."""
    layer, x = make("dat"), batch()
    block = Block(layer, None).double()
    block.attention_norm.weight.data.normal_()
    links, normed = Links(), block.attention_norm(x)
    close(
        block(x, positions=Axis(TOKENS, 0), links=links)[0] - x,
        written_out(layer, normed, s=symbolic(layer.project, x)),
    )
    assert links.residual is None
    differ(layer(normed), block(x, positions=Axis(TOKENS, 0))[0] - x)


def test_output_projections_start_small_in_a_stack():
    stack = Stack("dat(symbol_heads=4)", 64, 8, layers=8)
    out, q = stack.attentions[0].project.o_proj[1].weight, stack.attentions[0].project.q_proj.weight
    assert abs(out.std() / (0.02 / 4) - 1) < 0.1 and abs(q.std() / 0.02 - 1) < 0.1


def test_relational_heads_are_square_blocks_or_joint():
    split, joint = make("dat(relational=1)").project.o_proj, make("dat(relational=1, joint_out=true)").project.o_proj
    assert [tuple(each.weight.shape) for each in split] == [(18, 18), (6, 6)]
    assert [tuple(each.weight.shape) for each in joint] == [(DIM, DIM)]


@pytest.mark.parametrize("symmetric", [False, True])
def test_cost(symmetric):
    """The authors' small model: D 1024, 8 + 8 heads, 4 + 4 key heads, 1024 symbols."""
    dim, heads, kv, d, relations, symbols = 1024, 8, 4, 64, 32, 1024
    wide = heads * d
    with torch.device("meta"):
        layer = Attention(f"dat(relations=32, kv_heads=8, symmetric={str(symmetric).lower()})", dim, 16)
    sensory = dim * wide + 2 * dim * kv * d + wide**2
    relational = dim * wide + dim * kv * d + (1 if symmetric else 2) * dim * wide + dim * kv * d
    relational += heads * d * relations + wide**2
    retriever = dim**2 + dim + 2 * symbols * dim
    cost = layer.spec.cost(dim, 16)
    assert cost.parameters == sensory + relational + retriever == sum(p.numel() for p in layer.parameters())
    assert cost.cache_floats == 2 * kv * d + kv * d + wide + kv * d


@pytest.mark.parametrize(("options", "floats"), [("", 2 * 24 + 12), ("symbols=relative", 2 * 24 - 12 + 12)])
def test_cache_bytes(options, floats):
    layer, cache = make(f"dat({options})"), Cache()
    decoded(layer, batch(size=1), 4, cache)
    assert cache.bytes() == TOKENS * floats * 8


@pytest.mark.parametrize(
    ("options", "site", "words"),
    [
        ("relational=0", Site(), ["relational=0 of 4 heads", "[1, 2, 3, 4]", "gqa"]),
        ("relational=3, kv_heads=2", Site(), ["kv_heads=2", "[2, 4]"]),
        ("relational=4, symbols=relative", Site(), ["[1, 2, 3]", "at least one head caches values"]),
        ("kv_heads=3", Site(), ["kv_heads may be [1, 2, 4]"]),
        ("relations=5", Site(), ["relations=5 must divide 12"]),
        ("symbol_heads=7", Site(), ["symbol_heads=7 must divide dim=24"]),
        ("symbols=position, symbol_count=9", Site(max_len=64), ["symbol_count=9", "at least 64"]),
        ("symmetric=true", Site(1, 2, kv_source=0), ["rows of another layer"]),
    ],
)
def test_refusals(options, site, words):
    with pytest.raises(OptionError) as error:
        Attention(f"dat({options})", DIM, HEADS, site=site)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("line", "site", "words"),
    [
        ("dat + talking_heads", Site(), ["'talking_heads' needs 'one map'", "which 'dat' breaks"]),
        ("dat + alibi", Site(), ["'alibi' breaks 'alike heads'", "which 'dat' relies on"]),
        ("dat(symmetric=true)", Site(cross=True, causal=False), ["'dat' needs 'self'", "dat(symmetric=false)"]),
    ],
)
def test_what_does_not_go_together(line, site, words):
    with pytest.raises(SpecError) as error:
        Attention(line, DIM, HEADS, site=site)
    assert all(word in str(error.value) for word in words), str(error.value)
