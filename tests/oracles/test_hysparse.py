"""Oracles of `hysparse`."""

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
from tests.oracles.stacks import hold_to_the_laws, make_stack

from manyheads import Attention, Cache, Links, OptionError, Site, Spec

WIDTH, KV = DIM // HEADS, 2
BASE = f"gqa(kv_heads={KV})"


def pair(options, base=BASE):
    """A full layer and the sparse one above it."""
    spec = f"{base} + hysparse({options})"
    return [make(spec, seed=i, site=Site(i, 2)) for i in range(2)]


def both(full, sparse, x):
    """The sparse layer's answer, and what the full one handed on; both see the same x."""
    links = Links()
    full(x, links=links)
    return sparse(x, links=links), links.handed[0]


def gates(sparse, shared, own):
    """Constant gates."""
    select = sparse.selects[0]
    for gate, value in ((select.shared_gate, shared), (select.own_gate, own)):
        gate.weight.data.zero_()
        gate.bias.data.fill_(60.0 if value else -60.0)


def projected(layer, x):
    p = layer.project
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, KV), (p.v_proj, KV)))
    return rope(q), rope(k).repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)


def block_scores(a, block):
    """Of every block, the largest weight, over the query heads of a group too, `[B, G, T, blocks]`."""
    each = a.unflatten(1, (KV, -1)).amax(2)
    return torch.stack([part.amax(-1) for part in each.split(block, -1)], -1)


def chosen_keys(a, block, blocks):
    """`[B, H, T, S]`, by brute force."""
    scores, tokens = block_scores(a, block), a.shape[-1]
    mask = torch.zeros(*scores.shape[:3], tokens, dtype=torch.bool)
    for b, g, t in ((b, g, t) for b in range(len(a)) for g in range(KV) for t in range(tokens)):
        best = sorted(range(scores.shape[-1]), key=lambda i: (-scores[b, g, t, i], i))[:blocks]
        for i in best:
            mask[b, g, t, i * block : i * block + block] = True
    return mask.repeat_interleave(HEADS // KV, 1) & triangle(tokens)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (f"{BASE} + hysparse(ratio=2, block=2, blocks=2, window=3)", 5),
        ("gqa + hysparse(ratio=1, block=3, blocks=1, window=2, gate=head)", 3),
        ("mla(view=expanded) + hysparse(ratio=1, block=1, blocks=3, window=2)", 2),
        (f"{BASE} + kha + qk-norm + hysparse(ratio=1, block=2, blocks=2) + softmax(cap=3.0) + moh(top=2)", 2),
        (f"{BASE} + hysparse(ratio=2, block=2, blocks=2, window=3) + window(6)", 4),
    ],
)
def test_laws_of_a_stack(spec, count):
    hold_to_the_laws(spec, count)


@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize(("block", "blocks", "window"), [(2, 2, 3), (3, 1, 1), (1, 4, 5)])
def test_written_out(block, blocks, window, gate):
    full, sparse = pair(f"block={block}, blocks={blocks}, window={window}, gate={gate}")
    x = batch()
    y, _ = both(full, sparse, x)
    q, k, v = projected(full, x)
    close(full(x), join(weights(q, k, WIDTH**-0.5) @ v, full.project.o_proj))
    own_q, own_k, own_v = projected(sparse, x)
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    picked = chosen_keys(weights(q, k, WIDTH**-0.5), block, blocks)
    far = weights(own_q, k, WIDTH**-0.5, picked) @ v
    near = weights(own_q, own_k, WIDTH**-0.5, triangle() & (back < window)) @ own_v
    select = sparse.selects[0]
    a, b = (heads_of(g(x).sigmoid(), HEADS) for g in (select.shared_gate, select.own_gate))
    close(y, join(a * far + b * near, sparse.project.o_proj))


def test_all_blocks_and_only_the_shared_branch_is_cross_layer_attention():
    full, sparse = pair("block=2, blocks=5, window=2")
    gates(sparse, True, False)
    x, links = batch(), Links()
    y, _ = both(full, sparse, x)
    reader = make(BASE, site=Site(1, 2, kv_source=0))
    reader.load_state_dict({n: t for n, t in sparse.state_dict().items() if n in reader.state_dict()})
    full(x, links=links)
    close(y, reader(x, links=links))


def test_only_the_window_branch_is_grouped_query_attention():
    full, sparse = pair(f"block=2, blocks=1, window={TOKENS}")
    gates(sparse, False, True)
    x = batch()
    close(both(full, sparse, x)[0], twin(sparse, BASE)(x))


@pytest.mark.parametrize("block", [1, 2, 4])
def test_block_scores(block):
    """exp(largest score - log-sum-exp) is the largest weight; the top block holds the key of the largest weight."""
    full, sparse = pair(f"block={block}, blocks=2, window=2")
    x = batch()
    q, k, _ = projected(full, x)
    a = weights(q, k, WIDTH**-0.5)
    logits = (q @ k.transpose(-1, -2) * WIDTH**-0.5).masked_fill(~triangle(), -torch.inf)
    top = torch.stack([part.amax(-1) for part in logits.split(block, -1)], -1)
    scores = (top - logits.logsumexp(-1, keepdim=True)).exp()
    close(scores.unflatten(1, (KV, -1)).amax(2), block_scores(a, block))
    assert (scores <= 1).all() and (block_scores(a, block).repeat_interleave(2, 1) >= scores - 1e-12).all()
    close(a.sum(-1), torch.ones_like(a[..., 0]))
    handed = both(full, sparse, x)[1]
    best = a.unflatten(1, (KV, -1)).amax(2).argmax(-1) // block
    assert torch.equal(handed.chosen[..., 0], best)
    assert handed.chosen.shape == (2, KV, TOKENS, min(2, -(-TOKENS // block)))


def test_what_the_blocks_miss_bounds_the_error():
    """With the full layer's own query: |õ - o| <= 2 ε max |v|, ε the mass left out."""
    full, _ = pair("block=2, blocks=2, window=2")
    q, k, v = projected(full, batch())
    a = weights(q, k, WIDTH**-0.5)
    mask = chosen_keys(a, 2, 2)
    missed = 1 - (a * mask).sum(-1)
    error = (weights(q, k, WIDTH**-0.5, mask) @ v - a @ v).norm(dim=-1)
    assert (error <= 2 * missed * v.norm(dim=-1).amax(-1, keepdim=True) + 1e-12).all() and missed.max() > 0.05


def test_equal_blocks_go_to_the_earlier_one():
    full, sparse = pair("block=2, blocks=2, window=2")
    full.project.q_proj.weight.data.zero_()
    handed = both(full, sparse, batch())[1]
    assert handed.chosen[0, 0, -1].tolist() == [0, 1]


def test_a_later_token_changes_no_choice():
    full, sparse = pair("block=2, blocks=2, window=2")
    x = batch()
    other = torch.cat([x[:, :6], batch()[:, 6:]], 1)
    ours, theirs = (both(full, sparse, each)[1].chosen[:, :, :6] for each in (x, other))
    seen = ours * 2 <= torch.arange(6)[None, None, :, None]  # early queries have fewer blocks than they may choose
    assert torch.equal(ours[seen], theirs[seen])


def test_the_full_layer_learns_from_the_sparse_ones():
    full, sparse = pair("block=2, blocks=2, window=2")
    both(full, sparse, batch())[0].pow(2).sum().backward()
    assert full.project.k_proj.weight.grad.abs().sum() > 0 < full.project.v_proj.weight.grad.abs().sum()
    assert full.project.q_proj.weight.grad is None


def test_one_new_token_gathers_its_blocks():
    stack, x, read = make_stack(f"{BASE} + hysparse(ratio=1, block=2, blocks=2, window=3)", 2), batch(), []
    select = stack.attentions[1].selects[0]
    split = select.split

    def spy(call, flow):
        calls = split(call, flow)
        read.append([each.k.shape[2] for each in calls])
        return calls

    select.split = spy
    decoded(stack, x)
    assert read[-1] == [4, 3]


def test_cache_is_that_of_the_full_layers_and_windows():
    stack, cache = make_stack(f"{BASE} + hysparse(ratio=2, block=2, blocks=2, window=4)", 4), Cache()
    decoded(stack, batch(size=1), 1, cache)
    row = 2 * KV * WIDTH * 8
    assert cache.bytes() == (2 * TOKENS + 2 * 3) * row == stack.cost.cache_bytes(TOKENS, 8)


@pytest.mark.parametrize(("gate", "width"), [("channel", WIDTH), ("head", 1)])
def test_parameters(gate, width):
    spec = Spec.parse(f"{BASE} + hysparse(gate={gate})")
    base = Spec.parse(BASE).cost(DIM, HEADS).parameters
    assert spec.cost(DIM, HEADS, Site(0, 4)).parameters == base
    assert spec.cost(DIM, HEADS, Site(2, 4)).parameters == base + 2 * (DIM * HEADS * width + HEADS * width)


@pytest.mark.parametrize(("layers", "ratio", "full"), [(49, 11, 5), (36, 3, 9)])
def test_the_authors_plans(layers, ratio, full):
    """5 of 49 and 9 of 36 layers are full; the rest of the cache does not grow."""
    spec = Spec.parse(f"gqa(kv_heads=2) + hysparse(ratio={ratio})")
    costs = [spec.cost(DIM, HEADS, Site(layer, layers)) for layer in range(layers)]
    grows = [layer for layer, cost in enumerate(costs) if not cost.windows]
    assert grows == list(range(0, layers, ratio + 1)) and len(grows) == full
    plain = layers * Spec.parse("gqa(kv_heads=2)").cost(DIM, HEADS).cache_bytes(10**6)
    assert plain / sum(cost.cache_bytes(10**6) for cost in costs) == pytest.approx(layers / full, rel=0.01)


def test_starts_with_half_open_gates():
    sparse = Attention(f"{BASE} + hysparse", DIM, HEADS, site=Site(1, 2)).selects[0]
    assert (sparse.shared_gate.bias == 0).all() and (sparse.own_gate.bias == 0).all()
    differ(sparse.shared_gate.weight, sparse.own_gate.weight)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gqa + hysparse(blocks=0)", "hysparse: ratio=3, block=64, blocks=0 and window=128 must be positive"),
        ("mla + hysparse", r"'hysparse' needs 'head keys' .*nearest legal: mla\(view=expanded\)"),
        ("alibi + hysparse", "'hysparse' needs 'alike heads' .*, which 'alibi' breaks"),
        ("hysparse + talking_heads", "'talking_heads' needs 'one map' .*, which 'hysparse' breaks"),
        ("longheads + hysparse", "'hysparse' needs '(one map|alike heads)' .*, which 'longheads' breaks"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(OptionError, match=said):
        Attention(spec, DIM, HEADS)


def test_a_layer_without_its_full_layer_says_so():
    with pytest.raises(ValueError, match="layer 1 reads keys and blocks of layer 0, which links do not hold"):
        pair("block=2")[1](batch())
    links = Links()
    pair("block=2", "gqa")[0](batch(), links=links)
    with pytest.raises(ValueError, match="layer 0 has 4 key heads of width 6, layer 1 has 2 of 6; they must agree"):
        pair("block=2")[1](batch(), links=links)
    assert pair("block=2")[1].explain(1).kernel == "sdpa"
