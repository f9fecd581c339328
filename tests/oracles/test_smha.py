"""Oracles of `smha`."""

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
)  # fmt: skip

from manyheads import Attention, Cache, Links, OptionError, Site, SpecError

WIDTH = 6


def joined(layer, x):
    """Which heads a token joined, `[B, G, T]`."""
    chance = layer.project.router.score(x).softmax(-1)
    return torch.zeros_like(chance).scatter(-1, chance.topk(layer.project.top, -1).indices, 1).bool().transpose(1, 2)


def rows(layer, x):
    """Rotated queries and keys, and values, `[B, H, T, d]`."""
    p = layer.project
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, p.kv_heads), (p.v_proj, p.kv_heads)))
    k, v = (each.repeat_interleave(HEADS // p.kv_heads, 1) for each in (rope(k), v))
    return rope(q), k, v


def outputs(layer, x):
    """Head outputs of a dense brute force with a mask for each head."""
    q, k, v = rows(layer, x)
    m = joined(layer, x).repeat_interleave(HEADS // layer.project.kv_heads, 1)
    seen = m[..., None] & m[:, :, None] & triangle()
    return weights(q, k, q.shape[-1] ** -0.5, seen).nan_to_num() @ v


def steered(layer, heads):
    """Weights, and an input, that send token t to the heads `heads[t]`."""
    score = torch.zeros(layer.project.kv_heads, DIM).double()
    x = batch(len(heads), size=1)
    x[..., : layer.project.kv_heads] = 0
    for t, chosen in enumerate(heads):
        for head in chosen:
            score[head, head] = 1.0
            x[0, t, head] = 10.0
    return twin(layer, str(layer.spec), project__router__score__weight=score), x


@pytest.mark.parametrize("gate", ["none", "scale", "straight"])
@pytest.mark.parametrize("kv", [4, 2])
def test_all_heads_are_multi_head_attention(kv, gate):
    layer, x = make(f"smha(top={kv}, kv_heads={kv}, gate={gate}, bias=qkv)"), batch()
    zero = twin(layer, str(layer.spec), project__router__score__weight=torch.zeros(kv, DIM).double())
    close(zero(x), twin(layer, f"gqa(kv_heads={kv}, bias=qkv)")(x))


def test_all_heads_with_output_biases_are_one_bias():
    """Experts add up: H output biases are their sum."""
    layer, x = make("smha(top=4, bias=qkvo)"), batch()
    bias = layer.project.o_bias.detach().sum(0)
    close(layer(x), twin(layer, "gqa(bias=qkvo)", project__o_proj__bias=bias)(x))


@pytest.mark.parametrize("options", ["top=1", "top=2", "top=3, head_dim=8", "top=1, kv_heads=2"])
def test_masked_brute_force(options):
    layer, x = make(f"smha({options})"), batch()
    close(layer(x), join(outputs(layer, x), layer.project.o_proj))


def test_gather_compute_scatter():
    """Each head by itself on the tokens that joined it, packed, with the positions they had."""
    layer, x = make("smha(top=2)"), batch(12)
    q, k, v = rows(layer, x)
    blocks, y = layer.project.o_proj.weight.unflatten(1, (HEADS, WIDTH)), torch.zeros_like(x)
    for b, members in enumerate(joined(layer, x)):
        for h in range(HEADS):
            at = members[h].nonzero()[:, 0]
            one = weights(q[b : b + 1, h : h + 1, at], k[b : b + 1, h : h + 1, at], WIDTH**-0.5)[0, 0] @ v[b, h, at]
            y[b].index_add_(0, at, one @ blocks[:, h].T)
    close(layer(x), y)


def test_a_head_that_one_token_joined_returns_its_value():
    layer = make("smha(top=1)")
    layer, x = steered(layer, [[0], [0], [3], [0], [1], [0]])
    v = heads_of(layer.project.v_proj(x), HEADS)
    alone = torch.zeros(1, HEADS, 6, WIDTH).double()
    alone[0, 3, 2], alone[0, 1, 4] = v[0, 3, 2], v[0, 1, 4]
    y, at = layer(x), [2, 4]
    close(y[:, at], join(alone, layer.project.o_proj)[:, at])


def test_a_token_gets_nothing_from_heads_it_did_not_join():
    """With no weights behind the heads that it joined its output is exactly zero, so a block leaves its residual."""
    layer, x = steered(make("smha(top=2)"), [[0, 1], [2, 3], [0, 2], [0, 1]])
    w = layer.project.o_proj.weight.detach().clone()
    w[:, : 2 * WIDTH] = 0
    y = twin(layer, str(layer.spec), project__o_proj__weight=w)(x)
    assert (y[0, [0, 3]] == 0).all() and (y[0, [1, 2]] != 0).all()


def test_tokens_of_other_heads_change_nothing():
    layer, x = steered(make("smha(top=1)"), [[0], [1], [0], [1], [0]])
    other = x.clone()
    other[0, [1, 3], HEADS:] += 1  # still of head 1
    close(layer(other)[0, ::2], layer(x)[0, ::2])
    differ(layer(other)[0, 1::2], layer(x)[0, 1::2])


@pytest.mark.parametrize("options", ["top=2", "top=1, gate=scale"])
def test_a_sequence_does_not_depend_on_the_others_nor_on_later_tokens(options):
    """Expert-side choice breaks both: the capacity is the batch's, and ranks depend on what comes later."""
    layer, x = make(f"smha({options})"), batch(size=3)
    full = layer(x)
    for b in range(3):
        close(full[b : b + 1], layer(x[b : b + 1]))
    for t in (1, 4, 7):
        close(layer(x[:, :t]), full[:, :t])
        later = x.clone()
        later[:, t:] = 5 * torch.randn_like(later[:, t:])
        close(layer(later)[:, :t], full[:, :t])


def test_positions_are_those_in_the_sequence():
    """The distance of two members counts the tokens between them that are none."""
    layer = make("smha(top=1)")
    near, x = steered(layer, [[0], [0], [0]])
    far, longer = steered(layer, [[0], [1], [1], [0], [0]])
    longer[0, [0, 3, 4]] = x[0]
    differ(near(x)[0, 2], far(longer)[0, 4])
    still = twin(far, "smha(top=1) + rope(none)")
    close(twin(near, "smha(top=1) + rope(none)")(x)[0, 2], still(longer)[0, 4])


def test_gates():
    layer, x = make("smha(top=2)"), batch()
    chance = layer.project.router.score(x).softmax(-1).transpose(1, 2)[..., None]
    close(twin(layer, "smha(top=2, gate=straight)")(x), layer(x))
    close(
        twin(layer, "smha(top=2, gate=scale)")(x),
        join(HEADS * chance * outputs(layer, x), layer.project.o_proj),
    )


def test_what_reaches_the_router():
    """Nothing of the task without a gate; with `straight`, what a gate of one times s would get."""
    x = batch()

    def slope(layer, loss):
        return torch.autograd.grad(loss, layer.project.router.score.weight, allow_unused=True, retain_graph=True)[0]

    plain, links = make("smha(top=2)").train(), Links()
    y = plain(x, links=links).pow(2).sum()
    assert slope(plain, y) is None and slope(plain, links.aux["0.smha"]).abs().max() > 1e-6
    straight = twin(plain, "smha(top=2, gate=straight)").train()
    chance = straight.project.router.score(x).softmax(-1).transpose(1, 2)[..., None]
    o = outputs(straight, x).detach()
    linear = torch.randn_like(x)
    want = slope(straight, (join(chance * o, straight.project.o_proj) * linear).sum())
    close(slope(straight, (straight(x) * linear).sum()), want)


def test_balance_loss():
    """1 where heads are even, G over top where all tokens go one way; none in evaluation; padding apart."""
    layer, x = make("smha(top=1)"), batch()
    zero = twin(layer, str(layer.spec), project__router__score__weight=torch.zeros(HEADS, DIM).double()).train()
    one, single = steered(layer, [[2]] * 8)

    def loss(of, x, **arguments):
        links = Links()
        of.train()(x, links=links, **arguments)
        return links.aux["0.smha"]

    close(loss(zero, x), torch.tensor(1.0).double())
    single[..., 2] *= 100
    close(loss(one, single), torch.tensor(float(HEADS)).double())
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    other = torch.where(valid[..., None], x, torch.randn_like(x))
    close(loss(layer, x, mask=valid), loss(layer, other, mask=valid))
    links = Links()
    layer.eval()(x, links=links)
    assert not links.aux


def test_permuting_heads():
    layer, x, order = make("smha(top=2, bias=qkvo)"), batch(), torch.randperm(HEADS)
    p = layer.project
    state = {"router__score__weight": p.router.score.weight.detach()[order], "o_bias": p.o_bias.detach()[order]}
    for name in ("q_proj", "k_proj", "v_proj"):
        for what in ("weight", "bias"):
            value = getattr(getattr(p, name), what).detach().unflatten(0, (HEADS, WIDTH))
            state[f"{name}__{what}"] = value[order].flatten(0, 1)
    state["o_proj__weight"] = p.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH))[:, order].flatten(1)
    close(twin(layer, str(layer.spec), **{f"project__{name}": value for name, value in state.items()})(x), layer(x))


@pytest.mark.parametrize("options", ["top=2", "top=1, kv_heads=2, gate=scale", "top=3, bias=qkvo"])
def test_decode(options):
    layer, x = make(f"smha({options})"), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


@pytest.mark.parametrize(
    ("options", "floats"), [("top=2", 2 * 13), ("top=1, kv_heads=2", 13), ("top=4", 4 * 12), ("", 2 * 13)]
)
def test_cost_and_cache_bytes(options, floats):
    """The rows of the heads that a token chose, and their numbers; all rows alone where it chooses all."""
    layer, cache = make(f"smha({options})"), Cache()
    cost, kv = layer.spec.cost(DIM, HEADS), layer.project.kv_heads
    decoded(layer, batch(size=1), 4, cache)
    assert cache.bytes() == TOKENS * floats * 8 and cost.cache_floats == floats
    assert (
        cost.parameters == sum(p.numel() for p in layer.parameters()) == DIM * WIDTH * (2 * HEADS + 2 * kv) + DIM * kv
    )
    biased = make("smha(top=2, bias=qkvo)").spec.cost(DIM, HEADS)
    assert biased.parameters == 4 * DIM * DIM + DIM * HEADS + 3 * DIM + HEADS * DIM


def test_first_weights():
    layer = Attention("smha(top=2, bias=qkvo)", 96, 8)
    for projection in (layer.project.q_proj, layer.project.o_proj):
        assert abs(projection.weight.std() / 96**-0.5 - 1) < 0.1
    assert not layer.project.q_proj.bias.any() and not layer.project.o_bias.any()
    assert 0.005 < layer.project.router.score.weight.std() < 0.015


def test_both_ways():
    layer, x = make("smha(top=2)", site=Site(causal=False)), batch()
    q, k, v = (heads_of(f(x), HEADS) for f in (layer.project.q_proj, layer.project.k_proj, layer.project.v_proj))
    m = joined(layer, x)
    o = weights(q, k, WIDTH**-0.5, m[..., None] & m[:, :, None]).nan_to_num() @ v
    close(layer(x), join(o, layer.project.o_proj))


@pytest.mark.parametrize(
    ("spec", "error", "why"),
    [
        ("smha(top=5)", OptionError, "top may be 1 to 4"),
        ("smha(top=0)", OptionError, "top may be 1 to 4"),
        ("smha(top=3, kv_heads=2)", OptionError, "of 2 key heads"),
        ("smha(top=1, kv_heads=3)", OptionError, "kv_heads may be"),
        ("smha + moh", SpecError, "slot 'router'"),
        ("smha + talking_heads", SpecError, "gqa [+] moh"),
        ("smha + gda", SpecError, "alike heads"),
    ],
)
def test_refusals(spec, error, why):
    with pytest.raises(error, match=why):
        Attention(spec, DIM, HEADS)


def test_refusals_of_places():
    with pytest.raises(SpecError, match="'self'"):
        Attention("smha", DIM, HEADS, site=Site(causal=False, cross=True))
    with pytest.raises(OptionError, match="chosen here"):
        Attention("smha", DIM, HEADS, site=Site(1, 2, kv_source=0))
    with pytest.raises(OptionError, match="up to 256"):
        Attention("smha", 1024, 512)
