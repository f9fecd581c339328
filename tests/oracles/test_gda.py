"""Oracles of `gda`: differential attention and its grouped form."""

import math

import pytest
import torch
from tests.oracles.reference import HEADS, batch, close, decoded, differ, heads_of, join, make, rope, twin, weights

from manyheads import Attention, Site

WIDTH = 6
SITE = Site(layer=2, layers=4)
START = 0.8 - 0.6 * math.exp(-0.3 * 2)  # λ_init of the third layer


def forced(layer, value):
    """λ set by hand, through q1·k1."""
    vectors = torch.zeros(4, WIDTH).double()
    vectors[:2, 0] = torch.tensor([1.0, math.log(value - layer.attends[0].start + 1)])
    layer.attends[0].vectors.data = vectors
    return layer


def normed(o, layer):
    """RMS over the 2d channels of a head, the shared gain, and 1 - λ_init."""
    return o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.gates[0].gain * layer.gates[0].scale


def maps(layer, x, ratio):
    """Signal maps, noise maps (repeated) and the values of each signal head, by the paper's order of heads."""
    p, kv = layer.project, layer.layout.kv
    q, k, v = heads_of(p.q_proj(x), layer.heads), heads_of(p.k_proj(x), kv), heads_of(p.v_proj(x), kv)
    q, k = rope(q), rope(k)
    striped = q.unflatten(1, (-1, ratio + 1))
    signal, noise = striped[:, :, :ratio].flatten(1, 2), striped[:, :, ratio]
    pairs = torch.cat([v[:, 0::2], v[:, 1::2]], -1)

    def spread(t, heads):
        return t.repeat_interleave(heads // t.shape[1], 1)

    h1, h2 = signal.shape[1], noise.shape[1]
    one = weights(signal, spread(k[:, 0::2], h1), WIDTH**-0.5)
    two = weights(noise, spread(k[:, 1::2], h2), WIDTH**-0.5)
    return one, two.repeat_interleave(ratio, 1), spread(pairs, h1)


CASES = [("gqa", 4, 1), ("gqa(kv_heads=2)", 4, 1), ("gqa(kv_heads=2)", 4, 3), ("gqa(kv_heads=4, head_dim=6)", 8, 1)]
CASES += [("gqa(kv_heads=2, head_dim=6)", 6, 2), ("gqa(kv_heads=4, head_dim=6)", 10, 4)]


@pytest.mark.parametrize(("base", "heads", "ratio"), CASES)
def test_combining_maps_equals_combining_outputs(base, heads, ratio):
    """The definition, (A1 - λ A2) V, against two fused attentions and a subtraction."""
    layer, x = make(f"{base} + gda(ratio={ratio})", 24, heads, site=SITE), batch()
    one, two, v = maps(layer, x, ratio)
    subtracted = layer.attends[0].subtracted().double()
    a = one - subtracted * two
    close(a.sum(-1), (1 - subtracted).expand(a.shape[:3]))  # rows sum to 1 - λ
    close(layer(x), join(normed(a @ v, layer), layer.project.o_proj))


def test_ratio_one_is_plain_differential_attention():
    """The layout of the reference code: q viewed (n, 2, d), k (pairs, 2, d), v (pairs, 2d)."""
    layer, x = make("gqa + gda", site=SITE), batch()
    p, n = layer.project, HEADS // 2
    q, k = (rope(heads_of(f(x), HEADS)).unflatten(1, (n, 2)) for f in (p.q_proj, p.k_proj))
    v = heads_of(p.v_proj(x), n)
    a = [weights(q[:, :, i], k[:, :, i], WIDTH**-0.5) for i in (0, 1)]
    o = (a[0] - layer.attends[0].subtracted() * a[1]) @ v
    close(layer(x), join(normed(o, layer), p.o_proj))
    mha = make("gqa").spec.cost(24, HEADS).parameters
    assert layer.spec.cost(24, HEADS).parameters == mha + 4 * WIDTH + 2 * WIDTH


def test_lambda_zero_is_the_signal_heads():
    layer, x = forced(make("gqa(kv_heads=2) + gda(ratio=3)", site=SITE), 0.0), batch()
    one, _, v = maps(layer, x, 3)
    close(layer(x), join(normed(one @ v, layer), layer.project.o_proj))


def test_equal_maps_and_lambda_one_cancel():
    layer, x = forced(make("gqa + differential", site=SITE), 1.0), batch()
    changes = {}
    for name in ("q_proj", "k_proj"):
        weight = getattr(layer.project, name).weight.detach().unflatten(0, (2, 2, WIDTH)).clone()
        weight[:, 1] = weight[:, 0]
        changes[f"project__{name}__weight"] = weight.flatten(0, 2)
    differ(layer(x), torch.zeros_like(x))
    close(twin(layer, "gqa + differential", **changes)(x), torch.zeros_like(x))


@pytest.mark.parametrize("layer_index", [0, 1, 5])
def test_lambda_starts_at_its_schedule(layer_index):
    layer = Attention("gda", 24, HEADS, site=Site(layer=layer_index, layers=6))
    layer.attends[0].vectors.data.zero_()
    want = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
    assert math.isclose(layer.attends[0].subtracted().item(), want, rel_tol=1e-6)
    assert math.isclose(layer.gates[0].scale, 1 - want)
    assert layer.attends[0].vectors.dtype == torch.float32


def test_offset_of_the_motif_code():
    """It puts the 0-based index into the 1-based formula: -0.0099 at the first layer."""
    layer = Attention("gda(offset=-1)", 24, HEADS)
    assert math.isclose(layer.attends[0].start, 0.8 - 0.6 * math.exp(0.3))
    assert round(layer.attends[0].start, 4) == -0.0099


def test_growth_leaves_outputs_alone():
    """Each signal head becomes two in its group (ratio 1 to 2), its block of W_O halved."""
    layer, x = make("gqa(kv_heads=2, head_dim=6) + gda", 24, 4, site=SITE), batch()
    grown = make("gqa(kv_heads=2, head_dim=6) + gda(ratio=2)", 24, 6, site=SITE)
    state = dict(layer.state_dict())
    q = state["project.q_proj.weight"].unflatten(0, (2, 2, WIDTH))  # groups of [signal, noise]
    state["project.q_proj.weight"] = q[:, [0, 0, 1]].flatten(0, 2)
    o = state["project.o_proj.weight"].unflatten(1, (2, 2 * WIDTH))
    state["project.o_proj.weight"] = (o / 2).repeat_interleave(2, 1).flatten(1)
    grown.load_state_dict(state)
    close(grown(x), layer(x))


def test_permuting_noise_groups():
    """With their signal heads, W_O rows and key pairs."""
    layer, x = make("gqa(kv_heads=4, head_dim=6) + gda(ratio=2)", 24, 6, site=SITE), batch()
    state = dict(layer.state_dict())
    for name, shape in (("q", (2, 3, WIDTH)), ("k", (2, 2, WIDTH)), ("v", (2, 2, WIDTH))):
        key = f"project.{name}_proj.weight"
        state[key] = state[key].unflatten(0, shape).flip(0).flatten(0, 2)
    key = "project.o_proj.weight"
    state[key] = state[key].unflatten(1, (2, 2, 2 * WIDTH)).flip(1).flatten(1)
    other = make("gqa(kv_heads=4, head_dim=6) + gda(ratio=2)", 24, 6, site=SITE)
    other.load_state_dict(state)
    close(other(x), layer(x))


@pytest.mark.parametrize("base", ["gqa(kv_heads=2)", "mla(view=expanded)"])
def test_decode(base):
    layer, x = make(f"{base} + gda"), batch()
    close(decoded(layer, x), layer(x))
    xg = x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(xg)[:, 4].sum(), xg)
    assert not gradient[:, 5:].any()


def test_the_authors_sizes():
    """Motif-2-12.7B: 32 signal and 8 noise heads, 16 key heads, W_O 8192 to 4096."""
    with torch.device("meta"):
        layer = Attention("gqa(kv_heads=16, head_dim=128) + gda(ratio=4)", 4096, 40)
    assert (layer.layout.out, layer.layout.out_width) == (32, 256)
    assert tuple(layer.project.o_proj.weight.shape) == (4096, 8192)
    assert layer.spec.cost(4096, 40).cache_floats == 2 * 16 * 128
