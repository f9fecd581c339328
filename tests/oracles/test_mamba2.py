"""Mamba-2: state-space duality, many values for a few pairs of queries and keys, and the gated norm."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, make
from torch import nn

from manyheads import Attention, Cache, OptionError, Spec
from manyheads.core.scan import Stream, decayed_sum
from manyheads.testing import Case

SMALL = "multi_value(key_dim=6) + ssd"
START = Stream(None, None, None)


def rows(heads, tokens, width):
    return torch.randn(2, heads, tokens, width, dtype=torch.float64)


def loop(q, k, v, decay, values=1):
    """o_t = Σ_{s≤t} e^{Σ decay} (q_t·k_s) v_s, one token after the other."""
    each, width = q.shape[1] // k.shape[1], v.shape[-1] // values
    state = k.new_zeros(len(k), k.shape[1] * values, k.shape[-1], width)
    outs = []
    for t in range(q.shape[2]):
        own = v[:, :, t].unflatten(-1, (values, width)).flatten(1, 2)
        state = state * decay[:, :, t, None, None].exp()
        state = state + k[:, :, t].repeat_interleave(values, 1)[..., None] * own[:, :, None]
        read = state.unflatten(1, (-1, values)).repeat_interleave(each, 1)
        outs.append(torch.einsum("bhk,bhmkv->bhmv", q[:, :, t], read).flatten(2))
    return torch.stack(outs, 2)


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 64])
@pytest.mark.parametrize(("q", "kv", "values"), [(4, 2, 1), (2, 2, 3), (4, 2, 2)])
def test_chunks_are_the_loop(chunk, q, kv, values):
    torch.manual_seed(0)
    q, k, v = rows(q, 11, 3), rows(kv, 11, 3), rows(kv, 11, 6)
    decay = -torch.rand(2, kv * values, 11, dtype=torch.float64)
    got, state = decayed_sum(q, k, v, decay, START, chunk=chunk)
    close(got, loop(q, k, v, decay, values))
    first, middle = decayed_sum(*(t[:, :, :4] for t in (q, k, v, decay)), START, chunk=chunk)
    then, last = decayed_sum(*(t[:, :, 4:] for t in (q, k, v, decay)), Stream(middle, None, None), chunk=chunk)
    close(torch.cat([first, then], 2), got)
    close(last, state)


def test_a_step_of_one_without_decay_is_linear_attention():
    layer, x = make(SMALL), batch()
    with torch.no_grad():
        layer.scan.dt_proj.weight.zero_()
        layer.scan.dt_bias.copy_(torch.expm1(torch.ones(HEADS, dtype=torch.float64)).log())
        layer.scan.A_log.fill_(-torch.inf)
        layer.scan.skip.zero_()
    project = layer.project
    q, k, v = project.q_proj(x), project.k_proj(x), project.v_proj(x)
    want = (q @ k.transpose(1, 2) * 6**-0.5).tril() @ v
    close(layer(x), project.o_proj(want))


def written_out(layer, x, groups, state):
    """The authors' block: one projection cut in z, x, B, C and Δ, convolved, a loop over tokens, the gated norm."""
    project, conv, scan = layer.project, layer.transforms[0], layer.scan
    gate, norm = layer.gates
    inner = project.v_proj.out_features
    z, dt = gate.g_proj(x), F.softplus(scan.dt_proj(x) + scan.dt_bias)
    xbc = torch.cat([project.v_proj(x), project.k_proj(x), project.q_proj(x)], -1)
    filters = torch.cat([conv.get_submodule(name).weight.flatten(1) for name in "vkq"], -1)
    bias = torch.cat([conv.get_submodule(name).bias.flatten() for name in "vkq"])
    padded = F.pad(xbc, (0, 0, 3, 0))
    xbc = F.silu(bias + sum(filters[s] * padded[:, 3 - s : padded.shape[1] - s] for s in range(4)))
    v, b, c = xbc.split([inner, groups * state, groups * state], -1)
    heads, each = dt.shape[-1], dt.shape[-1] // groups
    v = v.unflatten(-1, (heads, -1))
    b, c = (t.unflatten(-1, (groups, state)).repeat_interleave(each, 2) for t in (b, c))
    h, ys = x.new_zeros(len(x), heads, state, v.shape[-1]), []
    for t in range(x.shape[1]):
        h = (dt[:, t] * -scan.A_log.exp()).exp()[..., None, None] * h
        h = h + dt[:, t, :, None, None] * b[:, t, :, :, None] * v[:, t, :, None]
        ys.append(torch.einsum("bhn,bhnp->bhp", c[:, t], h) + scan.skip[:, None] * v[:, t])
    y = torch.stack(ys, 1).flatten(2) * F.silu(z)
    y = F.rms_norm(y.unflatten(-1, (groups, -1)), (inner // groups,), eps=1e-5).flatten(-2) * norm.gain.flatten()
    return project.o_proj(y)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_block_written_out(groups):
    layer, x = make(f"mamba2(state=6, groups={groups})"), batch(11)
    close(layer(x), written_out(layer, x, groups, 6))


def test_cost():
    """in_proj of 2 I + 2 G N + H columns, convolution of I + 2 G N channels, A, D and the bias of Δ, norm, out_proj."""
    dim, heads, groups, state, inner = 24, 4, 2, 6, 48
    channels = inner + 2 * groups * state
    want = dim * (2 * inner + 2 * groups * state + heads) + 5 * channels + 3 * heads + inner + inner * dim
    cost = Spec.parse(f"mamba2(state={state}, groups={groups})").cost(dim, heads)
    assert cost.parameters == want == sum(p.numel() for p in make("mamba2(state=6, groups=2)").parameters())
    assert cost.state_floats == inner * state + 3 * channels
    assert cost.cache_bytes(1) == cost.cache_bytes(5000) == 4 * cost.state_floats


def test_padding_leaves_the_state_as_it_is():
    layer, x, cache = make("mamba2(state=6)"), batch(7), Cache()
    with torch.no_grad():
        layer(x, cache=cache)
        before = {name: state.clone() for name, state in cache.state(0).items()}
        layer(100 * batch(3), cache=cache, mask=torch.zeros(2, 3, dtype=torch.bool))
    for name, state in cache.state(0).items():
        assert torch.equal(state, before[name]), name


def test_first_values():
    torch.manual_seed(0)
    scan = Attention("mamba2", 512, 16).scan
    step = F.softplus(scan.dt_bias)
    assert step.min() >= 0.001 and step.max() <= 0.1 + 1e-6
    assert scan.A_log.exp().min() >= 1 and scan.A_log.exp().max() <= 16 + 1e-5
    assert torch.equal(scan.skip, torch.ones(16))


def test_states_are_single_precision_in_bfloat16():
    layer, cache = Attention("mamba2(state=6)", DIM, HEADS).bfloat16(), Cache()
    with torch.no_grad():
        layer(batch().bfloat16(), cache=cache)
    assert cache.state(0)["scan"].dtype == torch.float32


def test_attention_with_many_values():
    """Without a scan it is softmax attention whose maps serve several value heads."""
    layer, x = make("multi_value(groups=2, key_dim=6, expand=1) + rope(none)"), batch()
    q, k = (t(x).unflatten(-1, (2, 6)).transpose(1, 2) for t in (layer.project.q_proj, layer.project.k_proj))
    v = layer.project.v_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    weights = (q @ k.transpose(2, 3) * 6**-0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    o = weights.repeat_interleave(2, 1) @ v
    close(layer(x), layer.project.o_proj(o.transpose(1, 2).flatten(2)))
    close(decoded(layer, x), layer(x))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("multi_value(groups=3)", r"groups may be \[1, 2, 4\]"),
        ("multi_value(key_dim=0)", "at least 1"),
        ("gqa + ssd(dt_min=0.2)", "0 < dt_min"),
        ("output_norm(groups=3)", r"groups may be \[1, 2, 4\]"),
        ("ssd + alibi", "bare scores"),
        ("ssd + window(3)", "bare scores"),
        ("ssd + retention", "slot"),
    ],
)
def test_refusals(spec, says):
    with pytest.raises(OptionError, match=says):
        Attention(spec, DIM, HEADS)


def test_values_that_do_not_split():
    with pytest.raises(OptionError, match="dim such as 20"):
        Attention("multi_value(expand=1)", 22, 4)


def test_gated_norm_starts_as_a_norm():
    layer = Attention("gqa + output_norm(groups=2)", DIM, HEADS).double()
    o = torch.randn(2, HEADS, 5, 6, dtype=torch.float64)
    got = layer.gates[0].gate(o, None)
    close(got.unflatten(1, (2, 2)).square().mean((2, 4)), torch.ones(2, 2, 5, dtype=torch.float64), 1e-3)
    nn.init.zeros_(layer.gates[0].gain)
    close(layer.gates[0].gate(o, None), torch.zeros_like(o))


def test_laws_hold_for_odd_lengths():
    case = Case("mamba2(state=6)", tokens=67, padding=(0, 3, 66))
    layer, x, valid = case.layer(), case.x, case.valid
    whole, cache, outs = layer(x, mask=valid), Cache(), []
    with torch.no_grad():
        for cut in (slice(0, 1), slice(1, 40), slice(40, 67)):
            outs.append(layer(x[:, cut], mask=valid[:, cut], cache=cache))
    close(torch.cat(outs, 1)[valid], whole[valid])
