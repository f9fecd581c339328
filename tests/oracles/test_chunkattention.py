"""ChunkAttention, arXiv 2402.15220: the tree of chunks, and attention in two phases over what it shares."""

import random

import pytest
import torch
from tests.stack import tiny
from torch import nn

import manyheads as mh
from manyheads.attention import layer as layer_module
from manyheads.core.kernel import Call, Out, attend, merge
from manyheads.core.mask import Axis, Mask
from manyheads.core.prefix import PrefixCache, PrefixTree
from manyheads.stack.requests import answer

DIM, HEADS = 24, 4
SPECS = [
    "gqa(kv_heads=2)", "mla(rank=9, rope_dim=4, view=absorbed)", "mla(rank=9, rope_dim=4, view=expanded)",
    "gqa + window(size=3)", "gqa + alibi", "gqa + softmax(cap=2.0)", "gqa(kv_heads=1) + kha + moh(top=2)",
    "smha", "gqa + head_composition(kv_heads=2)", "mhe",
]  # fmt: skip


def make(spec):
    layer = mh.Attention(spec, DIM, HEADS).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.requires_grad_(False)


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def chunks(tree, number):
    node, found = tree.tails[number], []
    while node.parent is not None:
        found.insert(0, node.tokens)
        node = node.parent
    return found


def hold(tree, grown=False):
    """What is true of every tree; tails that have grown may have become alike."""
    spans = list(tree.spans())
    tails = {id(tail) for tail in tree.tails}
    assert tree.root.sequences == len(tree.tails) == sum(child.sequences for child in tree.root.children)
    assert [first for chunk, first, _ in spans if id(chunk) in tails] == list(range(len(tree.tails)))
    for chunk, first, last in spans:
        below = [tree.tails[number] for number in range(first, last)]
        assert chunk.sequences == last - first == len(below) and all(chunk in path(tail) for tail in below)
        if chunk.children:
            assert len(chunk.tokens) == tree.size
        else:
            assert id(chunk) in tails and chunk.sequences == 1
        full = [tuple(child.tokens) for child in chunk.children if child.children]
        assert grown or len(full) == len({*full})
    assert tree.unique <= tree.total


def path(node):
    found = []
    while node is not None:
        found, node = [*found, node], node.parent
    return found


# the tree


def test_the_chunks_of_the_examples():
    tree = PrefixTree(2)
    assert tree.add([1, 2, 3, 4, 5]) == 0 and chunks(tree, 0) == [[1, 2], [3, 4], [5]] and tree.unique == 5
    assert tree.add([1, 2, 3, 4, 6]) == 1 and tree.unique == 6
    assert tree.add([1, 2, 3, 4]) == 2 and chunks(tree, 2) == [[1, 2], [3, 4], []] and tree.unique == 6
    assert tree.add([1, 7]) == 3 and chunks(tree, 3) == [[1, 7], []] and tree.unique == 8
    assert tree.add([1, 2]) == 3 and chunks(tree, 3) == [[1, 2], []] and tree.unique == 8  # behind its siblings
    assert tree.total == 5 + 5 + 4 + 2 + 2
    hold(tree)


def test_a_tree_under_random_requests_keeps_its_promises_and_ends_empty():
    draw = random.Random(0)
    for size in (1, 2, 3):
        tree, alive, grown = PrefixTree(size), [], False
        for step in range(60):
            if alive and draw.random() < 0.3:
                number = draw.randrange(len(alive))
                tree.remove(number)
                alive.pop(number)
            else:
                tokens = [draw.randrange(2) for _ in range(draw.randrange(8))]
                alive.insert(tree.add(tokens), tokens)
            if step > 30 and draw.random() < 0.2:
                grown = True
                new = [draw.randrange(2) for _ in alive]
                tree.append(new)
                alive = [[*tokens, token] for tokens, token in zip(alive, new, strict=True)]
            hold(tree, grown)
            assert [[token for chunk in chunks(tree, i) for token in chunk] for i in range(len(alive))] == alive
            assert tree.total == sum(map(len, alive))
        while tree.tails:
            tree.remove(0)
        assert not tree.root.children and tree.unique == tree.root.sequences == 0


def test_runs_join_chunks_of_the_same_sequences():
    tree = PrefixTree(2)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4, 6, 7, 9], [9]):
        tree.add(tokens)
    assert [run[:4] for run in tree.runs()] == [([1, 2, 3, 4], 0, 0, 3), ([6, 7], 4, 1, 3)]
    assert [run.after for run in tree.runs()] == [None, 0] and tree.shared() == [4, 6, 6, 0]


def test_what_is_no_tree_is_refused():
    with pytest.raises(ValueError, match="the smallest has 1"):
        PrefixTree(0)
    tree = PrefixTree(2)
    for wrong in (-1, 1.5, "a"):
        with pytest.raises(ValueError, match="is no token"):
            tree.add([1, wrong])
    assert not tree.root.children
    with pytest.raises(ValueError, match="there is no sequence 0"):
        tree.remove(0)
    with pytest.raises(ValueError, match="2 tokens for 0 sequences"):
        tree.append([1, 2])


# the merge


def test_partial_answers_merge_in_any_order_and_nesting():
    q, k, v = torch.randn(3, 2, 4, 1, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 4, 13, 8, dtype=torch.float64) for _ in range(2))

    def solve(cut):
        keys = k[:, :, cut]
        return attend(Call(q, keys, v[:, :, cut], Mask(Axis(1, 99), Axis(keys.shape[2], 0), ()), 0.3), need_lse=True)

    a, b, c, whole = (solve(slice(*cut)) for cut in ((0, 5), (5, 6), (6, 13), (0, 13)))
    assert merge([a]) is a
    for got in (merge([a, b, c]), merge([c, a, b]), merge([merge([a, b]), c]), merge([a, merge([c, b])])):
        same(got.o, whole.o)
        same(got.lse, whole.lse)
    nothing = Out(torch.zeros_like(a.o), torch.full_like(a.lse, -torch.inf))
    same(merge([nothing, whole]).o, whole.o)


# the cache


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_a_tree_of_prompts_gives_what_each_gives_alone(spec, size):
    """Identical prompts, a prompt that is another's beginning, multiples of a chunk, nothing shared; then decoding."""
    layer = make(spec)
    table = torch.randn(9, DIM, dtype=torch.float64)
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4, 6, 7, 8, 1], [1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4], [5, 5]]
    full = [layer(table[torch.tensor([*prompt, 3, 2])][None])[0] for prompt in prompts]
    for order in ([*range(6)], [3, 5, 0, 4, 1, 2]):  # the order of arrival changes no answer
        tree, places = PrefixTree(size), []
        for index in order:
            places.insert(tree.add(prompts[index][:-1]), index)
        passes: list[torch.Tensor] = []

        def read(ids, cache, passes=passes):
            passes.append(layer(table[torch.tensor(ids)][None], cache=cache))

        cache = PrefixCache.of(tree, read)
        assert sum(each.shape[1] for each in passes) == sum(len(run.tokens) for run in tree.runs())
        rests = [prompts[index][count:] for index, count in zip(places, tree.shared(), strict=True)]
        longest = max(map(len, rests))
        ids = torch.tensor([[0] * (longest - len(rest)) + rest for rest in rests])
        cache.expect([len(rest) for rest in rests])
        got = layer(table[ids], cache=cache)
        for place, index in enumerate(places):
            rest = len(rests[place])
            same(got[place, longest - rest :], full[index][-2 - rest : -2])
        for at, token in ((-2, 3), (-1, 2)):
            got = layer(table[torch.full((6, 1), token)], cache=cache)
            for place, index in enumerate(places):
                same(got[place, 0], full[index][at])


@pytest.mark.parametrize("spec", [*SPECS[:6], "smha"])
def test_queries_of_all_sequences_read_shared_rows_in_one_product(spec, monkeypatch):
    """Where a rule asks more than times and positions (`smha`), there are rows for each."""
    layer = make(spec)
    root, seen = PrefixCache(), []
    layer(torch.randn(1, 6, DIM, dtype=torch.float64), cache=root)
    cache = root.branch(5)
    layer(torch.randn(5, 2, DIM, dtype=torch.float64), cache=cache)
    monkeypatch.setattr(layer_module, "attend", lambda call, *a, **k: seen.append(call) or attend(call, *a, **k))
    layer(torch.randn(5, 1, DIM, dtype=torch.float64), cache=cache)
    own, shared = seen
    assert [len(own.q), own.q.shape[2]] == [5, 1]
    assert [len(shared.q), shared.q.shape[2]] == ([5, 1] if spec == "smha" else [1, 5])
    assert shared.k.untyped_storage().nbytes() <= root.reserved_bytes() or "expanded" in spec


def test_memory_is_the_arithmetic_of_the_tree():
    layer, s, p, b = make("gqa(kv_heads=2)"), 16, 3, 5
    row = 2 * 2 * 6 * 8
    root = PrefixCache()
    layer(torch.randn(1, s, DIM, dtype=torch.float64), cache=root)
    cache, apart = root.branch(b), mh.Cache()
    layer(torch.randn(b, p, DIM, dtype=torch.float64), cache=cache)
    layer(torch.randn(b, s + p, DIM, dtype=torch.float64), cache=apart)
    assert cache.bytes() == (s + b * p) * row and cache.apart_bytes() == apart.bytes() == b * (s + p) * row
    cache.keep([1, 4])
    assert cache.bytes() == (s + 2 * p) * row and cache.batch == 2
    cache.keep([])
    assert cache.bytes() == 0


def test_what_one_sequence_appends_no_other_sees():
    layer = make("gqa(kv_heads=2)")
    root, x, y = PrefixCache(), torch.randn(1, 5, DIM, dtype=torch.float64), torch.randn(3, 4, DIM, dtype=torch.float64)
    layer(x, cache=root)
    other = y.clone()
    other[1] += 1
    one, two = root.branch(3), root.branch(3)
    a, b = layer(y, cache=one), layer(other, cache=two)
    assert torch.equal(a[[0, 2]], b[[0, 2]]) and not torch.allclose(a[1], b[1])


def test_sequences_end_fork_and_go_back():
    layer = make("mla(rank=9, rope_dim=4)")
    x, y = torch.randn(1, 4, DIM, dtype=torch.float64), torch.randn(3, 6, DIM, dtype=torch.float64)
    root = PrefixCache()
    layer(x, cache=root)
    cache = root.branch(3)
    full = layer(torch.cat([x.expand(3, -1, -1), y], 1))[:, 4:]
    layer(y[:, :3], cache=cache)
    fork = cache.fork(torch.tensor([2, 2, 0]))
    same(layer(y[[2, 2, 0], 3:5], cache=fork), full[[2, 2, 0], 3:5])
    layer(torch.randn_like(y[:, :2]), cache=cache)
    cache.rollback(2)
    cache.keep([0, 2])
    same(layer(y[[0, 2], 3:], cache=cache), full[[0, 2], 3:])
    with pytest.raises(ValueError, match="cannot go back 7 tokens: it has seen 6"):
        cache.rollback(7)


def test_rows_that_do_not_belong_together_are_refused():
    layer, x = make("gqa(kv_heads=2)"), torch.randn(1, 4, DIM, dtype=torch.float64)
    root = PrefixCache()
    layer(x, cache=root)
    for spec, says in (
        ("mla(rank=9, rope_dim=4)", "has rows k, v at layer 0; this layer writes latent"),
        ("gqa(kv_heads=1)", "has 2 x 6 numbers of 'k' a token at layer 0, torch.float64; this layer has 1 x 6"),
    ):
        with pytest.raises(ValueError, match=says):
            make(spec)(x.expand(2, -1, -1), cache=root.branch(2))
    with pytest.raises(ValueError, match=r"torch\.float64; this layer has 2 x 6, torch\.float32"):
        make("gqa(kv_heads=2)").float()(x.float(), cache=root.branch(1))
    with pytest.raises(ValueError, match="has 2 sequences; this pass has 1"):
        layer(x, cache=root.branch(2))
    cache = root.branch(1)
    root.layers[0].growing["v"].drop(1)
    with pytest.raises(ValueError, match="4 tokens, of which layer 0 has"):
        layer(x, cache=cache)
    for spec, says in (("mtla", "mtla breaks 'token keys'"), ("gqa + talking_heads", "talking_heads breaks 'softmax'")):
        with pytest.raises(ValueError, match=says):
            make(spec)(x, cache=PrefixCache())
    with pytest.raises(ValueError, match="mark padding by a"):
        layer(x, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool), cache=PrefixCache())
    many = PrefixCache(batch=3)
    with pytest.raises(ValueError, match="no one prefix to share"):
        many.branch(2)
    with pytest.raises(ValueError, match="2 lengths for 3"):
        many.expect([1, 2])
    other = PrefixCache()
    layer(x, cache=other)
    with pytest.raises(ValueError, match="side by side"):
        PrefixCache.beside([other.branch(1), PrefixCache(), other.branch(1)])


# whole models


@pytest.mark.parametrize("body", tiny.BODIES)
@pytest.mark.parametrize("case", ["gqa", "mla-absorbed", "mixed"])
def test_prompts_answered_together_are_answered_as_each_alone(case, body):
    system = torch.randint(8, tiny.VOCAB, (13,)).tolist()
    prompts = [[*system, 3], [*system, 4, 5, 6], system, [*system[:9], 5, 5], [7]]
    model = tiny.model(case, body)

    def alone(prompt):
        ids = torch.tensor([prompt])
        return tiny.greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0, len(prompt) :].tolist()

    free = alone(prompts[0])
    model.generation_config.eos_token_id = free[2]  # one ends early, and leaves
    found = answer(model, prompts, tokens=8, chunk=4)
    assert found.tokens == [alone(prompt) for prompt in prompts] and len(found.tokens[0]) < 8
    assert found.total == sum(map(len, prompts)) and found.stored < found.total and found.bytes < found.apart_bytes
    drawn = answer(model, prompts, tokens=8, chunk=4, sample=True, top_p=0.9, temperature=1.2, seed=5).tokens
    for index, prompt in enumerate(prompts):
        options = {"sample": True, "top_p": 0.9, "temperature": 1.2, "seed": 5 + index}
        assert answer(model, [prompt], tokens=8, **options).tokens == [drawn[index]]


def test_prompts_that_cannot_be_answered_are_refused_at_once():
    model = tiny.model("gqa", "llama", max_position_embeddings=16)
    for prompts, says in (
        ([], "there are no prompts"), ([[1], []], "prompt 2 is empty"),
        ([[1] * 17], "prompt 1 has 17 tokens; the model was made for 16 positions"),
        ([[1], [99]], "token 99 of prompt 2 is outside"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            answer(model, prompts)
    with pytest.raises(ValueError, match="tokens=0"):
        answer(model, [[1]], tokens=0)
    with pytest.raises(ValueError, match=r"cannot share rows at layer 0 \(mtla"):
        answer(tiny.model("mtla"), [[1]])
