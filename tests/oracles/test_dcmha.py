"""Oracles of `dcmha`."""

import sys

import pytest
import torch
import torch.nn.functional as F
from tests.oracles.reference import (
    DIM,
    HEADS,
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

from manyheads import Attention, Cache, OptionError, SpecError

SPEC, WIDTH, RANK = "gqa + dcmha", 6, 2
SPECS = [SPEC, "gqa + dcmha(static=true)", "gqa + dcmha(keys=false)", "gqa + dcmha(on=weights)", "gqa + dcmha(rank=1)",
         "gqa + dcmha(on=scores, keys=false, hidden=5)"]  # fmt: skip


def parts(layer, x):
    p = layer.project
    q, k, v = (heads_of(f(x), layer.heads) for f in (p.q_proj, p.k_proj, p.v_proj))
    return rope(q), rope(k), v


def side(module, u, rank):
    """w1 `[B, N, R, H]`, w2 and g `[B, N, H]` by the equations."""
    w = (F.gelu(u @ module.inner.weight.T) @ module.outer.weight.T).unflatten(-1, (2 * rank, -1))
    w1, w2 = w[..., :rank, :], w[..., rank:, :]
    w1 = w1 / (w1.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return w1, w2, (u @ module.gate.weight.T).tanh()


def dense(module, u, rank):
    """Σ_r w1ᵀ w2 + diag g of each token, `[B, N, H, H]`."""
    w1, w2, g = side(module, u, rank)
    return torch.einsum("bnri,bnrj->bnij", w1, w2) + torch.diag_embed(g)


def composed(layer, a, x, step):
    """a M(t, s) with M `[B, T, S, H, H]` in full."""
    piece = layer.attends[0]
    if step not in piece.steps:
        return a
    m = torch.eye(layer.heads).double() + dense(piece.q[step], x, piece.rank)[:, :, None]
    if piece.keys:
        m = m + dense(piece.k[step], x, piece.rank)[:, None]
    if step in piece.static:
        m = m + piece.static[step]
    return torch.einsum("bits,btsij->bjts", a, m)


@pytest.mark.parametrize("spec", SPECS)
def test_written_out_with_a_matrix_for_each_pair(spec):
    """Also: scores are composed before the mask, weights after the softmax."""
    layer, x = make(spec), batch()
    q, k, v = parts(layer, x)
    scores = composed(layer, q @ k.transpose(-1, -2) * WIDTH**-0.5, x, "scores")
    weights = composed(layer, scores.masked_fill(~triangle(), -torch.inf).softmax(-1), x, "weights")
    assert not weights.masked_select(~triangle()).any()
    close(layer(x), join(weights @ v, layer.project.o_proj))


def stilled(layer, **changes):
    """B = 0 and C = 0 in every side."""
    zeros = {
        f"attends__0__{name.replace('.', '__')}": torch.zeros_like(value)
        for name, value in layer.attends[0].named_parameters()
        if "outer" in name or "gate" in name
    }
    return twin(layer, str(layer.spec), **zeros, **changes)


def test_without_dynamic_weights_it_is_the_base_layer():
    layer, x = stilled(make(SPEC)), batch()
    close(layer(x), twin(layer, "gqa")(x))


def test_only_static_weights_are_talking_heads():
    layer, x = stilled(make("gqa + dcmha(static=true)")), batch()
    eye, static = torch.eye(HEADS).double(), layer.attends[0].static
    logits, weights = (eye + static[step].detach() for step in ("scores", "weights"))
    other = twin(layer, "gqa + talking_heads", attends__0__logits=logits, attends__0__weights=weights)
    close(layer(x), other(x))
    differ(layer(x), twin(layer, "gqa")(x))


def test_starts_near_the_base_layer():
    torch.manual_seed(0)
    layer, x = Attention(SPEC, DIM, HEADS).double(), batch()
    plain = twin(layer, "gqa")
    off = (layer(x) - plain(x)).norm() / plain(x).norm()
    assert 0 < off < 0.05
    assert layer.attends[0].q["scores"].outer.weight.std() < 0.02 / (2 * RANK * HEADS) ** 0.5 / HEADS


def test_composition_is_linear():
    layer, x, seen = make(SPEC), batch(), triangle()
    flow = flow_of(layer, x)
    a, b = torch.randn(2, 2, HEADS, 9, 9).double()
    for hook in (layer.attends[0].before, layer.attends[0].after):
        sums = hook(2 * a + 3 * b, seen, slice(None), flow)
        close(sums, 2 * hook(a, seen, slice(None), flow) + 3 * hook(b, seen, slice(None), flow))


def flow_of(layer, x):
    """The flow of a pass, with its rows."""
    seen, after = [], layer.project.undo
    layer.project.undo = lambda o, flow: seen.append(flow) or after(o, flow)
    layer(x)
    del layer.project.undo
    return seen[0]


@pytest.mark.parametrize("spec", SPECS[:4])
def test_tiles_of_queries(spec, monkeypatch):
    """Cutting T into tiles, as a bound on memory does, changes nothing, gradients included."""
    layer, x = make(spec), batch().requires_grad_()
    want = layer(x)
    (gradient,) = torch.autograd.grad(want.pow(2).sum(), x)
    monkeypatch.setattr(sys.modules["manyheads.core.kernels.tiled"], "TILE_BYTES", 2 * HEADS * 9 * 8 * 2)
    y = layer(x)
    close(y, want)
    close(torch.autograd.grad(y.pow(2).sum(), x)[0], gradient, 1e-9)


def test_one_head_is_scaled_cell_by_cell():
    layer, x = make(SPEC, WIDTH, 1), batch(dim=WIDTH)
    q, k, v = parts(layer, x)

    def factor(step):
        total = 1
        for sides, cells in ((layer.attends[0].q, (slice(None), None)), (layer.attends[0].k, (None, slice(None)))):
            w1, w2, g = side(sides[step], x, RANK)
            total = total + ((w1 * w2).sum((-2, -1)) + g[..., 0])[:, *cells]
        return total[:, None]

    scores = factor("scores") * (q @ k.transpose(-1, -2)) * WIDTH**-0.5
    weights = factor("weights") * scores.masked_fill(~triangle(), -torch.inf).softmax(-1)
    close(layer(x), join(weights @ v, layer.project.o_proj))


def test_weights_composed_by_queries_alone_mix_outputs():
    """O'_m(t) = Σ_n M(t)_nm (P_n V_m)(t)."""
    layer, x = make("gqa + dcmha(keys=false, on=weights)"), batch()
    q, k, v = parts(layer, x)
    p = (q @ k.transpose(-1, -2) * WIDTH**-0.5).masked_fill(~triangle(), -torch.inf).softmax(-1)
    each = p[:, :, None] @ v[:, None]  # [B, n, m, T, d]
    m = torch.eye(HEADS).double() + dense(layer.attends[0].q["weights"], x, RANK)
    close(layer(x), join(torch.einsum("btnm,bnmtd->bmtd", m, each), layer.project.o_proj))


def test_first_factors_have_unit_rms():
    """However large A makes them."""
    layer, x = make(SPEC), batch()
    module = layer.attends[0].q["scores"]
    for scale in (1.0, 1e3):
        module.inner.weight.data *= scale
        w1 = module(x)[:, :RANK]
        close(w1.pow(2).mean(-1), torch.ones(2, RANK, 9).double(), 1e-3 if scale == 1 else 1e-6)


def test_permuting_heads():
    """Of q, k, v, W_O and of the head axes of B, C and W_b together."""
    layer, x, order = make("gqa + dcmha(static=true)"), batch(), torch.randperm(HEADS)
    state = dict(layer.state_dict())
    for name, value in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name] = value.unflatten(0, (HEADS, WIDTH))[order].flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            state[name] = value.unflatten(1, (HEADS, WIDTH))[:, order].flatten(1)
        elif name.endswith("outer.weight"):
            state[name] = value.unflatten(0, (2 * RANK, HEADS))[:, order].flatten(0, 1)
        elif name.endswith("gate.weight"):
            state[name] = value[order]
        elif "static" in name:
            state[name] = value[order][:, order]
    other = make("gqa + dcmha(static=true)")
    other.load_state_dict(state)
    close(other(x), layer(x))


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "gqa(kv_heads=1)", "mla(rank=10, rope_dim=4, v_dim=5)"])
@pytest.mark.parametrize("spec", SPECS)
def test_decode(spec, base):
    layer, x = make(spec.replace("gqa", base)), batch()
    close(decoded(layer, x), layer(x))
    close(decoded(layer, x, 4), layer(x))


def test_grouped_keys_are_repeated():
    layer, x = make("gqa(kv_heads=2) + dcmha"), batch()
    copies = {
        f"project__{name}__weight": getattr(layer.project, name).weight.detach()
        .unflatten(0, (2, WIDTH)).repeat_interleave(2, 0).flatten(0, 1)
        for name in ("k_proj", "v_proj")
    }  # fmt: skip
    close(twin(layer, SPEC, **copies)(x), layer(x))


def test_a_window_also_keeps_fewer_composing_rows():
    layer, cache = make("gqa + window(3) + dcmha"), Cache()
    decoded(layer, batch(), 1, cache)
    assert {name: growing.rows().shape[2] for name, growing in cache.site(0).growing.items()} == dict.fromkeys(
        ("k", "v", "dcmha scores", "dcmha weights"), 2
    )


def test_cost():
    """20 D H + 64 H² at rank 2, and 10 H numbers a token."""
    base, cost = (make(spec).spec.cost(DIM, HEADS) for spec in ("gqa", SPEC))
    assert cost.parameters - base.parameters == 20 * DIM * HEADS + 64 * HEADS**2
    assert cost.cache_floats - base.cache_floats == 10 * HEADS
    assert cost.pair_flops - base.pair_flops == 40 * HEADS
    static, queries = (make(spec).spec.cost(DIM, HEADS) for spec in SPECS[1:3])
    assert static.parameters - cost.parameters == 2 * HEADS**2 and queries.cache_floats == base.cache_floats
    assert queries.parameters - base.parameters == 10 * DIM * HEADS + 32 * HEADS**2
    cache = Cache()
    decoded(make(SPEC), batch(), 4, cache)
    assert cache.bytes() == 2 * cost.cache_bytes(9, 8)


def test_refusals():
    for options in ("rank=0", "hidden=0"):
        with pytest.raises(OptionError, match="at least 1"):
            Attention(f"gqa + dcmha({options})", DIM, HEADS)
    with pytest.raises(SpecError, match=r"nearest legal: dcmha\(keys=false\)"):
        Attention("mtla + dcmha", DIM, HEADS)
    layer, x = make("mtla(stride=3) + dcmha(keys=false)"), batch()
    close(decoded(layer, x), layer(x))
    for spec in ("dcmha + talking_heads", "differential + dcmha"):
        with pytest.raises(SpecError, match="dcmha"):
            Attention(spec, DIM, HEADS)
