"""LRAgent, arXiv 2602.01053: several low-rank agents, one base cache."""

import copy

import pytest
import torch
from tests.stack import tiny

import manyheads as mh
from manyheads.core.part import OptionError
from manyheads.core.prefix import PrefixCache
from manyheads.stack.agents import AgentCache, Agents

DIM, HEADS, RANK, ALPHA = 24, 4, 3, 6.0
X = torch.randn(2, 7, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make(spec="gqa(kv_heads=2)", agents=3, shared_a=False, **options):
    """A layer, the same without agents, and its agents with weights drawn."""
    torch.manual_seed(0)
    layer = mh.Attention(spec, DIM, HEADS, **options).double().eval().requires_grad_(False)
    plain = copy.deepcopy(layer)
    found = Agents(layer, agents, rank=RANK, alpha=ALPHA, shared_a=shared_a)
    return layer, plain, draw(found)


def draw(found):
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3).requires_grad_(False)
    return found


def merged(plain, project, agent):
    """The layer with one agent's adapters in its weights."""
    own = copy.deepcopy(plain)
    a = 0 if len(project.v_a) == 1 else agent
    own.project.q_proj.weight += ALPHA / RANK * project.q_b[agent] @ project.q_a[agent]
    own.project.v_proj.weight += ALPHA / RANK * project.v_b[agent] @ project.v_a[a]
    return own


def same(got, want):
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


SPECS = ["gqa(kv_heads=1)", "gqa(kv_heads=2)", "gqa", "gqa(kv_heads=2) + qk-norm + moh(top=2)", "gqa + window(size=3)"]


@pytest.mark.parametrize("shared_a", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_an_agent_is_its_adapters_in_the_weights_whole_and_token_by_token(spec, shared_a):
    layer, plain, agents = make(spec, shared_a=shared_a)
    for agent in range(3):
        want = merged(plain, agents.projects[0], agent)(X)
        with agents.on(agent):
            same(layer(X), want)
            cache = mh.Cache()
            same(torch.cat([layer(X[:, at : at + 1], cache=cache) for at in range(7)], 1), want)
    same(layer(X), plain(X))  # nobody at work
    with agents.on([2, 0]):
        got = layer(X)
    same(got, torch.stack([merged(plain, agents.projects[0], a)(X[i : i + 1])[0] for i, a in enumerate((2, 0))]))
    agents.remove()
    cache = mh.Cache()
    same(layer(X, cache=cache), plain(X))
    assert layer.state_dict().keys() == plain.state_dict().keys() and cache.site(0).growing.keys() == {"k", "v"}


def test_one_call_over_wider_values_is_the_two_terms():
    layer, plain, agents = make()
    project = agents.projects[0]
    with agents.on(1):
        got = layer(X)
    axis, turn = mh.Axis(7, 0), plain.positions[0].turn
    q = (X @ (plain.project.q_proj.weight + ALPHA / RANK * project.q_b[1] @ project.q_a[1]).T).unflatten(-1, (4, 6))
    k, v = (getattr(plain.project, f"{n}_proj")(X).unflatten(-1, (2, 6)).transpose(1, 2) for n in "kv")
    scores = turn(q.transpose(1, 2), axis) @ turn(k, axis).repeat_interleave(2, 1).mT / 6**0.5
    p = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    c = (X @ project.v_a[1].T)[:, None]
    b = project.v_b[1].view(2, 6, RANK).repeat_interleave(2, 0)
    o = p @ v.repeat_interleave(2, 1) + (p @ c) @ b.mT * ALPHA / RANK
    same(got, plain.project.o_proj(o.transpose(1, 2).flatten(2)))


def test_first_values_change_nothing_and_the_scale_is_linear():
    layer, plain, _ = make()
    with Agents(mh.Attention("gqa", DIM, HEADS), 2).on(1):
        pass
    torch.manual_seed(0)
    fresh = copy.deepcopy(plain)
    agents = Agents(fresh, 2)
    with agents.on(1):
        same(fresh(X), plain(X))
    layer, plain, agents = make()
    agents.projects[0].q_b.zero_()
    gaps = []
    for scale in (1.0, 2.0, -1.0):
        agents.projects[0].scale = scale
        with agents.on(0):
            gaps.append(layer(X) - plain(X))
    same(gaps[1], 2 * gaps[0])
    same(gaps[2], -gaps[0])


def models(shared_a, alike=False, agents=3):
    model = tiny.model("gqa", "own").double().requires_grad_(False)
    found = draw(Agents(model, agents, rank=RANK, shared_a=shared_a))
    if alike:
        for parameter in found.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    return model, found


IDS = torch.randint(tiny.VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))


def run(model, agents, agent, cache, first, last):
    with agents.on(agent):
        return model(IDS[:, first:last], cache=cache, position_ids=torch.arange(first, last)[None]).logits


def test_agents_share_keys_and_values_and_each_keeps_its_low_rank_rows():
    """Alike agents get what each would get alone; else the first layer's rows are exact and those above are not."""
    for alike in (True, False):
        model, agents = models(shared_a=False, alike=alike)
        base = mh.Cache()
        one, two = AgentCache(base), AgentCache(base)
        run(model, agents, 0, one, 0, 8)
        run(model, agents, 1, two, 0, 5)  # reads what the first has read, in pieces
        got = run(model, agents, 1, two, 5, 12)[:, -4:]
        last = run(model, agents, 0, one, 8, 12)
        alone = [mh.Cache(), mh.Cache()]
        want = [run(model, agents, agent, alone[agent], 0, 12) for agent in (0, 1)]
        assert base.length() == one.length() == two.length() == 12
        if alike:
            same(got, want[1][:, -4:])
            same(last, want[0][:, -4:])
        for name in "kv":
            shared, own = (cache.site(0).growing[name].rows() for cache in (base, alone[1]))
            same(shared, own)
        assert alike == torch.allclose(got, want[1][:, -4:])
        for agent, cache in enumerate((one, two)):
            same(cache.site(0).growing["low"].rows(), alone[agent].site(0).growing["low"].rows())


@pytest.mark.parametrize("agent", [0, 2])
def test_one_agent_alone_in_a_shared_cache_decodes_as_ever(agent):
    model, agents = models(shared_a=False)
    want, cache = run(model, agents, agent, mh.Cache(), 0, 12), AgentCache()
    same(torch.cat([run(model, agents, agent, cache, at, at + 3) for at in range(0, 12, 3)], 1), want)


def test_with_one_a_nothing_is_read_twice():
    """What one has read, others go on from side by side, and read it once."""
    layer, plain, agents = make(shared_a=True)
    root = PrefixCache()
    with agents.on(0):
        layer(X[:1, :4], cache=root)
    low = root.site(0).growing["low"].rows().clone()
    with agents.on(1):
        other = mh.Cache()
        layer(X[:1, :4], cache=other)
    same(other.site(0).growing["low"].rows(), low)
    x = torch.cat([X[:1, :4].expand(2, -1, -1), X[:, 4:]], 1)
    with agents.on([1, 2]):
        got = layer(X[:, 4:], cache=root.branch(2))
    for index, agent in enumerate((1, 2)):
        same(got[index], merged(plain, agents.projects[0], agent)(x)[index, 4:])


def test_bytes_for_each_way_of_sharing():
    g, d, n = 2, 8, 12
    layers, size = 4, 8
    model, agents = models(shared_a=False)
    apart = [mh.Cache() for _ in range(3)]
    base = mh.Cache()
    each = [AgentCache(base) for _ in range(3)]
    for agent in range(3):
        run(model, agents, agent, apart[agent], 0, n)
        run(model, agents, agent, each[agent], 0, n)
    row = n * layers * size
    assert sum(cache.bytes() for cache in apart) == row * 3 * (2 * g * d + RANK)
    assert base.bytes() + sum(cache.bytes() for cache in each) == row * (2 * g * d + 3 * RANK)
    model, agents = models(shared_a=True)
    one = mh.Cache()
    run(model, agents, 0, one, 0, 6)
    run(model, agents, 2, one, 6, n)
    assert one.bytes() == row * (2 * g * d + RANK)


def test_gradients_reach_the_agents_at_work_alone():
    layer, _, agents = make()
    for parameter in agents.parameters():
        parameter.requires_grad_()
    with agents.on([0, 2]):
        layer(X).pow(2).sum().backward()
    for parameter in agents.parameters():
        assert parameter.grad[[0, 2]].abs().amax((1, 2)).gt(0).all() and not parameter.grad[1].any()
    assert len({id(p) for p in layer.parameters()}) == len([*layer.parameters()])
    assert (
        layer.state_dict().keys() >= {"project.base.o_proj.weight"}
        and "project.o_proj.weight" not in layer.state_dict()
    )


def test_what_cannot_be_shared_is_refused():
    for spec, says in (
        ("mla", "not what it caches"), ("gqa + talking_heads", "breaks 'softmax'"), ("retnet", "breaks"),
        ("gqa(kv_heads=2) + kha", "changes values"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=says):
            Agents(mh.Attention(spec, DIM, HEADS), 2)
    with pytest.raises(OptionError, match="agents=0 and rank=8"):
        Agents(mh.Attention("gqa", DIM, HEADS), 0)
    with pytest.raises(OptionError, match="no attention layer of ours"):
        Agents(torch.nn.Linear(3, 3), 2)
    layer, plain, agents = make()
    with pytest.raises(OptionError, match="has agents already"):
        Agents(layer, 2)
    for wrong in (3, -1, [0, 5], []):
        with pytest.raises(ValueError, match="there is no agent"), agents.on(wrong):
            pass
    with pytest.raises(ValueError, match="3 agents for a batch of 2"), agents.on([0, 1, 2]):
        layer(X)
    with pytest.raises(ValueError, match="writes k, v"):
        plain(X, cache=AgentCache())
    window, _, of = make("gqa + window(size=3)")
    with pytest.raises(ValueError, match="forgets rows"), of.on(0):
        window(X, cache=AgentCache())
    foreign = AgentCache()
    with agents.on(0):
        layer(X, cache=foreign)
        foreign.base = mh.Cache()
        with pytest.raises(ValueError, match="has read 7 tokens, the cache that it shares 0"):
            layer(X, cache=foreign)
    other = make("gqa(kv_heads=4)")[0]
    base = mh.Cache()
    with agents.on(0):
        layer(X, cache=AgentCache(base))
    with pytest.raises(ValueError, match="2 x 6 numbers of 'k'"):
        other(torch.cat([X, X], 1), cache=AgentCache(base))
    with pytest.raises(ValueError, match="no copy of it is independent"):
        foreign.fork(torch.tensor([0]))
