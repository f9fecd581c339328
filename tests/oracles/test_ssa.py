"""Oracles of `ssa`."""

import math

import pytest
import torch
import torch.nn.functional as F
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
)

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.core.mask import Axis

WIDTH = 6
N = torch.arange(1, TOKENS + 1).double()[:, None]


def projections(layer, x):
    p = layer.project
    return tuple(heads_of(f(x), HEADS) for f in (p.q_proj, p.k_proj, p.v_proj))


def written(layer, x, tau, tau_v, cap=None):
    """The temperature on the scores and, for values, on the weights."""
    q, k, v = projections(layer, x)
    scores = tau * (rope(q) @ rope(k).transpose(-1, -2)) * WIDTH**-0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    p = scores.masked_fill(~triangle(), -torch.inf).softmax(-1)
    return join((p * tau_v.transpose(-1, -2)) @ v, layer.project.o_proj)


def f_shared(temperature, features):
    return torch.einsum("bhnd,hdo->bhno", F.gelu(features), temperature.weight)


def rewired(layer, **changes):
    return twin(layer, str(layer.spec), **{f"transforms__0__{name}": value for name, value in changes.items()})


def constant(layer, tau):
    """The layer with one temperature everywhere."""
    layer.transforms[0].q.forward = lambda features, x, axis: torch.tensor(tau).double()
    return layer


def entropy(tau, scores):
    p = (tau * scores).softmax(-1)
    return -(p * p.log()).sum(-1)


@pytest.mark.parametrize("base", ["gqa(kv_heads=2)", "gqa", "mla(view=expanded)", "mfa(width=8)"])
@pytest.mark.parametrize("token", ["shared", "none"])
def test_starts_as_the_base_layer_bit_for_bit(base, token):
    """f = 0 and no growth with position: every product is with one."""
    layer = Attention(f"{base} + ssa(token={token})", DIM, HEADS).double()
    plain, x = make(base), batch()
    layer.load_state_dict(layer.state_dict() | plain.state_dict())
    differ(layer(x), plain(x))  # from scratch, c is one half
    layer.transforms[0].q.growth.data.fill_(-torch.inf)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("start", ["", ", start=1.5"])
def test_the_released_form_is_almost_the_base_layer(start):
    layer = Attention(f"ssa(token=none, position=exponential{start})", DIM, HEADS).double()
    plain, x = make("gqa"), batch()
    layer.load_state_dict(layer.state_dict() | plain.state_dict())
    beta = 1.5 if start else 2.0
    growth = math.exp(-math.exp(beta))
    assert round(growth, 4) == (0.0113 if start else 0.0006)
    assert sum(p.numel() for p in layer.transforms.parameters()) == 1
    close(layer(x), written(layer, x, 1 + growth * N.log(), torch.ones(TOKENS, 1)))
    assert 0 < (layer(x) - plain(x)).abs().max() < 0.1 * plain(x).abs().max()


def test_written_out():
    layer, x = make("ssa"), batch()
    ssa, (q, _, v) = layer.transforms[0], projections(layer, x)
    tau = torch.tanh(f_shared(ssa.q, q)) + 1 + torch.sigmoid(ssa.q.growth) * N.log()
    tau_v = 1 + torch.tanh(f_shared(ssa.v, v))
    assert (tau > 0).all() and (tau_v > 0).all()
    close(layer(x), written(layer, x, tau, tau_v))
    capped = twin(layer, "ssa + softmax(cap=0.5)")
    close(capped(x), written(layer, x, tau, tau_v, cap=0.5))


def test_mlp_written_out():
    layer, x = make("ssa(token=mlp, position=exponential, value_position=true, longest=4, hidden=5)"), batch()

    def tau(t):
        f = F.gelu(x @ t.map.weight.T) @ t.weight
        return (torch.tanh(f) + 1 + torch.exp(-torch.exp(t.growth)) * N.clamp_max(4).log())[:, None]

    ssa = layer.transforms[0]
    close(layer(x), written(layer, x, tau(ssa.q), tau(ssa.v)))


def test_grouped_values_have_a_temperature_each():
    layer, x = make("gqa(kv_heads=2) + ssa"), batch()
    ssa, p = layer.transforms[0], layer.project
    assert ssa.v.weight.shape == (2, WIDTH, 1) and ssa.q.weight.shape == (HEADS, WIDTH, 1)
    wide = {
        f"project__{n}_proj__weight": getattr(p, f"{n}_proj").weight.detach().unflatten(0, (2, WIDTH))
        .repeat_interleave(2, 0).flatten(0, 1)
        for n in "kv"
    }  # fmt: skip
    full = twin(layer, "gqa + ssa", transforms__0__v__weight=ssa.v.weight.detach().repeat_interleave(2, 0), **wide)
    close(full(x), layer(x))


def test_the_first_query_knows_no_growth():
    layer, x = make("ssa"), batch()
    other = rewired(layer, q__growth=torch.tensor([3.0]).double())
    close(other(x)[:, :1], layer(x)[:, :1])
    tau = other.transforms[0].q(torch.zeros(1, HEADS, 2, WIDTH).double(), x[:, :2], Axis(2, 0))
    close(tau[0, 0, :, 0], torch.tensor([1.0, 1 + torch.sigmoid(torch.tensor(3.0).double()) * math.log(2)]).double())


def test_a_larger_temperature_is_spikier():
    """dH/dτ = -τ Var_p(s) ≤ 0 for the entropy of softmax(τ s)."""
    scores = torch.randn(50, TOKENS).double()
    tau = torch.linspace(0.1, 5, 50).double()[:, None].requires_grad_()
    (slope,) = torch.autograd.grad(entropy(tau, scores).sum(), tau)
    p = (tau * scores).softmax(-1)
    variance = (p * scores**2).sum(-1) - (p * scores).sum(-1) ** 2
    close(slope[:, 0], -tau[:, 0] * variance)
    assert (slope <= 0).all()


def test_the_ends():
    """Temperature zero averages what is visible, a huge one takes the best key."""
    layer, x = make("ssa(value=false)"), batch()
    q, k, v = projections(layer, x)
    close(constant(layer, 0.0)(x), join(v.cumsum(2) / N, layer.project.o_proj))
    best = (rope(q) @ rope(k).transpose(-1, -2)).masked_fill(~triangle(), -torch.inf).argmax(-1)
    one = v.gather(2, best[..., None].expand(-1, -1, -1, WIDTH))
    close(constant(layer, 1e7)(x), join(one, layer.project.o_proj))


def test_uniform_weights_average_scaled_values():
    layer, x = make("ssa"), batch()
    layer = twin(layer, "ssa", project__q_proj__weight=torch.zeros(DIM, DIM).double())
    _, _, v = projections(layer, x)
    scaled = v * (1 + torch.tanh(f_shared(layer.transforms[0].v, v)))
    close(layer(x), join(scaled.cumsum(2) / N, layer.project.o_proj))


@pytest.mark.parametrize(
    "spec",
    [
        "ssa", "ssa(token=mlp, value_position=true)", "mla(view=expanded) + ssa(value_position=true)",
        "mla(rank=10, rope_dim=4, v_dim=5) + ssa(value=false)", "window(3) + ssa(longest=3)",
    ],
)  # fmt: skip
def test_decode(spec):
    layer, x = make(spec), batch()
    for block in (1, 2, 4):
        close(decoded(layer, x, block), layer(x))


def test_padding_is_not_counted():
    layer, x = make("ssa(value_position=true)"), batch()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    close(layer(x, mask=valid)[1, 4:], layer(x[1:, 4:])[0])
    cache, outs = Cache(), []
    with torch.no_grad():
        for at in range(TOKENS):
            outs.append(layer(x[:, at : at + 1], mask=valid[:, at : at + 1], cache=cache))
    close(torch.cat(outs, 1)[valid], layer(x, mask=valid)[valid])


def test_order_among_transforms():
    """The temperature is the scores', so a norm of the queries before or behind it changes nothing."""
    before, after, x = make("ssa(value=false) + qk-norm"), make("qk-norm + ssa(value=false)"), batch()
    state = before.state_dict()
    swapped = {n.translate(str.maketrans("01", "10")) if "transforms" in n else n: t for n, t in state.items()}
    after.load_state_dict(swapped)
    close(after(x), before(x))


def test_a_bias_on_the_scores_is_not_scaled():
    layer, x = make("ssa(value=false) + alibi"), batch()
    q, k, v = projections(layer, x)
    slopes = torch.tensor([2.0**-2, 2**-4, 2**-6, 2**-8]).double()[:, None, None]
    scores = 7.0 * (q @ k.transpose(-1, -2)) * WIDTH**-0.5 - slopes * (N - N.T).abs()
    want = scores.masked_fill(~triangle(), -torch.inf).softmax(-1) @ v
    close(constant(layer, 7.0)(x), join(want, layer.project.o_proj))


@pytest.mark.parametrize("site", [Site(causal=False), Site(causal=False, cross=True)])
def test_without_causal_order_only_tokens_speak(site):
    layer = Attention("ssa(value_position=true)", DIM, HEADS, site=site)
    assert layer.transforms[0].q.growth is None and layer.transforms[0].v.growth is None
    with pytest.raises(OptionError, match="take token=shared"):
        Attention("ssa(token=none)", DIM, HEADS, site=site)


def test_it_stays_fused():
    for queries, kernel in ((64, "sdpa"), (1, "sdpa")):
        assert Attention("ssa", DIM, HEADS).explain(queries).kernel == kernel


def test_cost():
    """2·H·d + 1 shared, below 0.5% of a layer; D·h + h for each `mlp`, 5%; one number alone. No more is cached."""
    base = Spec.parse("gqa").cost(1024, 16)
    for options, numbers in (
        ("", 2 * 1024 + 1),
        ("(value=false)", 1024 + 1),
        ("(value_position=true)", 2 * 1024 + 2),
        ("(token=mlp)", 2 * (1024 * 102 + 102) + 1),
        ("(token=none)", 1),
    ):
        line = f"ssa{options}"
        cost = Spec.parse(line).cost(1024, 16)
        assert cost.parameters - base.parameters == numbers
        assert (cost.cache_floats, cost.state_floats) == (base.cache_floats, 0)
        assert sum(p.numel() for p in Attention(line, 1024, 16).parameters()) == cost.parameters
        assert numbers / base.parameters < (0.051 if "mlp" in options else 0.005)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ssa(token=none, position=none)", "nothing is left"),
        ("ssa(value=false, value_position=true)", "needs value=true"),
        ("ssa(position=none, value_position=true)", "position=sigmoid or exponential"),
        ("ssa(longest=0)", "longest=0 must be positive"),
        ("ssa(token=mlp, hidden=0)", "hidden=0"),
    ],
)
def test_refusals(line, said):
    with pytest.raises(OptionError, match=said):
        Attention(line, DIM, HEADS)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mla + ssa", r"'ssa' needs 'head keys'.*mla\(view=expanded\)"),
        ("mla(view=expanded) + ssa(token=mlp)", r"'ssa' needs 'cached heads'.*'mla' breaks.*ssa\(value=false\)"),
        ("mfa(width=8, key_reuse=true) + ssa", "needs 'head keys'"),
        ("ssa + ssa", "both take the slot 'temperature'"),
    ],
)
def test_what_it_excludes(line, said):
    with pytest.raises(SpecError, match=said):
        Attention(line, DIM, HEADS)
