"""Hymba: attention and state-space heads under one output, windows that keep the first tokens, meta tokens."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin
from torch import nn

from manyheads import Attention, Cache, OptionError, Site, Spec
from manyheads.core.mask import Axis
from manyheads.stack import Decoder, Stack
from manyheads.testing import Case, check, shared_rows

HYBRID = "hymba(kv_heads=2, head_dim=6, v_dim=12, state=5)"


def rms(x):
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def ssm_written_out(gate, x):
    """silu(z)-gated Mamba heads whose d, B and C are normed, token by token."""
    ssm = gate.ssm
    inner, taps = F.pad(gate.u_proj(x), (0, 0, 3, 0)), ssm.conv.weight.flatten(1)
    u = F.silu(ssm.conv.bias.flatten() + sum(taps[s] * inner[:, 3 - s : inner.shape[1] - s] for s in range(4)))
    parts = (u @ ssm.from_inner[0]).split(ssm.widths, -1)
    low, b, c = (rms(part) * norm.weight for part, norm in zip(parts, ssm.norms, strict=True))
    step = F.softplus(low @ ssm.to_step + ssm.dt_bias)
    h, ys = x.new_zeros(len(x), b.shape[-1], u.shape[-1]), []
    for t in range(x.shape[1]):
        h = (step[:, t, None] * -ssm.A_log.exp()).exp() * h + b[:, t, :, None] * (step * u)[:, t, None]
        ys.append((c[:, t, :, None] * h).sum(1) + ssm.skip * u[:, t])
    return torch.stack(ys, 1) * F.silu(gate.z_proj(x))


def attention_alone(layer, x):
    """What attention's heads say, side by side `[B, T, I]`."""
    heard = {}
    gate = layer.gates[0].gate
    layer.gates[0].gate = lambda o, flow: heard.setdefault("o", o)
    layer(x)
    layer.gates[0].gate = gate
    return heard["o"].transpose(1, 2).flatten(2)


def test_the_layer_written_out():
    layer, x = make(HYBRID), batch()
    gate = layer.gates[0]
    both = gate.gains[0] * rms(attention_alone(layer, x)) + gate.gains[1] * rms(ssm_written_out(gate, x))
    close(layer(x), layer.project.o_proj(both / 2))
    close(decoded(layer, x), layer(x))


@pytest.mark.parametrize("silent", [0, 1])
def test_one_side_alone(silent):
    layer, x = make(HYBRID), batch()
    gate = layer.gates[0]
    with torch.no_grad():
        gate.gains[silent] = 0
    if silent:
        plain = twin(layer, "gqa(kv_heads=2, head_dim=6, v_dim=12)")
        plain.project.o_proj = nn.Identity()
        close(layer(x), layer.project.o_proj(gate.gains[0] * rms(plain(x)) / 2))
    else:
        close(layer(x), layer.project.o_proj(gate.gains[1] * rms(ssm_written_out(gate, x)) / 2))


def test_a_step_of_zero_leaves_the_skip_path():
    layer, x = make(HYBRID), batch()
    ssm = layer.gates[0].ssm
    with torch.no_grad():
        ssm.to_step.zero_()
        ssm.dt_bias.fill_(-800.0)
        cache = Cache()
        layer(x, cache=cache)
    assert not cache.state(0)["ssm"].any()


@pytest.mark.parametrize("window", [1, 3, 8, 20])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_the_mask_by_brute_force(window, first):
    layer, x = make(f"gqa + window(size={window + 1}, first={first})"), batch(13)
    i, j = torch.arange(13)[:, None], torch.arange(13)[None]
    seen = (j <= i) & ((i - j <= window) | (j < first))
    close(layer(x), twin(layer, "gqa")(x, mask=seen[None, None]))
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))
    if window + 1 >= 13:
        close(layer(x), twin(layer, "gqa")(x))


@pytest.mark.parametrize("padding", [(0, 0), (0, 150), (3, 90)])
@pytest.mark.parametrize("block", [1, 17, 150])
def test_a_long_window_forgets_all_but_the_first(padding, block, monkeypatch):
    monkeypatch.setattr("manyheads.core.buffers.SLACK", 2)
    case = Case("gqa(kv_heads=2) + window(size=5, first=3)", tokens=260, padding=padding)
    layer, x, valid, cache, outs = case.layer(), case.x, case.valid, Cache(), []
    with torch.no_grad():
        full = layer(x, mask=valid)
        for first in range(0, 260, block):
            cut = slice(first, first + block)
            outs.append(layer(x[:, cut], mask=valid[:, cut], cache=cache))
    close(torch.cat(outs, 1)[valid], full[valid])
    if block < max(padding):
        assert cache.site(0).growing["k"].rows().shape[2] < 260
    if max(padding) == 0:
        assert cache.bytes() == 2 * layer.spec.cost(DIM, HEADS).cache_bytes(260, 8)
        assert layer.spec.cost(DIM, HEADS).cache_floats * 7 * 8 * 2 == cache.bytes()


def test_documents_behind_one_another_in_a_cache():
    layer, x, cache, outs = make("gqa + window(size=4, first=2)"), batch(200, size=1), Cache(), []
    segment = (torch.arange(200) // 110)[None]
    position = torch.cat([torch.arange(110), torch.arange(90)])[None]
    with torch.no_grad():
        for first in range(0, 200, 10):
            cut = slice(first, first + 10)
            axis = Axis(10, first, given_position=position[:, cut], segment=segment[:, cut])
            outs.append(layer(x[:, cut], positions=axis, cache=cache))
    close(torch.cat(outs, 1), torch.cat([layer(x[:, :110]), layer(x[:, 110:])], 1))


def test_going_back_over_first_tokens():
    layer, x, cache = make("gqa + window(size=3, first=4)"), batch(100), Cache()
    with torch.no_grad():
        full = layer(x)
        layer(x[:, :90], cache=cache)
        layer(x[:, :5], cache=cache)
        cache.rollback(5)
        close(layer(x[:, 90:], cache=cache), full[:, 90:])
        short = Cache()
        layer(x[:, :6], cache=short)
        short.rollback(4)
        close(layer(x[:, 2:], cache=short), full[:, 2:])


SPECS = (
    "gqa(kv_heads=2)", "gqa + window(4)", "gqa + window(size=4, first=3)", "mla + alibi",
    "hymba(kv_heads=2, head_dim=6, v_dim=12, state=5, window=3, meta=3)", "retention", "mamba(state=5)", "gqa + conv",
)  # fmt: skip


def model(specs, layers=2, meta=3, **options):
    torch.manual_seed(0)
    stack = Stack(specs, DIM, HEADS, layers, meta=meta, **options).double().eval()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stack


@pytest.mark.parametrize("spec", SPECS)
def test_meta_tokens_are_tokens_before_the_text(spec):
    stack, x = model(spec), batch(7)
    bare = Stack(spec, DIM, HEADS, 2).double().eval()
    bare.load_state_dict({name: value for name, value in stack.state_dict().items() if "meta" not in name})
    want = bare(torch.cat([stack.meta.tokens.expand(2, -1, -1), x], 1))[:, 3:]
    close(stack(x), want)


@pytest.mark.parametrize("spec", SPECS)
def test_meta_tokens_decode(spec):
    stack, x = model(spec), batch(9)
    full = stack(x)
    with torch.no_grad():
        for block in (1, 4):
            cache = Cache()
            close(torch.cat([stack(part, cache=cache) for part in x.split(block, 1)], 1), full)
        started = stack.started()
        assert started.length() == 3
        cache = started.fork(torch.zeros(2, dtype=torch.long))
        close(torch.cat([stack(part, cache=cache) for part in x.split(4, 1)], 1), full)
        close(stack(x, cache=started.fork(torch.zeros(2, dtype=torch.long))), full)


@pytest.mark.parametrize("spec", SPECS)
def test_meta_tokens_behind_padding(spec):
    """A padded sequence gives what it gives alone; in a request that goes on from computed meta tokens too."""
    stack, x = model(spec), batch(9)
    valid = torch.arange(9)[None] >= torch.tensor([0, 4])[:, None]
    full = stack(x, mask=valid)
    for row, first in enumerate((0, 4)):
        close(full[row, first:], stack(x[row : row + 1, first:])[0])
    close(stack(torch.where(valid[..., None], x, 100.0), mask=valid)[valid], full[valid])
    more = batch(3)
    with torch.no_grad():
        cache = Cache()
        close(stack(x, mask=valid, cache=cache)[valid], full[valid])
        then = torch.cat([stack(part, cache=cache) for part in more.split(1, 1)], 1)
        for row, first in enumerate((0, 4)):
            alone = torch.cat([x[row : row + 1, first:], more[row : row + 1]], 1)
            close(then[row], stack(alone)[0, -3:])
        if "window(4)" not in spec:  # which counts the padding between them
            cache = stack.started().fork(torch.zeros(2, dtype=torch.long))
            close(stack(x, mask=valid, cache=cache)[valid], full[valid])


def test_meta_tokens_of_a_decoder():
    torch.manual_seed(0)
    decoder = Decoder(50, HYBRID, DIM, HEADS, 2, meta=4).eval()
    ids = torch.randint(50, (2, 6))
    logits, positions = decoder(ids), torch.arange(6)[None]
    assert logits.shape == (2, 6, 50)
    torch.testing.assert_close(decoder(ids, positions=positions), logits)
    cache = Cache()
    with torch.no_grad():
        steps = [decoder(ids[:, t : t + 1], positions=positions[:, t : t + 1], cache=cache) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), logits, atol=1e-5, rtol=1e-5)
    logits.sum().backward()
    assert decoder.stack.meta.tokens.grad.abs().sum() > 0
    assert decoder.stack.cost.parameters == sum(Spec.parse(HYBRID).cost(DIM, HEADS).parameters for _ in "ab") + 4 * DIM
    assert cache.length() == 4 + 6


def test_meta_tokens_take_no_pairs():
    stack = model("gqa")
    with pytest.raises(ValueError, match="packed documents"):
        stack(batch(4), positions=Axis(4, 0, segment=torch.zeros(1, 4, dtype=torch.long)))
    with pytest.raises(ValueError, match="packed documents"):
        stack(batch(4), mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="meta is at least 0, not -1"):
        model("gqa", meta=-1)
    with pytest.raises(ValueError, match="no meta tokens"):
        model("gqa", meta=0).started()


def test_an_encoder_has_meta_tokens_too():
    stack, x = model("gqa + rope", causal=False), batch(9)
    valid = torch.arange(9)[None] >= torch.tensor([0, 4])[:, None]
    close(stack(x, mask=valid)[1, 4:], stack(x[1:, 4:])[0])
    differ(stack(x), stack(x, mask=valid))


def test_a_consumer_has_a_state_of_its_own():
    shared_rows(Case(HYBRID))
    shared_rows(Case("hymba(kv_heads=2, head_dim=6, v_dim=12, state=5, window=3, meta=2)"))
    owner, reader = (Attention(HYBRID, DIM, HEADS, site=Site(i, 2, kv_source=s)) for i, s in ((0, None), (1, 0)))
    missing = owner.state_dict().keys() - reader.state_dict().keys()
    assert missing == {"project.k_proj.weight", "project.v_proj.weight"}
    with pytest.raises(ValueError, match="first 1 rows"):
        Stack(["window(size=5, first=1)", "window(size=5, first=2)"], DIM, HEADS, kv_source=[None, 0])
    with pytest.raises(ValueError, match="newest 4 rows"):
        Stack(["window(size=5, first=4)", "window(size=7, first=1)"], DIM, HEADS, kv_source=[None, 0])


def groups_of_15b():
    pairs = [[a, a + 1] for a in (*range(1, 14, 2), *range(19, 30, 2))] + [[16, 17, 18]]
    source: list[int | None] = [None] * 32
    for first, *others in pairs:
        for other in others:
            source[other] = first
    return source


def test_the_cache_of_the_15b_model():
    """960 numbers a token and bank: 3 global ones of S + M tokens, 14 of windows; 79 MB at 8192 tokens in half."""
    source, m, w, dim, inner = groups_of_15b(), 128, 1024, 1600, 3200
    line = "hymba(kv_heads=5, head_dim=64, v_dim=128{})"
    specs = [line.format("" if i in (0, 15, 31) else f", window={w}, meta={m}") for i in range(32)]
    with torch.device("meta"):
        stack = Stack(specs, dim, 25, meta=m, kv_source=source, ffn="none")
    states = 32 * inner * (16 + 3)
    assert stack.cost.state_floats == states
    for s in (1, 500, 1024, 1025, 8192):
        layers = stack.attentions
        floats = sum(each.spec.cost(dim, 25, each.site).cache_bytes(s + m, 1) for each in layers) - states
        assert floats == 960 * (3 * (s + m) + 14 * (min(s, w) + m))
    assert round(2 * floats / 1e6, 1) == 78.9
    assert sum(bool(each.entries) for each in stack.attentions) == 17
    owner, reader = (stack.attentions[i].spec.cost(dim, 25, stack.attentions[i].site).parameters for i in (1, 2))
    assert owner - reader == dim * 5 * (64 + 128)
    small = inner * (5 + 132 + 100 + 16 + 2) + 132 + 2 * inner
    assert owner == dim * (25 * 64 + 5 * 64 + 5 * 128 + 2 * inner) + inner * dim + small


def test_cost_is_what_is_cached():
    cache, tokens, m, w = Cache(), 30, 3, 4
    stack = model([HYBRID, f"hymba(kv_heads=2, head_dim=6, v_dim=12, state=5, window={w}, meta={m})"], meta=m)
    with torch.no_grad():
        for part in batch(tokens, size=1).split(1, 1):
            stack(part, cache=cache)
    assert cache.bytes() == 8 * (36 * (tokens + m) + 36 * (w + m) + 2 * 48 * (5 + 3))
    assert cache.bytes() == sum(
        each.spec.cost(DIM, HEADS, each.site).cache_bytes(tokens + m, 8) for each in stack.attentions
    )


@pytest.mark.parametrize("spec", ["hymba(state=3, window=3, meta=2)", "mla + ssm_heads(state=3) + moh(top=2)"])
def test_laws(spec):
    check(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("window(size=3, first=-1)", "0 or more"),
        ("window(size=3, first=2) + mta", "'mta' needs 'adjacent keys'"),
        ("ssm_heads(state=0)", "at least 1"),
        ("ssm_heads + ssm_heads", "slot"),
        ("window(size=3, first=2) + retention", "bare scores"),
    ],
)
def test_refusals(spec, says):
    with pytest.raises(OptionError, match=says):
        Attention(spec, DIM, HEADS)
