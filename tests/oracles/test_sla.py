"""Oracles of softmax linear attention: a softmax over heads on what they read, and on what they write."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import DIM, HEADS, TOKENS, batch, close, decoded, differ, heads_of, make, twin

from manyheads import Attention, OptionError, Site, Spec, SpecError
from manyheads.attention.head_softmax import HeadSoftmax
from manyheads.core.flow import Flow, Links
from manyheads.core.mask import Axis

BASES = [
    "features + linear",
    "retnet",
    "gqa(kv_heads=2) + gated_linear + head_norm",
    "gated_delta_net",
    "gqa(kv_heads=2)",
    "mla(rank=8, rope_dim=4)",
]


def gate_of(layer):
    return next(gate for gate in layer.gates if hasattr(gate, "shares"))


def shares(gate, x):
    return gate.shares(x)[..., 0].mT


@pytest.mark.parametrize("base", BASES)
def test_it_starts_as_the_base(base):
    layer, x = make(f"{base} + sla"), batch()
    differ(layer(x), twin(layer, base)(x))
    fresh = Attention(f"{base} + sla", DIM, HEADS).double()
    want = twin(fresh, base)
    close(fresh(x), want(x))
    close(Attention("sla(scale=one)", DIM, HEADS).gates[0].shares(x.float()).sum(1), torch.ones(2, TOKENS, 1))


def test_one_head_has_all():
    """Whatever the weights, so that there is nothing to learn, and such a layer is refused."""
    shares = HeadSoftmax(DIM, 1, 1).double()
    torch.nn.init.normal_(shares.map.weight)
    close(shares(batch()), torch.ones(2, 1, TOKENS, 1).double())
    with pytest.raises(OptionError, match="sla: one head has none"):
        make("retention + sla", heads=1)
    with pytest.raises(OptionError, match="sla_write: one key head has none"):
        make("gqa(kv_heads=1) + sla_write")


@pytest.mark.parametrize("spec", ["retnet + sla", "sla(scale=one)"])
def test_shares(spec):
    """They sum to c; a constant on all logits changes nothing; the gradient of the logits sums to zero."""
    layer, x = make(spec), batch()
    gate = gate_of(layer)
    close(shares(gate, x).sum(-1), torch.full((2, TOKENS), 1.0 if "one" in spec else HEADS).double())
    y = layer(x)
    y.pow(2).sum().backward()
    assert gate.shares.map.bias.grad.abs().sum() > 1e-3 > gate.shares.map.bias.grad.sum().abs() * 1e9
    gate.shares.map.bias.data += 3
    close(layer(x), y)


@pytest.mark.parametrize("spec", ["retention + head_norm + sla", "sla(scale=one)"])
def test_one_head_takes_all(spec):
    """A logit far above the others: y = c · o_j W_O[j]."""
    layer, x = make(spec), batch()
    gate = gate_of(layer)
    gate.shares.map.bias.data[2] = 1000
    others = twin(layer, spec.replace(" + sla", "") if "+" in spec else "gqa")
    others.project.o_proj.weight.data.unflatten(1, (HEADS, -1))[:, [0, 1, 3]] = 0
    close(layer(x), others(x) * (1 if "one" in spec else HEADS))


def test_a_sum_over_heads():
    """y_t = Σ_h c g_h (o_h W_O[h]), in a loop."""
    layer, x = make("gated_linear + head_norm + sla"), batch()
    plain = twin(layer, "gated_linear + head_norm")
    g, y = shares(gate_of(layer), x), 0.0
    for h in range(HEADS):
        alone = twin(plain, "gated_linear + head_norm")
        alone.project.o_proj.weight.data.unflatten(1, (HEADS, -1))[:, [o for o in range(HEADS) if o != h]] = 0
        y = y + g[..., h, None] * alone(x)
    close(layer(x), y)


def test_order_of_heads():
    """Heads permuted together with the gate's columns and the rows of W_O."""
    layer, x = make("linear(normaliser=false) + sla"), batch()
    order = torch.tensor([2, 0, 3, 1])
    other = twin(layer, str(layer.spec))
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer.project.get_submodule(name).weight.data
        other.project.get_submodule(name).weight.data = weight.unflatten(0, (HEADS, -1))[order].flatten(0, 1)
    other.project.o_proj.weight.data = layer.project.o_proj.weight.data.unflatten(1, (HEADS, -1))[:, order].flatten(1)
    mine, its = layer.gates[0].shares.map, other.gates[0].shares.map
    its.weight.data, its.bias.data = mine.weight.data[order], mine.bias.data[order]
    close(other(x), layer(x))


@pytest.mark.parametrize("write", ["", "sla_write + "])
@pytest.mark.parametrize("base", ["features + {}linear + head_norm + sla", "{}retention + sla", "{}softmax + sla"])
def test_decode(base, write):
    layer, x = make(base.format(write)), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


def test_the_gate_stands_behind_the_norm():
    """Twice the scale of the gate is twice y; in front of a norm it would be cancelled, and that order is refused."""
    layer, x = make("retention + head_norm + sla"), batch()
    y = layer(x)
    norm, gate = layer.gates
    gate.shares.scale *= 2
    close(layer(x), 2 * y)
    norm.eps = 0.0
    axis = Axis(TOKENS, 0)
    flow, o = Flow(x, x, axis, axis, Links()), torch.randn(2, HEADS, TOKENS, DIM // HEADS).double()
    close(norm.gate(gate.gate(o, flow), flow), norm.gate(o, flow))
    with pytest.raises(
        SpecError, match=r"'head_norm' breaks 'head sizes'.*which 'sla' relies on.*head_norm before sla"
    ):
        Spec.parse("retention + sla + head_norm").resolve(Site())


@pytest.mark.parametrize("scan", ["linear", "linear(normaliser=false)", "retention", "gated_linear"])
def test_the_write_gate_written_out(scan):
    """Each token's key, and so what it adds to the state and to z, times G · κ."""
    layer, x = make(f"gqa(kv_heads=2) + features + sla_write + {scan}"), batch()
    base = twin(layer, f"gqa(kv_heads=2) + features + {scan}")
    kappa = layer.transforms[1].shares(x)
    close(kappa.sum(1), torch.full((2, TOKENS, 1), 2.0).double())
    kept = base.transforms[0].on_k
    base.transforms[0].on_k = lambda k, flow: kept(k, flow) * kappa
    close(layer(x), base(x))
    layer.transforms[1].shares.map.weight.data.zero_()
    layer.transforms[1].shares.map.bias.data.zero_()
    close(layer(x), twin(layer, str(base.spec))(x))


def test_the_write_gate_survives_a_norm():
    """It changes from token to token, so that a norm of the head's output does not take it away."""
    layer, x = make("sla_write + retention + head_norm"), batch()
    differ(layer(x), twin(layer, "retention + head_norm")(x))


def test_on_softmax_heads():
    layer, x = make("sla_write + rope(none) + sla"), batch()
    q, k, v = (heads_of(f(x), HEADS) for f in (layer.project.q_proj, layer.project.k_proj, layer.project.v_proj))
    k = k * layer.transforms[0].shares(x)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True) * gate_of(layer).shares(x)
    close(layer(x), layer.project.o_proj(o.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    ("spec", "extra"),
    [
        ("retention + sla", HEADS * (DIM + 1)),
        ("gqa(kv_heads=2) + sla_write + retention", 2 * (DIM + 1)),
        ("gqa(kv_heads=2) + sla_write + retention + sla", (2 + HEADS) * (DIM + 1)),
    ],
)
def test_cost(spec, extra):
    """D·H + H numbers a gate, and nothing cached."""
    cost, layer = make(spec).spec.cost(DIM, HEADS), make(spec)
    base = make("gqa(kv_heads=2) + retention" if "kv_heads" in spec else "retention").spec.cost(DIM, HEADS)
    assert sum(p.numel() for p in layer.parameters()) == cost.parameters == base.parameters + extra
    assert cost.cache_bytes(7) == base.cache_bytes(7)


def test_presets():
    assert str(Spec.parse("softmax-linear-attention")) == (
        "gated_linear + head_norm + sla + output_gate(activation=silu)"
    )
    assert str(Spec.parse("softmax-linear-attention(base=retention, gate=both)")) == (
        "sla_write + rope(pairing=interleaved) + retention + head_norm(gain=false) + sla + output_gate(activation=silu)"
    )
    for line in ("softmax-linear-attention(base=gated_delta)", "softmax-linear-attention(gate=write)"):
        layer, x = make(line), batch()
        close(decoded(layer, x, 4), layer(x))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sla_write + delta", "'delta' breaks 'key lengths'.*which 'sla_write' relies on"),
        ("softmax-linear-attention(base=gated_delta, gate=write)", "'delta' breaks 'key lengths'"),
        ("sla_write + qk-norm", "'qk-norm' breaks 'key lengths'.*qk-norm before sla_write"),
        ("mla + sla_write", "'sla_write' needs 'cached heads'.*which 'mla' breaks"),
        ("sla + moh(top=2) + head_norm", "'head_norm' breaks 'head sizes'"),
    ],
)
def test_what_they_exclude(line, said):
    with pytest.raises(SpecError, match=said):
        Spec.parse(line).resolve(Site())
