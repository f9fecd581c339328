"""Oracles of `emha`."""

import sys

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
)

from manyheads import Attention, OptionError, Spec, SpecError
from manyheads.attention.attend import emha

WIDTH = 6
WIDE = "emha(inner=3, inner_kernel=5, cross=2, cross_kernel=3)"
FORMS = ["emha(inner=3, cross=2)", WIDE, "emha(inner=3, cross=0)", "emha(inner=3, inner_kernel=3, cross=0)"]


def qkv(layer, x):
    p, kv = layer.project, layer.project.kv_heads
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, kv), (p.v_proj, kv)))
    return rope(q), rope(k), v


def along_keys(rows, conv):
    """A convolution of one query's rows `[maps, S]`."""
    return F.conv1d(rows, conv.weight[:, :, 0], conv.bias, padding=conv.kernel_size[1] // 2, groups=conv.groups)


def written_out(layer, x, seen=None):
    """A query at a time: hidden keys set to zero before each convolution, softmax over the others."""
    piece, (q, k, v) = layer.attends[0], qkv(layer, x)
    seen, o = triangle(x.shape[1]) if seen is None else seen, torch.zeros(len(x), HEADS, x.shape[1], WIDTH).double()
    for b in range(len(x)):
        for t in range(x.shape[1]):
            rows = torch.stack([k[b, j] @ q[b, i, t] for i in range(HEADS) for j in range(k.shape[1])]) * WIDTH**-0.5
            rows = along_keys(rows * seen[t], piece.inner_in).relu()
            if piece.inner_out is not None:
                rows = along_keys(rows * seen[t], piece.inner_out)
                rows = along_keys(rows * seen[t], piece.cross_in).relu()
            rows = along_keys(rows * seen[t], piece.cross_out)
            w = rows.masked_fill(~seen[t], -torch.inf).softmax(-1)
            o[b, :, t] = (w[:, None] @ v[b].repeat_interleave(HEADS // v.shape[1], 0))[:, 0]
    return join(o, layer.project.o_proj)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_written_out(kv_heads, form):
    layer, x = make(f"gqa(kv_heads={kv_heads}) + {form}"), batch(6)
    close(layer(x), written_out(layer, x))


@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("cross", [0, 2, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_it_can_start_as_the_base_layer(kv_heads, cross, kernel):
    base = f"gqa(kv_heads={kv_heads})"
    spec = f"{base} + emha(inner=3, cross={cross}, inner_kernel={kernel}, cross_kernel={kernel}, start=identity)"
    layer, plain, x = Attention(spec, DIM, HEADS).double(), make(base), batch()
    layer.load_state_dict(layer.state_dict() | plain.state_dict())
    close(layer(x), plain(x))
    random = Attention(spec.replace(", start=identity", ""), DIM, HEADS).double()
    random.load_state_dict(random.state_dict() | plain.state_dict())
    differ(random(x), plain(x))


def test_meeting_of_own_heads_is_the_usual_score():
    layer, x = make("gqa + emha"), batch()
    q, k, _ = qkv(layer, x)
    maps = layer.attends[0].scores(q, k, WIDTH**-0.5, None)
    assert maps.shape == (2, HEADS**2, TOKENS, TOKENS)
    close(maps[:, :: HEADS + 1], q @ k.transpose(-1, -2) * WIDTH**-0.5)
    close(maps[:, 1 * HEADS + 2], q[:, 1] @ k[:, 2].transpose(-1, -2) * WIDTH**-0.5)


def test_pointwise_and_without_biases_each_cell_is_a_network_of_its_own():
    layer = make("gqa + emha(inner=3, cross=2)")
    piece, s = layer.attends[0], torch.randn(1, HEADS**2, 3, 4).double()
    for conv in (piece.inner_in, piece.inner_out, piece.cross_in):
        conv.bias.data.zero_()
    got = piece.before(s, torch.ones(1, 1, 3, 4, dtype=torch.bool), slice(None), None)
    weights = [conv.weight.detach()[:, :, 0, 0] for conv in (piece.inner_in, piece.inner_out)]
    first = torch.block_diag(*weights[0].split(3))  # 3 hidden maps a head
    second = torch.block_diag(*weights[1].split(1))
    third, last = (conv.weight.detach()[:, :, 0, 0] for conv in (piece.cross_in, piece.cross_out))
    for t in range(3):
        for j in range(4):
            close(got[0, :, t, j], last @ (third @ (second @ (first @ s[0, :, t, j]).relu())).relu())


@pytest.mark.parametrize(("form", "same"), [(FORMS[0], True), (WIDE, False), (FORMS[2], True)])
def test_only_wide_kernels_know_the_order_of_keys(form, same):
    layer, order = make(f"gqa + {form}"), torch.randperm(TOKENS)
    q, k = (torch.randn(1, HEADS, TOKENS, WIDTH).double() for _ in range(2))
    piece, seen = layer.attends[0], torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    plain, mixed = (piece.before(piece.scores(q, t, 1.0, None), seen, slice(None), None) for t in (k, k[:, :, order]))
    close(mixed, plain[..., order]) if same else differ(mixed, plain[..., order])


@pytest.mark.parametrize("form", FORMS)
def test_causal_for_any_kernel_and_bias(form, monkeypatch):
    layer, x = make(f"gqa + {form}"), batch().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 4].sum(), x)
    assert not gradient[:, 5:].any() and (gradient[:, :5] != 0).all(-1).any()
    if "kernel" in form:  # what hiding is for
        monkeypatch.setattr(emha, "_apply", lambda conv, maps, visible: conv(maps))
        (gradient,) = torch.autograd.grad(layer(x)[:, 4].sum(), x)
        assert gradient[:, 5:].any()


@pytest.mark.parametrize("form", [FORMS[0], WIDE])
def test_padding_changes_nothing(form):
    layer, x = make(f"gqa + {form}"), batch(5)
    for left, right in ((3, 0), (0, 3), (2, 1)):
        padded = torch.cat([9 * batch(left), x, 9 * batch(right)], 1)
        valid = torch.zeros(2, padded.shape[1], dtype=torch.bool)
        valid[:, left : left + 5] = True
        close(layer(padded, mask=valid)[:, left : left + 5], layer(x))


def test_one_head():
    layer, x = make("gqa + emha(inner=2, inner_kernel=3)", 6, 1), batch(dim=6)
    p, piece = layer.project, layer.attends[0]
    q, k, v = rope(p.q_proj(x)[:, None]), rope(p.k_proj(x)[:, None]), p.v_proj(x)[:, None]
    s = q @ k.transpose(-1, -2) * 6**-0.5
    for conv, last in (
        (piece.inner_in, False),
        (piece.inner_out, True),
        (piece.cross_in, False),
        (piece.cross_out, True),
    ):
        s = conv(s * triangle())
        s = s if last else s.relu()
    close(layer(x), join(s.masked_fill(~triangle(), -torch.inf).softmax(-1) @ v, p.o_proj))


@pytest.mark.parametrize("form", [FORMS[0], WIDE, "emha(inner=2, inner_kernel=7, cross=0)"])
@pytest.mark.parametrize("rest", ["", " + window(3)", " + window([2, 3, 9, 4])", " + alibi", " + softmax(cap=2.0)"])
def test_decode(form, rest):
    layer, x = make(f"gqa(kv_heads=2) + {form}{rest}"), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


def test_tiles_have_room_for_all_maps(monkeypatch):
    """A tile holds (G + inner) maps a head; with several tiles the result and its gradient are the same."""
    layer, x = make(f"gqa + {WIDE}"), batch().requires_grad_()
    assert layer.attends[0].maps == HEADS + 3
    want = torch.autograd.grad(layer(x).pow(2).sum(), x)[0]
    room = 2 * HEADS * TOKENS * 8 * (HEADS + 3)
    monkeypatch.setattr(sys.modules["manyheads.core.kernels.tiled"], "TILE_BYTES", 4 * room)
    seen, before = [], type(layer.attends[0]).before

    def spy(scores, visible, rows, flow):
        seen.append(scores.shape[2])
        return before(layer.attends[0], scores, visible, rows, flow)

    layer.attends[0].before = spy
    y = layer(x)
    assert seen == [4, 4, 1]
    close(torch.autograd.grad(y.pow(2).sum(), x)[0], want)


@pytest.mark.parametrize(("kv_heads", "inner", "cross"), [(4, 8, 4), (4, 2, 3), (2, 3, 2), (2, 2, 0)])
@pytest.mark.parametrize(("near", "far"), [(1, 1), (7, 3)])
def test_cost(kv_heads, inner, cross, near, far):
    """e_I k_I (H³ + H²) and 2 e_C k_C H² weights with inner = e_I H, cross = e_C; biases but of the last layer."""
    base, form = (
        f"gqa(kv_heads={kv_heads})",
        f"emha(inner={inner}, cross={cross}, inner_kernel={near}, cross_kernel={far})",
    )
    cost, plain = (Spec.parse(line).cost(DIM, HEADS) for line in (f"{base} + {form}", base))
    h = HEADS
    if cross:
        weights = inner * near * (h * kv_heads + h) + 2 * cross * far * h**2
        if kv_heads == h and inner == 8:
            assert weights == (8 // h) * near * (h**3 + h**2) + 2 * cross * far * h**2
        biases = h * inner + h + h * cross
    else:
        weights, biases = h * inner * kv_heads * near + inner * h**2, h * inner
    assert cost.parameters - plain.parameters == weights + biases
    assert cost.pair_flops - plain.pair_flops == 2 * (weights + h * (kv_heads - 1) * WIDTH)
    assert cost.cache_floats == plain.cache_floats == 2 * kv_heads * WIDTH


def test_the_authors_sizes():
    """H = 8 with inner=2H, kernels 7 and 3, cross=8: about 8k and 3k multiply-adds a score."""
    spec = "gqa + emha(inner=16, inner_kernel=7, cross=8, cross_kernel=3)"
    with torch.device("meta"):
        layer = Attention(spec, 512, 8)
    sizes = [conv.weight.numel() for conv in (layer.attends[0].inner_in, layer.attends[0].inner_out)]
    assert sizes == [2 * 7 * 8**3, 2 * 7 * 8**2] and sum(sizes) == 8064
    assert 2 * layer.attends[0].cross_in.weight.numel() == 3072


def test_refusals():
    for given, said in (
        ("inner_kernel=4", "inner_kernel=4 has no middle; use 3 or 5"),
        ("cross_kernel=0", "cross_kernel=0 has no middle; use 1 or 3"),
        ("inner=0", "inner=0 and cross=4 hidden maps a head; start=random takes at least 1"),
        ("cross=1, start=identity", "inner=8 and cross=1 hidden maps a head; start=identity takes at least 2"),
    ):
        with pytest.raises(OptionError, match=said):
            Attention(f"emha({given})", DIM, HEADS)
    for line, said in (
        ("mla + emha", "nearest legal: mla\\(view=expanded\\)"),
        ("emha + talking_heads", "both take the slot 'head mix'"),
        ("differential + emha", "'emha' needs 'one map'"),
        ("emha + differential", "'differential' needs 'one map'"),
        ("iha + emha", "'emha' needs 'one map'"),
    ):
        with pytest.raises(SpecError, match=said):
            Attention(line, DIM, HEADS)
