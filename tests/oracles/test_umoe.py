"""Oracles of `umoe`, the attention part and the feed-forward that has the same experts."""

import copy

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, decoded, make, rope, twin
from tests.oracles.reference import weights as softmax
from tests.oracles.stacks import hold_to_the_laws
from torch import nn

from manyheads import Attention, Cache, Links, OptionError, Site, Spec, SpecError
from manyheads.core.feed import Feed
from manyheads.core.router import Chooser
from manyheads.stack import Decoder, Stack
from manyheads.testing.feeds import run

N, RANK, DK, HIDDEN = 5, 3, 8, 7
SIZES = f"experts={N}, hidden={HIDDEN}, fixed=1"
LINE = f"umoe({SIZES}, top=2, qk_dim={DK}, q_rank={RANK})"


def expert(bank, index, u):
    """E(u), written out."""
    return torch.nn.functional.silu(u @ bank.up_proj[index].T) @ bank.down_proj[index].T


def dense(layer, x):
    """Every expert on its own mixture, with zero gates for those that are not chosen."""
    p = layer.project
    chance = p.router.score(x).softmax(-1)
    gates = chance * torch.zeros_like(chance).scatter(-1, chance.topk(2, -1).indices, 1.0)
    k, scale = rope(p.k_proj(x)[:, None]), DK**-0.5
    q0 = rope(p.fixed_q_proj(x)[:, None])
    y = expert(p.fixed, 0, (softmax(q0, k, scale) @ x[:, None])[:, 0])
    for i in range(N):
        q = rope((p.q_proj(x) + x @ p.q_down[i].T @ p.q_up[i].T)[:, None])
        y = y + gates[..., [i]] * expert(p.experts, i, (softmax(q, k, scale) @ x[:, None])[:, 0])
    return y


def test_a_loop_over_experts():
    layer, x = make(LINE), batch()
    close(layer(x), dense(layer, x))


def test_experts_without_act_are_heads(monkeypatch):
    """All of them with weight one: W_up^h maps values and W_down^h the outputs, and mixing may come before or after."""
    monkeypatch.setattr(Chooser, "gates", lambda self, routing: torch.ones_like(routing.gates()))
    layer, x = make(f"umoe(experts={HEADS}, top={HEADS}, hidden=6, fixed=0, act=none, qk_dim=6, q_rank={DIM})"), batch()
    p = layer.project
    k = rope(p.k_proj(x)[:, None])
    q = rope(torch.stack([x @ (p.q_proj.weight + up @ down).T for down, up in zip(p.q_down, p.q_up, strict=True)], 1))
    v = torch.einsum("btD,hmD->bhtm", x, p.experts.up_proj)
    o = softmax(q, k, 6**-0.5) @ v
    close(layer(x), torch.einsum("bhtm,hDm->btD", o, p.experts.down_proj))


def feed_of(layer):
    """The feed-forward mixture with the attention's router and experts."""
    feed = Feed.parse(f"umoe({SIZES}, top=2)").build(DIM, None, Site()).double().eval()
    for name in ("router", "experts", "fixed"):
        getattr(feed, name).load_state_dict(getattr(layer.project, name).state_dict())
    return feed


def test_a_token_that_sees_itself_alone_meets_a_feed_forward():
    layer, x = make(LINE), batch()
    feed = feed_of(layer)
    close(layer(x[:, :1]), run(feed, x[:, :1]))
    diagonal = torch.eye(TOKENS, dtype=torch.bool)[None, None]
    close(layer(x, mask=diagonal), run(feed, x))


def test_no_routed_experts_are_one_head_and_a_feed_forward():
    layer, x = make(f"umoe(top=0, hidden={HIDDEN}, qk_dim={DK})"), batch()
    p = layer.project
    assert p.router is None and p.q_proj is None and not hasattr(p, "experts")
    mixed = softmax(rope(p.fixed_q_proj(x)[:, None]), rope(p.k_proj(x)[:, None]), DK**-0.5) @ x[:, None]
    close(layer(x), expert(p.fixed, 0, mixed[:, 0]))


def test_equal_queries_are_one_map():
    layer, x = make(LINE), batch()
    with torch.no_grad():
        layer.project.q_up.zero_()
        layer.project.fixed_q_proj.weight.copy_(layer.project.q_proj.weight)
    close(twin(layer, LINE.replace(f"q_rank={RANK}", "maps=one"))(x), layer(x))


def test_decode_and_cache():
    """dk + D numbers a token."""
    layer, x, cache = make(LINE), batch(size=1), Cache()
    close(decoded(layer, x, 4, cache), layer(x))
    assert cache.bytes() == TOKENS * (DK + DIM) * 8


def test_permuting_experts():
    layer, x, order = make(LINE), batch(), torch.randperm(N)
    names = ("q_down", "q_up", "router.score.weight", "experts.up_proj", "experts.down_proj")
    moved = {f"project.{name}": layer.project.get_parameter(name).detach()[order] for name in names}
    close(twin(layer, LINE, **moved)(x), layer(x))


def test_loss_is_within_sequences():
    layer, x, links = make(LINE), batch(), Links()
    layer.train()(x, links=links)
    routing, every = layer.project.router(x), torch.ones(1, TOKENS, dtype=torch.bool)
    each = [type(routing)(*(part[b : b + 1] for part in routing)).balance(every) / 2 for b in range(2)]
    close(links.aux["0.umoe"], torch.stack(each).mean())


def test_padding_gets_nothing():
    layer, x = make(LINE), batch()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    assert not layer(x, mask=valid)[~valid].any()


def test_cost():
    """The authors' base size; both routers and the experts once."""
    d, dk, m, n, rank = 768, 192, 192, 128, 16
    attention, feed = Spec.parse("umoe").cost(d, 12), Feed.parse("umoe").cost(d, None, Site())
    both = attention + feed
    own = n * 2 * d * m + 2 * d * n + d * dk * 3 + n * rank * (d + dk)
    assert both.parameters == own + 2 * (2 * d * m)  # a fixed expert each
    assert attention.cache_floats == dk + d
    assert attention.pair_flops == 4 * 2 * (dk + d)
    assert both.active == both.parameters - (n - 3 - 15) * 2 * d * m - (n - 3) * rank * (d + dk)
    work = d * dk * 3 + d * n + 3 * rank * (d + dk) + 4 * 2 * d * m
    assert attention.token_flops == 2 * work
    assert feed.token_flops == 2 * (d * n + 16 * 2 * d * m)


# --- in a stack


def stack(layers=2, spec=LINE, ffn=f"umoe({SIZES}, top=3)", **options):
    torch.manual_seed(0)
    made = Stack(spec, DIM, HEADS, layers, ffn=ffn, **options).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


def test_attention_and_feed_forward_have_the_same_experts():
    made, x = stack(), batch()
    for layer, block in enumerate(made.blocks):
        assert block.attention.project.experts is block.ffn.experts is made.bank[f"umoe-{layer}"]
        assert block.attention.project.fixed is not block.ffn.fixed
    assert made.blocks[0].ffn.experts is not made.blocks[1].ffn.experts
    counted, norms = sum(p.numel() for p in made.parameters()), 4 * DIM
    assert counted - norms == (made.cost + made.ffn_cost).parameters
    both = Stack(LINE.replace("fixed=1", "fixed=1, shared_fixed=true"), DIM, HEADS, 2,
                 ffn=f"umoe({SIZES}, top=3, shared_fixed=true)")  # fmt: skip
    assert both.blocks[0].attention.project.fixed is both.blocks[0].ffn.fixed
    assert sum(p.numel() for p in both.parameters()) - norms == (both.cost + both.ffn_cost).parameters
    made(x)


def test_gradients_come_from_both():
    """That of the one bank is the sum of those of two banks with the same weights."""
    made, x = stack(1), batch()
    bank, ffn = made.bank["umoe-0"], made.blocks[0].ffn
    made(x).pow(2).sum().backward()
    whole = bank.up_proj.grad.clone()
    made.zero_grad()
    own = copy.deepcopy(bank)
    object.__setattr__(ffn, "experts", own)
    made(x).pow(2).sum().backward()
    assert bank.up_proj.grad.any() and own.up_proj.grad.any()
    close(bank.up_proj.grad + own.up_proj.grad, whole, 1e-9)


def test_a_decoder_trains_decodes_and_saves():
    torch.manual_seed(0)
    net = Decoder(31, LINE, DIM, HEADS, 2, ffn=[f"umoe({SIZES}, top=3)", "swiglu"])
    optimizer, ids = torch.optim.AdamW(net.parameters(), lr=1e-2), torch.randint(31, (4, 12))
    losses = []
    for _ in range(15):
        links = Links()
        logits = net(ids[:, :-1], links=links)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        optimizer.zero_grad()
        (losses[-1] + 0.001 * sum(links.aux.values())).backward()
        optimizer.step()
    assert sorted(links.aux) == ["0.umoe", "0.umoe_ffn", "1.umoe"] and losses[-1] < 0.7 * losses[0]
    net.eval()
    cache = Cache()
    with torch.no_grad():
        steps = [net(part, cache=cache) for part in ids.split(3, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), net(ids), atol=1e-4, rtol=1e-4)
    other = Decoder(31, LINE, DIM, HEADS, 2, ffn=[f"umoe({SIZES}, top=3)", "swiglu"]).eval()
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(ids), net(ids))
    assert sum("experts.up_proj" in name or "bank" in name for name in net.state_dict()) == 4


def test_layers_that_run_twice_keep_their_experts():
    hold_to_the_laws(LINE, 2, loops=2)


def test_first_weights_in_a_stack():
    made = Stack(LINE, DIM, HEADS, 2, ffn=f"umoe({SIZES}, top=3)", std=0.1)
    experts = made.bank["umoe-0"]
    assert experts.up_proj.std().item() == pytest.approx(0.1, rel=0.1)
    assert experts.down_proj.std().item() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize(
    ("ffn", "words"),
    [
        ("umoe(experts=6, hidden=7, top=3)", "'umoe-0' is shared with shapes"),
        (f"umoe({SIZES}, act=gelu, top=3)", "'umoe-0' is shared with act=silu; another wants gelu"),
    ],
)
def test_other_numbers_are_no_same_experts(ffn, words):
    with pytest.raises(OptionError, match=words):
        stack(ffn=ffn)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("experts=4, top=5", "umoe: top=5 of experts=4; top may be 0 to 4"),
        ("top=0, fixed=0", "top may be 1 to 128"),
        ("hidden=0", "hidden=0"),
        ("q_rank=0", "q_rank=0"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(OptionError, match=words):
        Attention(f"umoe({options})", DIM, HEADS)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("moh(top=2)", "'umoe' and 'moh' both take the slot 'router'"),
        ("talking_heads", "'talking_heads' breaks 'one map'"),
        ("alibi", "'alibi' breaks 'alike heads'"),
    ],
)
def test_what_does_not_go_together(other, words):
    with pytest.raises(SpecError, match=words):
        Attention(f"umoe + {other}", DIM, HEADS)
    with pytest.raises(SpecError, match=r"'umoe' needs 'self'.*moa"):
        Attention("umoe", DIM, HEADS, site=Site(cross=True, causal=False))
