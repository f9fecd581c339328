"""Oracles of `cca`."""

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
    weights,
)

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.core.flow import Flow, Links
from manyheads.core.mask import Axis

WIDTH, KV = 4, 2


def spec(extra="", kv=KV, after=""):
    return f"cca(kv_heads={kv}, head_dim={WIDTH}{extra}){after}"


def projected(layer, x):
    """z `[B, n, T, d]`, before the convolutions."""
    p = layer.project
    return heads_of(torch.cat([p.q_proj(x), p.k_proj(x)], -1), p.heads + p.kv_heads)


def convolved(layer, z):
    """Both convolutions by `conv1d`, padded once."""
    a, b, n = layer.project.depthwise, layer.project.headwise, z.shape[1]
    flat = z.transpose(2, 3).flatten(1, 2)
    flat = F.pad(flat, (len(a.weight) + len(b.weight) - 2, 0))
    first = a.weight.flip(0).squeeze(2).permute(1, 2, 0).reshape(n * WIDTH, 1, -1)
    second = b.weight.flip(0).permute(1, 3, 2, 0).reshape(n * WIDTH, WIDTH, -1)
    flat = F.conv1d(flat, first, a.bias.flatten(), groups=n * WIDTH)
    flat = F.conv1d(flat, second, b.bias.flatten(), groups=n)
    return flat.unflatten(1, (n, WIDTH)).transpose(2, 3)


def means(layer, z):
    heads, kv = layer.project.heads, layer.project.kv_heads
    q, k = z[:, :heads], z[:, heads:]
    m = (q + k.repeat_interleave(heads // kv, 1)) / 2
    return torch.cat([m, m.unflatten(1, (kv, -1)).mean(2)], 1)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True) * WIDTH**0.5


def values(layer, x):
    p = layer.project
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    return heads_of(torch.cat([p.v_proj(x), p.v_shift_proj(before)], -1), p.kv_heads)


def attended(layer, y, v, turn=rope):
    p = layer.project
    q, k = unit(y[:, : p.heads]), unit(y[:, p.heads :]) * p.temperature
    k, v = (t.repeat_interleave(p.heads // p.kv_heads, 1) for t in (k, v))
    return join(weights(turn(q), turn(k), WIDTH**-0.5) @ v, p.o_proj)


def rewired(layer, **changes):
    return twin(layer, str(layer.spec), **{f"project__{name}": value for name, value in changes.items()})


def silent(layer):
    """All filters and their biases zero."""
    p = layer.project
    tensors = {f"{m}__{n}": getattr(getattr(p, m), n) for m in ("depthwise", "headwise") for n in ("weight", "bias")}
    return rewired(layer, **{name: torch.zeros_like(t) for name, t in tensors.items()})


def identity(layer):
    """Both convolutions pass the current row on."""
    p = layer.project
    first, second = torch.zeros_like(p.depthwise.weight), torch.zeros_like(p.headwise.weight)
    first[0], second[0] = 1, torch.eye(WIDTH)
    return rewired(
        silent(layer), depthwise__weight=first, headwise__weight=second, temperature=torch.ones_like(p.temperature)
    )


@pytest.mark.parametrize("taps", [(2, 2), (3, 1), (1, 1), (3, 4)])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_written_out(kv, taps):
    layer, x = make(spec(f", taps=[{taps[0]}, {taps[1]}]", kv)), batch()
    z = projected(layer, x)
    close(layer(x), attended(layer, convolved(layer, z) + means(layer, z), values(layer, x)))


def test_two_convolutions_are_one():
    """Taps B₀A₀, B₀A₁ + B₁A₀, B₁A₁ and the bias (B₀ + B₁) b_A + b_B, at every token, the first included."""
    layer, x = make(spec()), batch()
    z = projected(layer, x)
    a, b = layer.project.depthwise, layer.project.headwise
    a1, a0 = (w.transpose(1, 2) for w in a.weight)  # a column for each channel; index 0 is the current row
    b1, b0 = b.weight
    taps = (a0 * b0, a1 * b0 + a0 * b1, a1 * b1)
    bias = a.bias @ (b0 + b1) + b.bias
    old, middle = (F.pad(z, (0, 0, lag, 0))[:, :, :TOKENS] for lag in (2, 1))
    close(old @ taps[0] + middle @ taps[1] + z @ taps[2] + bias, convolved(layer, z))


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_decode(kv):
    layer, x = make(spec(kv=kv)), batch()
    for block in (1, 2, 4):
        close(decoded(layer, x, block), layer(x))


def test_silent_convolutions_leave_the_means():
    layer, x = silent(make(spec())), batch()
    close(layer(x), attended(layer, means(layer, projected(layer, x)), values(layer, x)))


def test_silent_convolutions_without_shift_are_grouped_attention_on_averaged_projections():
    layer, x = silent(make(spec(", shift=false"))), batch()
    layer = rewired(layer, temperature=torch.ones(KV, 1, 1).double())
    p, each = layer.project, HEADS // KV
    q = p.q_proj.weight.detach().unflatten(0, (KV, each, WIDTH))
    k = p.k_proj.weight.detach().unflatten(0, (KV, WIDTH))
    averaged = ((q + k[:, None]) / 2).flatten(0, 2), ((q.mean(1) + k) / 2).flatten(0, 1)
    base = twin(
        layer, f"gqa(kv_heads={KV}, head_dim={WIDTH}) + qk-norm(eps=0.0)", project__q_proj__weight=averaged[0],
        project__k_proj__weight=averaged[1], **gains(),
    )  # fmt: skip
    close(layer(x), base(x))


def gains():
    return {f"transforms__0__{n}_gain": torch.ones(WIDTH).double() for n in "qk"}


def test_identity_convolutions_alone_are_grouped_attention_with_qk_norm():
    layer, x = identity(make(spec(", mean=false, shift=false"))), batch()
    base = twin(layer, f"gqa(kv_heads={KV}, head_dim={WIDTH}) + qk-norm(eps=0.0)", **gains())
    close(layer(x), base(x))


def test_the_norm_forgets_the_size_of_projections_and_biases():
    layer, x, p = make(spec()), batch(), make(spec()).project
    grown = {f"{n}_proj__weight": 3 * getattr(p, f"{n}_proj").weight.detach() for n in "qk"}
    biases = {f"{n}__bias": 3 * getattr(p, n).bias.detach() for n in ("depthwise", "headwise")}
    close(rewired(layer, **grown, **biases)(x), layer(x))
    differ(rewired(layer, **grown)(x), layer(x))


def test_temperature_zero_averages_the_values():
    layer, x = rewired(make(spec()), temperature=torch.zeros(KV, 1, 1).double()), batch()
    v = values(layer, x).repeat_interleave(HEADS // KV, 1)
    mean = v.cumsum(2) / torch.arange(1, TOKENS + 1)[:, None]
    close(layer(x), join(mean, layer.project.o_proj))
    cold = Attention(spec(", temperature=0.0"), DIM, HEADS)
    assert not cold.project.temperature.any() and (Attention(spec(), DIM, HEADS).project.temperature == 1).all()


def test_reach():
    """Nothing from later tokens; the query feels two tokens back by itself, and no more."""
    layer, x = make(spec()), batch().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 5].sum(), x)
    assert not gradient[:, 6:].any()
    (gradient,) = torch.autograd.grad(queries(layer, x)[:, :, 5].pow(3).sum(), x)
    assert not gradient[:, :3].any() and not gradient[:, 6:].any()
    assert (gradient[:, 3:6].abs().amax((0, 2)) > 1e-6).all()


def queries(layer, x):
    axis = Axis(x.shape[1], 0)
    return layer.project.queries(Flow(x, x, axis, axis, Links()))


def test_scores_are_bounded():
    layer, x = make(spec()), 50 * batch()
    rows = {}
    write = layer.project.write
    layer.project.write = lambda flow: rows.setdefault("written", write(flow))
    layer(x)
    q, k = rope(queries(layer, x)), rope(rows["written"]["k"])
    scores = q @ k.repeat_interleave(HEADS // KV, 1).transpose(-1, -2) * WIDTH**-0.5
    bound = WIDTH**0.5 * layer.project.temperature.abs().repeat_interleave(HEADS // KV, 0)
    assert (scores.abs() <= bound + 1e-9).all() and (scores.abs() > 0.5 * bound).any()


def test_the_mean_of_as_many_keys_as_queries_is_one():
    layer, x = make(spec(kv=HEADS)), batch()
    m = layer.project._mean(projected(layer, x))
    close(m[:, :HEADS], m[:, HEADS:])


def test_which_values_are_late():
    """Half of the channels of all heads: whole heads where they are even, half of the head where there is one."""
    for kv, late in ((4, [2, 3]), (2, [1]), (1, [0])):
        layer, x = make(spec(kv=kv)), batch()
        v, other = values(layer, x), values(layer, torch.cat([x[:, :4] + 1, x[:, 4:]], 1))
        moved = (v[:, :, 4] != other[:, :, 4]).any(0)
        assert moved.any(-1).nonzero().flatten().tolist() == late
        assert moved.sum() == kv * WIDTH // 2


def test_padding_within_a_pass_is_gone_past():
    """Right padding of a prefill: what follows continues from the last real token."""
    layer, x, cache = make(spec()), batch(), Cache()
    valid = torch.tensor([[True] * 5, [True, True, False, False, False]])
    with torch.no_grad():
        layer(x[:, :5], mask=valid, cache=cache)
        rest = layer(x[:, 5:], cache=cache)
    close(rest[0], layer(x)[0, 5:])
    close(rest[1], layer(torch.cat([x[1:, :2], x[1:, 5:]], 1))[0, 2:])


def test_documents_packed_across_passes():
    layer, x, cuts = make(spec()), batch(size=1), (4, 5)
    alone = torch.cat([layer(part) for part in x.split(cuts, 1)], 1)
    place = torch.cat([torch.arange(n) for n in cuts])[None]
    segment = torch.arange(2).repeat_interleave(torch.tensor(cuts))[None]
    for block in (1, 3, 4, 7):
        cache, outs = Cache(), []
        for at in range(0, TOKENS, block):
            cut = slice(at, at + block)
            part = x[:, cut]
            axis = Axis(part.shape[1], at, given_position=place[:, cut], segment=segment[:, cut])
            with torch.no_grad():
                outs.append(layer(part, positions=axis, cache=cache))
        close(torch.cat(outs, 1), alone)


def test_forks_carry_the_state():
    layer, x, cache = make(spec()), batch(), Cache()
    decoded(layer, x[:, :5], 5, cache)
    fork = cache.fork(torch.tensor([1, 0]))
    close(decoded(layer, x[:, 5:].flip(0), 1, fork), layer(x)[:, 5:].flip(0))
    close(decoded(layer, x[:, 5:], 2, cache), layer(x)[:, 5:])


def test_a_reader_with_state_keeps_the_cache_from_going_back():
    """The reader holds no rows, but its convolution has moved on."""
    cache = Cache()
    owner, reader, links = make("gqa", site=Site(0, 2)), make("cca(head_dim=6)", site=Site(1, 2, kv_source=0)), Links()
    owner(batch(), cache=cache, links=links)
    assert cache.is_croppable
    reader(batch(), cache=cache, links=links)
    with pytest.raises(ValueError, match=r"cannot go back 1 tokens: the state 'cca.qk' keeps no history"):
        cache.rollback(1)


@pytest.mark.parametrize(("kv", "taps"), [(1, (2, 2)), (2, (2, 2)), (4, (3, 1))])
def test_cost(kv, taps):
    layer, cache = make(spec(f", taps=[{taps[0]}, {taps[1]}]", kv)), Cache()
    n, d = HEADS + kv, WIDTH
    weights_ = 2 * DIM * HEADS * d + 2 * DIM * kv * d
    filters = n * d * taps[0] + n * d * d * taps[1] + 2 * n * d + kv
    assert sum(p.numel() for p in layer.parameters()) == weights_ + filters
    decoded(layer, batch(size=1), 4, cache)
    assert cache.bytes() == 8 * (TOKENS * 2 * kv * d + 2 * n * d + kv * d // 2)
    held = sum(t.untyped_storage().nbytes() for t in cache.site(0).state.values())
    assert held == 8 * (2 * n * d + kv * d // 2), "the state holds more than itself in memory"


def test_the_authors_sizes():
    """ZAYA1-8B: 5.24 M weights and 0.33 M of filters to multi-head attention's 16.8 M, and an eighth of its cache."""
    line = "cca(kv_heads=2) + rope(base=5e6, fraction=0.5)"
    cost, plain = Spec.parse(line).cost(2048, 8), Spec.parse("gqa").cost(2048, 8)
    filters = 1280 * 2 + 10 * 128**2 * 2 + 2 * 1280 + 2
    assert cost.parameters == 5_242_880 + filters and plain.parameters == 16_777_216
    assert cost.cache_floats * 8 == plain.cache_floats and cost.pair_flops * 2 == plain.pair_flops
    with torch.device("meta"):
        layer = Attention(line, 2048, 8)
    assert layer.layout.rotary == slice(0, 64) and layer.project.width == 128


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cca(kv_heads=3)", "kv_heads may be [1, 2, 4]"),
        ("cca(kv_heads=1, head_dim=5)", "one of them must be even"),
        ("cca(head_dim=0)", "head_dim=0"),
        ("cca(kv_heads=0)", "kv_heads=0"),
        ("cca(taps=[2])", "such as [2, 2]"),
        ("cca(taps=[0, 2])", "such as [2, 2]"),
    ],
)
def test_refusals(line, said):
    with pytest.raises(OptionError) as error:
        Attention(line, DIM, HEADS)
    assert said in str(error.value) and "cca" in str(error.value)
    with pytest.raises(OptionError, match="give head_dim"):
        Attention("cca", 20, 4)


@pytest.mark.parametrize(
    ("line", "site", "said"),
    [
        ("cca", Site(causal=False), "needs 'causal'"),
        ("cca", Site(cross=True), "needs 'self'"),
        ("cca + qk-norm", Site(), "both take the slot 'qk-norm'"),
    ],
)
def test_what_it_excludes(line, site, said):
    with pytest.raises(SpecError, match=said):
        Attention(line, DIM, HEADS, site=site)


def test_explicit_masks_still_hide_keys():
    """A mask hides key rows, which the convolution has made of three tokens."""
    layer, x = make(spec()), batch()
    seen = triangle()[None, None].clone()
    seen[..., 1:3] = False
    differ(layer(x, mask=seen), layer(x))
