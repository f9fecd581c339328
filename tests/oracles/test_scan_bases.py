"""Oracles of the scans: linear attention, retention, gated linear attention, the delta rule, with and without decay."""

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
from manyheads.bench.timing import kept_for_backward
from manyheads.core.mask import Axis
from manyheads.core.scan import Stream, decayed_sum, delta_sum

WIDTH = DIM // HEADS
FRESH = Stream(None, None, None)
BARE = [
    "linear(normaliser=false)",
    "features + linear",
    "retention(first=1)",
    "gated_linear(rank=3)",
    "delta",
    "delta(gated=true)",
    "delta(gated=true, negative=true)",
]
SCANS = [*BARE, "gqa(kv_heads=2) + retention", "gqa(kv_heads=2, v_dim=5) + gated_linear", "gqa(kv_heads=1) + delta"]


def rows(tokens=TOKENS, heads=4, groups=2, width=6, values=5, seed=0):
    """q, k, v of random heads, and β, a log decay a head, a log decay a channel; strong and weak decays."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, h, tokens, w).double() for h, w in ((heads, width), (groups, width), (groups, values)))
    shape = (2, groups, tokens)
    log = lambda *shape: -torch.exp(2 * torch.randn(shape)).double()
    return q, k, v, torch.rand(shape).double(), log(*shape), log(*shape, width)


def defined(q, k, v, decay=None, beta=None, state=None):
    """S_t = diag(α_t) (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ, or without the product and β = 1, as it is written."""
    each = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(each, 1) for t in (k, v))
    b, h, t, width = q.shape
    alpha = torch.ones_like(k) if decay is None else (decay if decay.ndim == 4 else decay[..., None]).exp()
    alpha = alpha.repeat_interleave(h // alpha.shape[1], 1).expand(b, h, t, width)
    state, out = torch.zeros(b, h, width, v.shape[-1]).double() if state is None else state, []
    for at in range(t):
        kt, vt = k[:, :, at, :, None], v[:, :, at, None]
        state = alpha[:, :, at, :, None] * state
        if beta is None:
            state = state + kt * vt
        else:
            bt = beta.repeat_interleave(each, 1)[:, :, at, None, None]
            state = (torch.eye(width).double() - bt * kt * kt.mT) @ state + bt * kt * vt
        out.append((q[:, :, at, None] @ state)[:, :, 0])
    return torch.stack(out, 2), state[:, ::each]


def kernel(name, chunk=64, stream=FRESH, cut=slice(None), **sizes):
    """One of the recurrences on random rows: what the kernel gives, and what the definition does."""
    q, k, v, beta, log, logs = (t[:, :, cut] for t in rows(**sizes))
    if name == "delta" or name == "gated delta":
        k, decay = F.normalize(k, dim=-1), None if name == "delta" else log
        return delta_sum(q, k, v, beta, decay, stream, chunk=chunk), defined(q, k, v, decay, beta)
    decay = {"sum": None, "decay a head": log, "decay a channel": logs}[name]
    return decayed_sum(q, k, v, decay, stream, chunk=chunk), defined(q, k, v, decay)


KERNELS = ["sum", "decay a head", "decay a channel", "delta", "gated delta"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 64])
@pytest.mark.parametrize("name", KERNELS)
def test_chunks_of_any_length_are_the_recurrence(name, chunk):
    (o, state), (want, last) = kernel(name, chunk, tokens=13)
    close(o, want)
    close(state, last)


@pytest.mark.parametrize("name", KERNELS)
def test_long_and_carried_on(name):
    """Several chunks of the usual length; in pieces, and token by token, with the state carried on."""
    (o, state), (want, last) = kernel(name, tokens=150)
    close(o, want)
    close(state, last)
    carried, outs = None, []
    for cut in (slice(0, 70), slice(70, 71), slice(71, 150)):
        (o, carried), _ = kernel(name, stream=Stream(carried, None, None), cut=cut, tokens=150)
        outs.append(o)
    close(torch.cat(outs, 2), want)
    close(carried, last)


@pytest.mark.parametrize("name", KERNELS)
def test_padding_leaves_the_state_bit_equal(name):
    (_, state), _ = kernel(name)
    for cut in (slice(0, 1), slice(0, 7)):
        none = torch.zeros(2, TOKENS, dtype=torch.bool)[:, cut]
        (_, after), _ = kernel(name, stream=Stream(state, none, None), cut=cut, seed=1)
        assert torch.equal(after, state)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients(name):
    inputs = [t[:1, :, :7].requires_grad_() for t in rows(heads=2, width=3, values=2)]

    def run(q, k, v, beta, log, logs):
        if "delta" in name:
            return delta_sum(q, F.normalize(k, dim=-1), v, beta, None if name == "delta" else log, FRESH, chunk=4)
        return decayed_sum(q, k, v, {"sum": None, "decay a head": log}.get(name, logs), FRESH, chunk=4)

    assert torch.autograd.gradcheck(run, inputs)


def test_sum_over_earlier_tokens():
    """o_t = Σ_{s≤t} Σ_c q_tc k_sc (Π_{s<r≤t} α_rc) v_s, with decays written out as products."""
    q, k, v, _, _, logs = rows(heads=2)
    alpha, o = logs.exp(), torch.zeros(2, 2, TOKENS, 5).double()
    for t in range(TOKENS):
        for s in range(t + 1):
            left = alpha[:, :, s + 1 : t + 1].prod(2)
            o[:, :, t] += (q[:, :, t] * k[:, :, s] * left).sum(-1, keepdim=True) * v[:, :, s]
    close(decayed_sum(q, k, v, logs, FRESH, chunk=4)[0], o)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_decay_of_a_channel_is_too_strong(dtype):
    """Channels that forget at once, and never, in one chunk of float32: a quotient of products would overflow."""
    q, k, v, _, _, logs = (t.to(dtype) for t in rows(tokens=64))
    logs = torch.where(torch.arange(6) < 3, 1000 * logs, 0 * logs)
    logs[:, :, 40:, 0] = -torch.inf
    inputs = [t.requires_grad_() for t in (q, k, v, logs)]
    o, state = decayed_sum(*inputs, FRESH)
    want, last = defined(*(t.double() for t in (q, k, v, logs)))
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    close(o.double(), want, tolerance)
    close(state.double(), last, tolerance)
    for gradient in torch.autograd.grad(o.pow(2).sum(), inputs):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("decays", [0, 1])
def test_without_decay_it_is_the_sum(decays):
    """γ = 1, α = 1; and β = 0 leaves nothing of a delta rule."""
    q, k, v, beta, log, logs = rows()
    none = torch.zeros_like((log, logs)[decays])
    for got, want in zip(decayed_sum(q, k, v, none, FRESH), decayed_sum(q, k, v, None, FRESH), strict=True):
        close(got, want)
    close(delta_sum(q, k, v, beta, 0 * log, FRESH)[0], delta_sum(q, k, v, beta, None, FRESH)[0])
    assert not delta_sum(q, k, v, 0 * beta, None, FRESH)[0].any()


def test_one_decay_for_all_channels():
    q, k, v, _, log, _ = rows()
    close(decayed_sum(q, k, v, log[..., None].expand(-1, -1, -1, 6), FRESH)[0], decayed_sum(q, k, v, log, FRESH)[0])


def test_the_delta_rule_stores_and_overwrites():
    """β = 1: as many orthonormal keys as a head is wide are kept exactly; a key that comes again loses its old value.

    A sum keeps both.
    """
    keys = torch.linalg.qr(torch.randn(WIDTH, WIDTH).double()).Q[None, None]
    old, new = torch.randn(2, 1, 1, WIDTH, 5).double()
    beta = torch.ones(1, 1, WIDTH).double()
    _, state = delta_sum(keys, keys, old, beta, None, FRESH)
    close(keys @ state, old)
    _, state = delta_sum(keys, keys, new, beta, None, Stream(state, None, None))
    close(keys @ state, new)
    again = torch.cat([keys, keys[:, :, :2]], 2)
    both = torch.cat([old, new[:, :, :2]], 2)
    _, state = delta_sum(again, again, both, torch.ones(1, 1, WIDTH + 2).double(), None, FRESH)
    close(keys @ state, torch.cat([new[:, :, :2], old[:, :, 2:]], 2))
    _, state = decayed_sum(again, again, both, None, FRESH)
    close(keys[:, :, :2] @ state, (old + new)[:, :, :2])


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("spec", SCANS)
def test_decode(spec, block):
    layer, x = make(spec), batch()
    close(decoded(layer, x, block), layer(x))


@pytest.mark.parametrize("spec", SCANS)
def test_documents(spec):
    """Documents packed into a row, also where a cache goes on with the last of them, are what they are alone."""
    layer, x, cache = make(spec), batch(), Cache()
    place = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
    segment = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2]])
    axis = Axis(TOKENS, 0, given_position=place, segment=segment)
    want = torch.cat([layer(part) for part in x.split([4, 1, 4], 1)], 1)
    close(layer(x, positions=axis), want)
    with torch.no_grad():
        outs = [layer(x[:, cut], positions=axis[cut], cache=cache) for cut in (slice(0, 2), slice(2, 7), slice(7, 9))]
    close(torch.cat(outs, 1), want)


@pytest.mark.parametrize("spec", SCANS)
def test_padding_anywhere(spec):
    layer, x = make(spec), batch()
    real = torch.tensor([True, True, False, True, False, False, True, True, True])
    close(layer(x, mask=real.expand(2, -1))[:, real], layer(x[:, real]))


@pytest.mark.parametrize("spec", [spec for spec in BARE if "retention" not in spec])
def test_query_heads_of_a_group_read_one_state(spec):
    """Two key heads of four query heads: the layer whose key heads are there twice gives the same."""
    layer, cache, x = make(f"gqa(kv_heads=2) + {spec}"), Cache(), batch()
    decoded(layer, x, 4, cache)
    assert cache.site(0).state["scan"].shape[1] == 2
    whole = twin(layer, spec)
    for name, weight in layer.named_parameters():
        other = whole.get_parameter(name)
        if other.shape != weight.shape:
            other.data = weight.data.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    close(whole(x), layer(x))


def test_a_rate_for_each_key_head():
    layer, x = make("gqa(kv_heads=2) + retention(first=1)"), batch()
    q, k, v = projected(layer, x)
    gamma = torch.tensor([1 / 2, 3 / 4]).double().log()[:, None].expand(1, 2, TOKENS)
    close(layer(x), join(defined(q * WIDTH**-0.5, k, v, gamma)[0], layer.project.o_proj))


def projected(layer, x):
    p, heads = layer.project, layer.layout
    return (heads_of(f(x), n) for f, n in ((p.q_proj, heads.q), (p.k_proj, heads.kv), (p.v_proj, heads.kv)))


@pytest.mark.parametrize("kind", ["elu", "relu", "softmax"])
def test_linear_attention_written_out(kind):
    """Weights are products of feature maps over their sum; a query without any weight reads zero."""
    layer, x = make(f"linear-attention(map={kind})"), batch()
    phi = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "softmax": lambda x: x.softmax(-1)}[kind]
    q, k, v = projected(layer, x)
    products = (phi(q) @ phi(k).mT) * triangle()
    total = products.sum(-1, keepdim=True)
    close(layer(x), join(torch.where(total == 0, 0.0, products / total) @ v, layer.project.o_proj))
    layer.project.q_proj.weight.data.zero_()
    if kind == "relu":
        assert not layer(x).any()
    else:
        assert layer(x).any()


def test_retnet_written_out():
    layer, x = make("retnet"), batch()
    q, k, v = projected(layer, x)
    assert str(layer.spec) == (
        "gqa + rope(pairing=interleaved) + retention + head_norm(gain=false) + output_gate(activation=silu)"
    )
    layer = twin(layer, "rope + retention + head_norm(gain=false) + output_gate(activation=silu)")
    gamma = 1 - 2 ** -(5.0 + torch.arange(HEADS))
    distance = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).clamp_min(0)
    decay = gamma.double()[:, None, None] ** distance * triangle()
    o = (rope(q) @ rope(k).mT * WIDTH**-0.5 * decay) @ v
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    gate = F.silu(x @ layer.gates[1].g_proj.weight.T)
    close(layer(x), layer.project.o_proj(o.transpose(1, 2).flatten(2) * gate))


def test_gated_linear_attention_written_out():
    layer, x = make("gated-linear-attention(rank=3, tau=2.0)"), batch()
    q, k, v = projected(layer, x)
    w1, w2 = layer.scan.decay
    alpha = heads_of(torch.sigmoid(x @ w1.weight.T @ w2.weight.T + w2.bias) ** 0.5, HEADS)
    o, _ = defined(q * WIDTH**-0.5, k, v, alpha.log())
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.gates[0].gain
    close(layer(x), layer.project.o_proj(o.transpose(1, 2).flatten(2) * F.silu(layer.gates[1].g_proj(x))))


@pytest.mark.parametrize("preset", ["delta_net", "gated_delta_net", "gated_delta_net(negative=true)"])
def test_delta_nets_written_out(preset):
    layer, x = make(preset), batch()
    conv, scan = layer.transforms[0], layer.scan

    def short(name, u):
        weight = conv.get_submodule(name).weight.flip(0).permute(1, 3, 2, 0).reshape(DIM, 1, 4)
        y = F.conv1d(F.pad(u.transpose(1, 2).flatten(2).mT, (3, 0)), weight, groups=DIM)
        return heads_of(F.silu(y).mT, HEADS)

    q, k, v = (short(name, u) for name, u in zip("qkv", projected(layer, x), strict=True))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    beta = scan.beta(x).sigmoid().mT * (2 if "negative" in preset else 1)
    decay = None
    if preset != "delta_net":
        decay = -(F.softplus(scan.decay(x)) * scan.rate.exp()).mT
    o, _ = defined(q * WIDTH**-0.5, k, v, decay, beta)
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.gates[0].gain
    o = o.transpose(1, 2).flatten(2)
    close(layer(x), layer.project.o_proj(o if preset == "delta_net" else o * F.silu(layer.gates[1].g_proj(x))))


def test_lengths_of_keys_do_not_reach_a_delta_rule():
    layer, x = make("delta"), batch()
    y = layer(x)
    layer.project.k_proj.weight.data *= 7
    close(layer(x), y)
    layer.project.v_proj.weight.data *= 7
    differ(layer(x), y)


@pytest.mark.parametrize("spec", SCANS)
def test_a_state_in_float32_under_bfloat16(spec):
    layer, cache, x = make(spec).bfloat16(), Cache(), batch(40).bfloat16()
    steps = decoded(layer, x, 1, cache)
    assert cache.site(0).state["scan"].dtype == torch.float32 and steps.dtype == torch.bfloat16
    error = (steps.float() - layer(x).float()).norm() / layer(x).float().norm()
    assert error < 0.02


def test_starts():
    """A decay of GLA from near one; of a gated delta rule between e^(-16 · 0.1) and one, β one half."""
    torch.manual_seed(0)
    layer = Attention("gated_linear", 64, 4)
    alpha = (F.logsigmoid(layer.scan.decay(torch.zeros(1, 64))) / 16).exp()
    assert (alpha > 0.93).all() and (alpha < 1).all()
    layer = Attention("delta(gated=true)", 64, 32)
    alpha = torch.exp(-layer.scan.rate.exp() * F.softplus(layer.scan.decay.bias))
    assert (alpha > 0.2).all() and (alpha < 1).all() and alpha.max() - alpha.min() > 0.05


@pytest.mark.parametrize(
    ("spec", "parameters", "state"),
    [
        ("linear(normaliser=false)", 0, HEADS * WIDTH * WIDTH),
        ("linear-attention", 0, HEADS * WIDTH * (WIDTH + 1)),
        ("gqa(kv_heads=2, v_dim=5) + retention", 0, 2 * WIDTH * 5),
        ("retnet", DIM * DIM, HEADS * WIDTH * WIDTH),
        ("gqa(kv_heads=2) + gated_linear(rank=3)", 3 * DIM + 4 * 2 * WIDTH, 2 * WIDTH * WIDTH),
        ("gated-linear-attention(rank=3)", 3 * DIM + 4 * DIM + WIDTH + DIM * DIM, HEADS * WIDTH * WIDTH),
        ("delta", DIM * HEADS, HEADS * WIDTH * WIDTH),
        ("delta_net", DIM * HEADS + WIDTH + 3 * 4 * DIM, HEADS * WIDTH * WIDTH + 3 * 3 * DIM),
        (
            "gated_delta_net",
            2 * (DIM * HEADS + HEADS) + WIDTH + 3 * 4 * DIM + DIM * DIM,
            HEADS * WIDTH * WIDTH + 3 * 3 * DIM,
        ),
    ],
)
def test_cost(spec, parameters, state):
    """A state of d_k · d_v numbers a key head, however many tokens there are."""
    layer = make(spec)
    base = make(next((part for part in spec.split(" + ") if part.startswith("gqa")), "gqa"))
    counted = sum(p.numel() for p in layer.parameters())
    assert counted - base.spec.cost(DIM, HEADS).parameters == parameters
    for tokens in (4, 12):
        cache = Cache()
        decoded(layer, batch(tokens, size=1), 5, cache)
        assert cache.bytes() == 8 * state == layer.spec.cost(DIM, HEADS).cache_bytes(tokens, 8)


def test_memory_is_linear_in_the_length():
    """What a pass saves for its gradient, at one length and at twice that."""

    def saved(name, tokens):
        inputs = [t.requires_grad_() for t in rows(tokens)]
        q, k, v, beta, log, logs = inputs
        if name == "delta":
            return kept_for_backward(lambda: delta_sum(q, k, v, beta, log, FRESH))
        return kept_for_backward(lambda: decayed_sum(q, k, v, logs, FRESH))

    for name in ("decay a channel", "delta"):
        assert 0 < saved(name, 1024) < 2.1 * saved(name, 512)


@pytest.mark.parametrize(
    ("line", "site", "said"),
    [
        ("linear", Site(), "'linear' needs 'positive'.*features as the last transform"),
        ("features + kha + linear", Site(), "which 'kha' breaks"),
        ("features + rope + linear", Site(), "which 'rope' breaks"),
        ("features(map=silu) + linear", Site(), "needs 'positive'"),
        ("features + retention + linear(normaliser=false)", Site(), "both take the slot 'scan'"),
        ("retention", Site(causal=False), "needs 'causal'"),
        ("delta + talking_heads", Site(), "needs 'scores'"),
        ("gated_linear + softmax", Site(), "needs 'scores'"),
        ("window(3) + delta", Site(), "'delta' needs 'bare scores'.*'window' breaks"),
        ("retention", Site(1, 2, kv_source=0), "needs 'own rows'"),
    ],
)
def test_what_they_exclude(line, site, said):
    with pytest.raises(SpecError, match=said):
        Spec.parse(line).resolve(site)


def test_what_goes_with_the_normaliser():
    for line in ("kha + features + linear", "features + rope(none) + linear", "features + linear + head_norm"):
        close(decoded(make(line), x := batch()), make(line)(x))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("retention(first=0)", "retention: first=0"),
        ("gated_linear(rank=0)", "gated_linear: rank=0.*at least 1"),
        ("gated_linear(tau=0.0)", "gated_linear: tau=0.0.*positive"),
    ],
)
def test_refusals(line, said):
    with pytest.raises(OptionError, match=said):
        Attention(line, DIM, HEADS)
