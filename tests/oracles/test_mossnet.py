"""Mamba's selective state space, and MossNet's mixture of several."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin

from manyheads import Attention, Cache, Links, OptionError, Site, Spec

STATE, RANK, INNER = 5, 2, 2 * DIM
MIXED = f"mossnet(experts=3, top=2, state={STATE})"
APART = f"mossnet(experts=3, top=2, kind=apart, state={STATE})"


def written_out(layer, x, gates=None):
    """The block token by token, `[N, I]` states and all; gates `[B, T, E]` weigh the maps of a mixture."""
    ssm, silu = layer.project.ssm, F.silu
    inner = F.pad(layer.project.u_proj(x), (0, 0, 3, 0))
    taps = ssm.conv.weight.flatten(1)
    u = silu(ssm.conv.bias.flatten() + sum(taps[s] * inner[:, 3 - s : inner.shape[1] - s] for s in range(4)))
    gates = x.new_ones(*x.shape[:2], 1) if gates is None else gates
    rows = torch.einsum("bte,bti,eif->btf", gates, u, ssm.from_inner)
    low, b, c = rows.split([RANK, STATE, STATE], -1)
    step = F.softplus(low @ ssm.to_step + ssm.dt_bias)
    h, ys = x.new_zeros(len(x), STATE, u.shape[-1]), []
    for t in range(x.shape[1]):
        h = (step[:, t, None] * -ssm.A_log.exp()).exp() * h + b[:, t, :, None] * (step * u)[:, t, None]
        ys.append((c[:, t, :, None] * h).sum(1) + ssm.skip * u[:, t])
    return layer.project.o_proj(torch.stack(ys, 1) * silu(layer.gates[0].g_proj(x)))


def gates_of(layer, x):
    routing = layer.project.ssm.router(x)
    return routing.spread(routing.gates("full"))


def test_mamba_written_out():
    layer, x = make(f"mamba(state={STATE})"), batch(70)
    close(layer(x), written_out(layer, x))
    close(decoded(layer, x[:, :11], 3), layer(x)[:, :11])


def test_a_mixture_written_out():
    layer, x = make(MIXED), batch()
    close(layer(x), written_out(layer, x, gates_of(layer, x)))


def test_one_expert_is_mamba():
    mamba, x = make(f"mamba(state={STATE})"), batch()
    for kind in ("mixed", "apart"):
        other = twin(mamba, f"mossnet(experts=1, top=1, kind={kind}, state={STATE})")
        assert torch.equal(other(x), mamba(x))


def alike(spec, mamba):
    """A mixture whose every expert is the plain block."""
    layer, ssm = make(spec), mamba.project.ssm
    names = ("from_inner", "dt_bias", "A_log", "skip")
    given = {f"project.ssm.{name}": getattr(ssm, name).expand_as(getattr(layer.project.ssm, name)) for name in names}
    state = {name: value for name, value in mamba.state_dict().items() if name not in given}
    layer.load_state_dict(layer.state_dict() | state | given)
    return layer


@pytest.mark.parametrize("top", [1, 2, 3])
def test_experts_that_are_alike(top):
    """Gates sum to one, so a mixed state is the plain one; a state apart lacks the tokens that went elsewhere."""
    mamba, x = make(f"mamba(state={STATE})"), batch()
    close(alike(f"mossnet(experts=3, top={top}, state={STATE})", mamba)(x), mamba(x))
    apart = alike(f"mossnet(experts=3, top={top}, kind=apart, state={STATE})", mamba)(x)
    if top == 3:
        close(apart, mamba(x))
    else:
        differ(apart, mamba(x))


def test_a_constant_router_mixes_the_maps():
    layer, x = make(f"mossnet(experts=3, top=3, state={STATE})"), batch()
    with torch.no_grad():
        layer.project.ssm.router.score.weight.zero_()
    mean = layer.project.ssm.from_inner.mean(0, keepdim=True)
    close(layer(x), twin(layer, f"mamba(state={STATE})", project__ssm__from_inner=mean)(x))


def test_experts_apart_are_scans_of_their_own_tokens():
    """Each expert as a plain block that saw its own tokens alone (behind the shared convolution)."""
    layer, x = make(APART), batch()
    ssm, gates = layer.project.ssm, gates_of(layer, x)
    inner, taps = F.pad(layer.project.u_proj(x), (0, 0, 3, 0)), ssm.conv.weight.flatten(1)
    u = F.silu(ssm.conv.bias.flatten() + sum(taps[s] * inner[:, 3 - s : inner.shape[1] - s] for s in range(4)))
    want = torch.zeros_like(u)
    for row in range(len(x)):
        for e in range(3):
            h = u.new_zeros(STATE, u.shape[-1])
            for t in gates[row, :, e].nonzero().flatten():
                low, b, c = (u[row, t] @ ssm.from_inner[e]).split([RANK, STATE, STATE])
                step = F.softplus(low @ ssm.to_step + ssm.dt_bias[e])
                h = (step * -ssm.A_log[e].exp()).exp() * h + b[:, None] * (step * u[row, t])
                want[row, t] += gates[row, t, e] * (c @ h + ssm.skip[e] * u[row, t])
    close(layer(x), layer.project.o_proj(want * F.silu(layer.gates[0].g_proj(x))))


def test_an_expert_that_is_not_chosen_keeps_its_state():
    layer, x, cache = make(APART), batch(), Cache()
    with torch.no_grad():
        layer(x[:, :-1], cache=cache)
        before = cache.state(0)["scan"].clone()
        layer(x[:, -1:], cache=cache)
    chosen = gates_of(layer, x)[:, -1] > 0
    after = cache.state(0)["scan"]
    assert torch.equal(after[~chosen], before[~chosen])
    assert (after[chosen] != before[chosen]).flatten(1).any(1).all()


def test_without_decay_it_is_linear_attention():
    layer, x = make(f"mamba(state={STATE})"), batch()
    ssm = layer.project.ssm
    with torch.no_grad():
        ssm.A_log.fill_(-torch.inf)
        ssm.to_step.zero_()
        ssm.skip.zero_()
    inner, taps = F.pad(layer.project.u_proj(x), (0, 0, 3, 0)), ssm.conv.weight.flatten(1)
    u = F.silu(ssm.conv.bias.flatten() + sum(taps[s] * inner[:, 3 - s : inner.shape[1] - s] for s in range(4)))
    _, b, c = (u @ ssm.from_inner[0]).split([RANK, STATE, STATE], -1)
    y = (c @ b.transpose(1, 2)).tril() @ (F.softplus(ssm.dt_bias) * u)
    close(layer(x), layer.project.o_proj(y * F.silu(layer.gates[0].g_proj(x))))


@pytest.mark.parametrize("spec", [MIXED, APART])
def test_the_order_of_experts_is_nothing(spec):
    layer, x, order = make(spec), batch(), torch.tensor([2, 0, 1])
    names = ["from_inner", "router.score.weight", *(["dt_bias", "A_log", "skip"] if "apart" in spec else [])]
    changes = {f"project__ssm__{n.replace('.', '__')}": layer.project.ssm.get_parameter(n)[order] for n in names}
    close(twin(layer, spec, **changes)(x), layer(x))


@pytest.mark.parametrize("top", [1, 2])
def test_balance(top):
    layer, x = make(f"mossnet(experts=4, top={top}, state={STATE})").train(), batch(64)
    router, links = layer.project.ssm.router, Links()
    with torch.no_grad():
        router.score.weight.copy_(1e-9 * router.score.weight)  # even chances, choices as they fall
    layer(x, links=links)
    assert abs(links.aux["0.scan.experts"].item() - 1) < 1e-6
    if top == 1:
        with torch.no_grad():
            router.score.weight.zero_()
            router.score.weight[2] = 100 * torch.ones(DIM)
        layer(x.abs(), links=links)
        assert abs(links.aux["0.scan.experts"].item() - 4) < 1e-6
    layer.eval()(x, links=(quiet := Links()))
    assert not quiet.aux


@pytest.mark.parametrize(("spec", "apart"), [(MIXED, False), (APART, True)])
def test_cost(spec, apart):
    """Maps in, gate and out; E I (2N + R); the router; what an expert has of its own; a state each or one."""
    cost, experts, owners = Spec.parse(spec).cost(DIM, HEADS), 3, 3 if apart else 1
    columns = 2 * STATE + RANK
    want = 3 * DIM * INNER + experts * INNER * columns + DIM * experts + RANK * INNER + 5 * INNER
    assert cost.parameters == want + owners * INNER * (STATE + 2)
    assert cost.state_floats == owners * INNER * STATE + 3 * INNER
    assert cost.cache_floats == cost.pair_flops == 0
    mamba = Spec.parse(f"mamba(state={STATE})").cost(DIM, HEADS)
    assert cost.parameters - mamba.parameters == (
        2 * INNER * columns + 3 * DIM + (2 * INNER * (STATE + 2) if apart else 0)
    )


def test_first_values():
    ssm = Attention("mamba", 64, 4).project.ssm
    torch.testing.assert_close(ssm.A_log.exp(), torch.arange(1.0, 17)[:, None].expand(16, 128))
    step = F.softplus(ssm.dt_bias)
    assert step.min() >= 0.001 and step.max() <= 0.1 + 1e-6
    assert torch.equal(ssm.skip, torch.ones(128))


@pytest.mark.parametrize("spec", [MIXED, APART])
def test_padding_leaves_the_state_as_it_is(spec):
    layer, x, cache = make(spec), batch(7), Cache()
    with torch.no_grad():
        layer(x, cache=cache)
        before = {name: state.clone() for name, state in cache.state(0).items()}
        layer(100 * batch(3), cache=cache, mask=torch.zeros(2, 3, dtype=torch.bool))
    for name, state in cache.state(0).items():
        assert torch.equal(state, before[name]), name


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mamba + kha", "'kha' needs 'scores'.*'selective_ssm' breaks"),
        ("mamba + rope", "'rope' needs 'scores'"),
        ("mamba + window(3)", "'window' needs 'scores'"),
        ("mamba + retention", "'retention' needs 'bare scores'"),
        ("mamba + talking_heads", "'talking_heads' needs 'scores'"),
        ("mossnet(experts=2, top=3)", "top may be 1 to 2"),
        ("mamba(taps=0)", "at least 1"),
        ("selective_ssm(expand=0)", "expand=0"),
    ],
)
def test_refusals(spec, says):
    with pytest.raises(OptionError, match=says):
        Attention(spec, DIM, HEADS)


def test_no_encoder():
    with pytest.raises(OptionError, match="a causal layer"):
        Attention("mamba", DIM, HEADS, site=Site(causal=False))
    assert str(make("mamba").spec).startswith("selective_ssm + output_gate")
