"""Oracles of `pod`."""

import math

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, differ, heads_of, join, make, rope, triangle, twin
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack
from tests.stack.tiny import BODIES, greedy, model
from tests.stack.tiny import batch as prompts
from transformers import AutoModelForCausalLM

from manyheads import Attention, Cache, Links, OptionError, Site, Spec
from manyheads.convert.share import _maps, distant, groups

WIDTH, KV = DIM // HEADS, 2
BASE = f"gqa(kv_heads={KV})"


def pair(options, base=BASE):
    """A leader and its follower."""
    return [make(f"{base} + pod({options})", seed=i, site=Site(i, 2)) for i in range(2)]


def both(leader, follower, x, other=None):
    """The follower's answer about `other` (default: what the leader reads too)."""
    links = Links()
    leader(x, links=links)
    return follower(x if other is None else other, links=links)


def projected(layer, x):
    p = layer.project
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, KV), (p.v_proj, KV)))
    return rope(q), rope(k).repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)


def near_and_far(window, first, tokens=TOKENS):
    """N and F as masks, by the definition."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    near = ((j < first) & (j <= i)) | ((i - window < j) & (j <= i))
    return near, (first <= j) & (j <= i - window)


def logits(leader, follower, x, window, first, share, other=None):
    """One map of logits over N ∪ F, by brute force."""
    (q, k, _), (q_p, k_p, _) = projected(follower, x if other is None else other), projected(leader, x)
    near, far = near_and_far(window, first)
    own, theirs = q @ k.transpose(-1, -2), (q_p if share == "scores" else q) @ k_p.transpose(-1, -2)
    none = torch.full_like(own, -torch.inf)
    return torch.where(near, own, torch.where(far, theirs, none)) * WIDTH**-0.5


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (BASE + " + pod(window=3, first=1, share={})", 3),
        ("gqa + pod(group=3, window=2, first=0, share={})", 4),
        (BASE + " + kha + qk-norm + pod(window=1, first=2, share={}) + softmax(cap=3.0) + moh(top=2)", 2),
        ("mfa(key_reuse=false) + rope(none) + pod(window=4, first=0, share={})", 2),
    ],
)
def test_laws_of_a_stack(spec, layers, share):
    hold_to_the_laws(spec.format(share), layers)


def test_laws_of_loops_and_of_groups_that_are_named():
    hold_to_the_laws(f"{BASE} + pod(window=3, first=1)", 2, loops=2)
    lines = [f"{BASE} + pod(leader={leader}, window=2, first=1)" for leader in (0, 1, 1, 1, 0)]
    hold_to_the_laws(lines, 5)


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize(("window", "first"), [(3, 1), (1, 0), (2, 3), (8, 0), (0, 2), (4, 4)])
def test_one_softmax_over_near_and_distant_tokens(window, first, share):
    """The merge is brute force over both; where nothing is distant, and where nothing is near, too."""
    leader, follower = pair(f"window={window}, first={first}, share={share}")
    x, other = batch(), batch()
    a = logits(leader, follower, x, window, first, share, other).softmax(-1)
    assert not a.isnan().any()
    close(both(leader, follower, x, other), join(a @ projected(follower, other)[2], follower.project.o_proj))
    near, far = near_and_far(window, first)
    assert not (near & far).any() and torch.equal(near | far, triangle())


@pytest.mark.parametrize("share", ["scores", "keys"])
def test_the_gate_is_the_share_of_each_sum(share):
    leader, follower = pair(f"window=2, first=1, share={share}")
    x = batch()
    s, v = logits(leader, follower, x, 2, 1, share), projected(follower, x)[2]
    parts = [s.masked_fill(~mask, -torch.inf) for mask in near_and_far(2, 1)]
    g = (parts[0].logsumexp(-1) - parts[1].logsumexp(-1)).sigmoid()[..., None]
    near, far = (each.softmax(-1).nan_to_num() @ v for each in parts)
    close(both(leader, follower, x), join(g * near + (1 - g) * far, follower.project.o_proj))


@pytest.mark.parametrize("share", ["scores", "keys"])
def test_all_near_or_all_leaders_is_plain_attention(share):
    x = batch()
    leader, follower = pair(f"window={TOKENS}, first=0, share={share}")
    for layer in (leader, follower):
        close(both(leader, follower, x) if layer is follower else leader(x), twin(layer, BASE)(x))
    plain, alone = make_stack(BASE, 3), make_stack(f"{BASE} + pod(group=1, window=2, first=1, share={share})", 3)
    alone.load_state_dict(plain.state_dict())
    close(alone(x), plain(x))
    assert alone.cost.cache_bytes(50) == plain.cost.cache_bytes(50)


def test_nothing_near_is_sharing_of_keys_or_of_weights():
    x, other = batch(), batch()
    leader, follower = pair("window=0, first=0, share=keys")
    q, _, v = projected(follower, other)
    k = projected(leader, x)[1]
    a = (q @ k.transpose(-1, -2) * WIDTH**-0.5).masked_fill(~triangle(), -torch.inf).softmax(-1)
    close(both(leader, follower, x, other), join(a @ v, follower.project.o_proj))
    leader, follower = pair("window=0, first=0, share=scores")
    lender, taker = make(BASE, site=Site(0, 2, lends=True)), make(BASE, site=Site(1, 2, attn_source=0))
    lender.load_state_dict(leader.state_dict())
    taker.load_state_dict({name: follower.state_dict()[name] for name in taker.state_dict()})
    close(both(leader, follower, x, other), both(lender, taker, x, other))


@pytest.mark.parametrize("share", ["scores", "keys"])
def test_nothing_near_decodes_too(share):
    stack, x = make_stack(f"{BASE} + pod(window=0, first=0, share={share})", 2), batch()
    for block in (1, 4):
        close(decoded(stack, x, block), stack(x), 1e-9)


def test_both_kinds_agree_where_queries_do():
    x = batch()
    answers = []
    for share in ("scores", "keys"):
        leader, follower = pair(f"window=2, first=1, share={share}")
        follower.project.q_proj.load_state_dict(leader.project.q_proj.state_dict())
        answers.append(both(leader, follower, x))
        differ(both(leader, pair(f"window=2, first=1, share={share}")[1], x), answers[-1])
    close(*answers)


@pytest.mark.parametrize("share", ["scores", "keys"])
def test_which_keys_count_where(share):
    """The follower's keys move near logits of their head alone, the leader's move distant ones."""
    window, first, x = 2, 1, batch()
    leader, follower = pair(f"window={window}, first={first}, share={share}")
    follower.project.o_proj.weight.data.copy_(torch.eye(DIM))
    base, at = both(leader, follower, x), TOKENS - 1
    follower.project.k_proj.weight.data[WIDTH:] += 1.0  # key head 1, read by query heads 2 and 3
    moved = (both(leader, follower, x) - base).unflatten(-1, (HEADS, WIDTH)).abs().amax(-1)
    assert (moved[..., :2] == 0).all() and (moved[:, 1:, 2:] > 0).all()
    leader.project.k_proj.weight.data += 1.0
    after = both(leader, follower, x)
    assert not torch.equal(after[:, at], base[:, at])
    leader.project.k_proj.weight.data += 1.0
    close(both(leader, follower, x)[:, : window + first], after[:, : window + first])  # nothing distant yet
    differ(both(leader, follower, x)[:, window + first :], after[:, window + first :], 1e-6)


@pytest.mark.parametrize(("share", "queries"), [("scores", True), ("keys", False)])
def test_the_leader_learns_from_its_follower(share, queries):
    leader, follower = pair(f"window=2, first=1, share={share}")
    both(leader, follower, batch()).pow(2).sum().backward()
    assert leader.project.k_proj.weight.grad.abs().sum() > 0 and leader.project.v_proj.weight.grad is None
    assert (leader.project.q_proj.weight.grad is not None) == queries
    assert follower.project.k_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("share", ["scores", "keys"])
def test_leaving_distant_tokens_out(share):
    x, window, first = batch(), 2, 1
    leader, follower = pair(f"window={window}, first={first}, share={share}")
    follower.project.o_proj.weight.data.copy_(torch.eye(DIM))
    whole = both(leader, follower, x)
    s, v = logits(leader, follower, x, window, first, share), projected(follower, x)[2]
    far = near_and_far(window, first)[1]
    lost = (s.softmax(-1) * far).sum(-1)
    largest = v.norm(dim=-1).amax()
    kept = twin(follower, f"{BASE} + pod(window={window}, first={first}, share={share}, skip=1e-30)")
    close(both(leader, kept, x), whole)
    everywhere = twin(follower, f"{BASE} + pod(window={window}, first={first}, share={share}, skip=1.0)")
    nearby = both(leader, everywhere, x)
    close(nearby, twin(follower, f"{BASE} + window({window}, first={first})")(x))
    error = (nearby - whole).unflatten(-1, (HEADS, WIDTH)).norm(dim=-1).transpose(1, 2)
    assert (error <= 2 * lost * largest + 1e-12).all() and error.max() > 1e-3
    some = lost[lost > 0].median().item() * (1 + 1e-9)
    half = both(leader, twin(follower, f"{BASE} + pod(window={window}, first={first}, share={share}, skip={some})"), x)
    mixed = torch.where(
        (lost < some).transpose(1, 2)[..., None], *(y.unflatten(-1, (HEADS, -1)) for y in (nearby, whole))
    )
    close(half, mixed.flatten(2))
    differ(half, whole, 1e-6), differ(half, nearby, 1e-6)


def rows(cache, site):
    """The rows held, without spare room."""
    return {name: torch.cat(growing.kept(), 2) for name, growing in cache.site(site).growing.items()}


def test_the_rows_of_the_published_example():
    """One first token, a window of two: of five tokens a follower holds the keys 1, 4, 5, of six 1, 5, 6."""
    (leader, follower), x, cache, held = pair("window=2, first=1"), batch(6), Cache(), []
    with torch.no_grad():
        for token in x.split(1, 1):
            links = Links()
            leader(token, cache=cache, links=links)
            follower(token, cache=cache, links=links)
            held.append({name: row.clone() for name, row in rows(cache, 1).items()})
            assert held[-1]["v"].shape[2] == len(held) == rows(cache, 0)["k"].shape[2]
    keys = rope(heads_of(follower.project.k_proj(x), KV))
    assert [each["k"].shape[2] for each in held] == [1, 2, 3, 3, 3, 3]
    close(held[4]["k"], keys[:, :, [0, 3, 4]])
    close(held[5]["k"], keys[:, :, [0, 4, 5]])


@pytest.mark.parametrize(("window", "first"), [(3, 1), (2, 0), (0, 2), (0, 0), (20, 4)])
@pytest.mark.parametrize("block", [1, 5])
def test_cache_is_that_of_the_formula(window, first, block):
    stack, tokens = make_stack(f"{BASE} + pod(group=3, window={window}, first={first})", 5), 11
    x, cache = batch(tokens, size=1), Cache()
    with torch.no_grad():
        for part in x.split(block, 1):
            stack(part, cache=cache)
    leaders, followers = 2, 3
    numbers = leaders * 2 * tokens + followers * (tokens + min(tokens, window + first))
    assert cache.bytes() == KV * WIDTH * numbers * 8 == stack.cost.cache_bytes(tokens, 8)


@pytest.mark.parametrize(("share", "first"), [("scores", 2), ("keys", 2), ("scores", 0)])
def test_rows_that_are_gone_from_storage(share, first):
    """The room for a follower's keys does not grow with the tokens, and what is read is the full pass."""
    stack, x, cache = (
        make_stack(f"{BASE} + pod(window=4, first={first}, share={share})", 2),
        batch(240, size=3),
        Cache(),
    )
    valid = torch.arange(240) >= torch.tensor([[0], [5], [1]])
    place = (valid.long().cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        steps = [
            stack(x[:, cut], mask=valid[:, cut], positions=place[:, cut], cache=cache)
            for cut in (slice(at, at + 2) for at in range(0, 240, 2))
        ]
        close(torch.cat(steps, 1)[valid], stack(x, mask=valid)[valid], 1e-9)
    store = cache.site(1).growing
    assert store["k"].lost > 100 and store["k"].buffer.shape[2] < 180 and store["v"].lost == 0


def test_the_saving_tends_to_half_the_share_of_followers():
    spec, layers = Spec.parse("gqa(kv_heads=2) + pod(group=4)"), 8
    plain = layers * Spec.parse(BASE).cost(DIM, HEADS).cache_bytes(10**7)
    shared = sum(spec.cost(DIM, HEADS, Site(layer, layers)).cache_bytes(10**7) for layer in range(layers))
    assert 1 - shared / plain == pytest.approx(6 / 8 / 2, abs=1e-3)


@pytest.mark.parametrize("share", ["scores", "keys"])
@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_where_the_first_token_becomes_distant(tokens, share):
    """window + first = 4 tokens are near; the fifth makes one of them distant."""
    stack, x = make_stack(f"{BASE} + pod(window=3, first=1, share={share})", 2), batch(tokens)
    close(decoded(stack, x, 1), stack(x))
    wide = make_stack(f"{BASE} + pod(window=9, first=1, share={share})", 2)
    wide.load_state_dict(stack.state_dict())
    same = torch.allclose(wide(x), stack(x), atol=1e-11)
    assert same == (tokens <= 4)


def test_prefill_in_chunks_larger_than_the_window():
    stack, x = make_stack(f"{BASE} + pod(window=2, first=1)", 3), batch(23)
    close(decoded(stack, x, 7), stack(x), 1e-9)


def test_goes_back_forks_and_reorders():
    stack, x, cache = make_stack(f"{BASE} + pod(window=3, first=0)", 2), batch(11), Cache()
    with torch.no_grad():
        want = stack(x)
        stack(x[:, :7], cache=cache)
        stack(x[:, 2:5], cache=cache)
        cache.rollback(3)
        other = cache.fork(torch.tensor([1, 0]))
        close(stack(x[:, 7:], cache=cache), want[:, 7:], 1e-9)
        close(stack(x[:, 7:].flip(0), cache=other), want[:, 7:].flip(0), 1e-9)


@pytest.mark.parametrize("body", BODIES)
def test_a_model_saves_loads_and_generates(tmp_path, body):
    one = model({"specs": f"{BASE} + pod(window=3, first=1)"}, body)
    assert "pod" in one.config.specs[0]
    one.save_pretrained(tmp_path)
    two = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    inputs = prompts()
    assert two.config.specs == one.config.specs
    assert torch.equal(two(**inputs).logits, one(**inputs).logits)
    assert torch.equal(greedy(two, inputs), greedy(one, inputs, use_cache=False))


def test_parameters_are_those_of_the_projection():
    spec = Spec.parse(f"{BASE} + pod")
    for layer in range(2):
        site = Site(layer, 2)
        want = Spec.parse(BASE).cost(DIM, HEADS).parameters
        assert spec.cost(DIM, HEADS, site).parameters == want
        assert sum(p.numel() for p in Attention(spec, DIM, HEADS, site=site).parameters()) == want


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gqa + pod(group=0)", "pod: group=0, window=4096 and first=16; group is 1 or more"),
        ("gqa + pod(window=-1)", "window=-1"),
        ("gqa + pod(skip=1.5)", "pod: skip=1.5; a share of the weights, 0 to 1"),
        ("gqa + pod(leader=2)", "pod: leader=2 of layer 1; it may be 0 to 1"),
        ("mla(view=expanded) + pod", "'pod' needs 'cached heads' .*, which 'mla' breaks"),
        ("gqa + alibi + pod", "'pod' needs 'bare scores' .*, which 'alibi' breaks"),
        ("gqa + window(3) + pod", "'pod' needs 'bare scores' .*, which 'window' breaks"),
        ("gqa + pod + window(3)", "'window' breaks 'bare scores' .*, which 'pod' relies on"),
        ("gqa + pod + talking_heads", "'talking_heads' needs 'one map' .*, which 'pod' breaks"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(OptionError, match=said):
        Attention(spec, DIM, HEADS, site=Site(1, 2))


def test_layers_that_do_not_fit_say_so():
    with pytest.raises(ValueError, match="pod in layer 1 follows layer 0, of which links hold no keys"):
        pair("window=2")[1](batch())
    links = Links()
    pair("window=2", "gqa")[0](batch(), links=links)
    said = "layer 0 has 4 heads over 4 key heads of width 6, layer 1 has 4 heads over 2 key heads of width 6"
    with pytest.raises(ValueError, match=said):
        pair("window=2")[1](batch(), links=links)
    assert pair("window=2")[1].explain(1).kernel == "flash_cpu"
    with pytest.raises(ValueError, match="layer 1 keeps 18 keys, older ones are another layer's"):
        make_stack([f"{BASE} + pod(window=2)"] * 2 + [BASE], 3, kv_source=[None, None, 1])
    with pytest.raises(ValueError, match="'pod' needs 'own rows'"):
        make_stack(f"{BASE} + pod", 2, kv_source=[None, 0])


def test_how_alike_layers_attend_to_distant_tokens():
    """By brute force: 1 - JS / log 2 of the weights of distant tokens, row by row; and the heads apart."""
    of, ids, near, first = model({"specs": BASE}), torch.randint(3, 61, (1, 10)), 3, 1
    table, every = distant(of, ids, near, first), torch.stack(_maps(of, ids[0])).detach()
    assert table.shape == (4, 4, 4) and torch.allclose(table, table.transpose(0, 1), atol=1e-5)
    assert (table >= -1e-6).all() and (table <= 1 + 1e-6).all()

    def divergence(a, b):
        return sum(p * math.log(2 * p / (p + q)) for p, q in zip(a, b, strict=True)) / 2

    for one, other, head in ((0, 1, 0), (1, 3, 2), (2, 2, 1)):
        found = []
        for i in range(near + first, 10):
            a, b = (every[layer, head, i, first : i - near + 1].double() for layer in (one, other))
            a, b = (a / a.sum()).tolist(), (b / b.sum()).tolist()
            found.append(1 - (divergence(a, b) + divergence(b, a)) / math.log(2))
        assert table[one, other, head].item() == pytest.approx(sum(found) / len(found), abs=1e-5)
    with pytest.raises(OptionError, match="windows of 10 tokens have none that is distant; at least 13"):
        distant(of, ids, 8, 4)


def test_groups():
    """A block goes on while layers are alike enough to its leader; heads are grouped by themselves."""
    torch.manual_seed(0)
    alike = torch.rand(6, 6, 3)
    alike = (alike + alike.transpose(0, 1)) / 2
    alike[range(6), range(6)] = 1.0
    assert groups(alike[..., 0], 1.1) == [*range(6)] and groups(alike[..., 0], 0.0) == [0] * 6
    order = [2, 0, 1]
    assert [groups(alike[..., h], 0.5) for h in order] == [groups(alike[..., order][..., h], 0.5) for h in range(3)]
    alike[2:4, 2:4] = alike[4:, 4:] = 1.0
    alike[2:4, 4:] = alike[4:, 2:4] = alike[1, 2] = alike[2, 1] = alike[0, 1] = alike[0, 2] = 0.1
    assert groups(alike[..., 0], 0.9) == [0, 1, 2, 2, 4, 4]
    assert groups(torch.tensor([[1.0, 0.9, 0.1], [0.9, 1.0, 0.9], [0.1, 0.9, 1.0]]), 0.9) == [0, 0, 2]


def test_a_trained_model_takes_its_groups():
    """Equal layers on an equal stream lead each other, and their weights load into the model that shares."""
    of, ids = model({"specs": BASE}), torch.randint(3, 61, (2, 12))
    layers = of.attentions
    layers[1].load_state_dict(layers[0].state_dict())
    for parameter in (layers[0].project.o_proj.weight, *of.model.decoder.stack.blocks[0].ffn.parameters()):
        parameter.data.zero_()  # layer 1 reads what layer 0 does
    leaders = groups(distant(of, ids, 3, 1).mean(-1), 0.999)
    assert leaders[:2] == [0, 0]
    sharing = model({"specs": [f"{BASE} + pod(leader={leader}, window=3, first=1)" for leader in leaders]})
    sharing.load_state_dict(of.state_dict())
    torch.testing.assert_close(sharing(ids).logits, of(ids).logits, atol=1e-5, rtol=1e-5)
