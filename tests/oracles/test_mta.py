"""Oracles of `mta`."""

import sys

import pytest
import torch
import transformers
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

from manyheads import Attention, Cache, OptionError, Spec, SpecError
from manyheads.core.flow import Flow, Links
from manyheads.core.mask import Axis

SPEC, WIDTH = "gqa + mta(queries=3, keys=5)", 6
SPECS = [SPEC, "gqa + mta(queries=3, keys=5, mix=none)", "gqa + mta(queries=2, keys=3, conv=scores, block=2)",
         "gqa(kv_heads=2) + mta(queries=4, keys=1, conv=weights, mix=weights, block=2)", "gqa + mta(conv=none)",
         "gqa + mta(queries=1, keys=5)", "gqa + mta"]  # fmt: skip
EYE = torch.eye(HEADS).double()


def convolved(s, kernel, seen, strict=False, z=True):
    """One cell at a time. strict: a query takes only from keys that it sees itself. z: hidden cells count as zero."""
    (_, c_q, c_k), (t, keys) = kernel.shape, s.shape[2:]
    out = torch.zeros_like(s)
    for i in range(t):
        for j in range(keys):
            for a in range(c_q):
                for b in range(c_k):
                    row, key = i - (c_q - 1) + a, j - (c_k - 1) // 2 + b
                    if row < 0 or not 0 <= key < keys or (z and not seen[row, key]) or (strict and not seen[i, key]):
                        continue
                    out[:, :, i, j] += kernel[:, a, b] * s[:, :, row, key]
    return out


def mixed(s, mix):
    """Heads in blocks, by a block-diagonal matrix."""
    return torch.einsum("gh,bhts->bgts", torch.block_diag(*mix), s)


def written(layer, x, seen=None, rows=slice(None), **options):
    """The layer step by step; `rows`: of only these queries."""
    p, piece = layer.project, layer.attends[0]
    q, k, v = (heads_of(f(x), f.out_features // WIDTH) for f in (p.q_proj, p.k_proj, p.v_proj))
    k, v = (y.repeat_interleave(layer.heads // layer.layout.kv, 1) for y in (rope(k), v))
    seen = triangle(x.shape[1])[rows] if seen is None else seen
    s = rope(q)[:, :, rows] @ k.transpose(-1, -2) * WIDTH**-0.5
    if "scores" in piece.kernels:
        s = convolved(s, piece.kernels["scores"], seen, **options)
    if "scores" in piece.mixes:
        s = mixed(s, piece.mixes["scores"])
    w = s.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
    if "weights" in piece.kernels:
        w = convolved(w, piece.kernels["weights"], seen, **options) * seen
    if "weights" in piece.mixes:
        w = mixed(w, piece.mixes["weights"])
    return join(w @ v, p.o_proj)


@pytest.mark.parametrize("spec", SPECS)
def test_written_out_cell_by_cell(spec):
    layer, x = make(spec), batch()
    close(layer(x), written(layer, x))


def with_parameters(layer, **changes):
    return twin(layer, str(layer.spec), **{f"attends__0__{name}": value for name, value in changes.items()})


@pytest.mark.parametrize("spec", SPECS)
def test_starts_as_the_base_layer(spec):
    torch.manual_seed(0)
    layer, x = Attention(spec, DIM, HEADS).double(), batch()
    plain = twin(make(spec.split(" + ")[0]), spec.split(" + ")[0], **{
        name.replace(".", "__"): value for name, value in layer.state_dict().items() if name.startswith("project")
    })  # fmt: skip
    close(layer(x), plain(x))


def test_kernels_of_one_cell_are_temperatures_and_scales():
    layer, x = make("gqa + mta(queries=1, keys=1, mix=none)"), batch()
    heat, scale = (layer.attends[0].kernels[step].flatten().tolist() for step in ("scores", "weights"))
    outs = []
    for h in range(HEADS):
        plain = twin(layer, f"gqa(scale={heat[h] * WIDTH**-0.5!r})")
        plain.project.o_proj = torch.nn.Identity()
        outs.append(scale[h] * heads_of(plain(x), HEADS)[:, h])
    close(layer(x), join(torch.stack(outs, 1), layer.project.o_proj))
    layer = make("gqa + mta(queries=1, keys=1)")
    ones = torch.ones(HEADS, 1, 1).double()
    layer = with_parameters(layer, kernels__scores=ones, kernels__weights=ones)
    close(layer(x), twin(layer, "gqa + mta(conv=none)")(x))


def test_only_mixes_are_talking_heads():
    layer, x = make("gqa + mta(conv=none)"), batch()
    logits, weights = (layer.attends[0].mixes[step][0].detach().T for step in ("scores", "weights"))
    close(layer(x), twin(layer, "gqa + talking_heads", attends__0__logits=logits, attends__0__weights=weights)(x))


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_comes_from_the_future(spec):
    layer, x = make(spec), batch()
    other = x.clone()
    other[:, 5:] = torch.randn_like(other[:, 5:])
    assert torch.equal(layer(other)[:, :5], layer(x)[:, :5])
    if "scores" in layer.attends[0].kernels and layer.attends[0].kernels["scores"].shape[2] > 1:
        differ(written(layer, other, z=False)[:, :5], written(layer, x, z=False)[:, :5])


def test_documents_do_not_touch():
    """Told apart by segments, or by a mask that was given."""
    layer, x, cuts = make(SPEC), batch(), (4, 5)
    alone = torch.cat([layer(part) for part in x.split(cuts, 1)], 1)
    segment = torch.arange(2).repeat_interleave(torch.tensor(cuts))
    place = torch.cat([torch.arange(n) for n in cuts])[None]
    close(layer(x, positions=Axis(9, 0, given_position=place, segment=segment[None])), alone)
    mask = triangle() & (segment[:, None] == segment)
    close(layer(x, mask=mask[None, None]), alone)
    cache, outs = Cache(), []
    for at in range(9):
        axis = Axis(1, at, given_position=place[:, at : at + 1], segment=segment[None, at : at + 1])
        outs.append(layer(x[:, at : at + 1], positions=axis, cache=cache))
    close(torch.cat(outs, 1), alone)


@pytest.mark.parametrize("size", [1, 3])
def test_windows_are_strict(size):
    """Query i is told nothing of keys that it does not see, and rows are kept no longer for it."""
    layer, x = make(f"{SPEC} + window({size})"), batch()
    near = triangle() & ~triangle().tril(-size)
    close(layer(x), written(layer, x, near, strict=True))
    cache = Cache()
    close(decoded(layer, x, 1, cache), layer(x))
    assert cache.state(0)["mta scores"].shape[-1] == cache.site(0).growing["k"].rows().shape[2] == max(size - 1, 1)


def test_convolution_moves_with_the_map():
    """Away from borders and masks."""
    piece, flow = make(SPEC).attends[0], flow_of(12)
    seen, s = torch.ones(12, 12, dtype=torch.bool), torch.randn(1, HEADS, 12, 12).double()
    one, two = (piece._convolve(t, "scores", seen, slice(0, 12), flow) for t in (s, s.roll((2, 3), (2, 3))))
    close(two[:, :, 4:, 5:10], one.roll((2, 3), (2, 3))[:, :, 4:, 5:10])


def flow_of(tokens):
    x, axis = torch.zeros(1, tokens, DIM), Axis(tokens, 0)
    return Flow(x, x, axis, axis, Links())


def test_padding_on_the_left_is_nothing():
    layer, x = make(SPEC), batch()
    valid = torch.arange(9)[None] >= torch.tensor([[0], [4]])
    y = layer(x, mask=valid)
    close(y[1, 4:], layer(x[1:, 4:])[0])
    close(y[0], layer(x[:1])[0])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_decode_by_kept_rows(spec, block):
    layer, x = make(spec), batch()
    close(decoded(layer, x, block), layer(x))


def test_kept_rows_follow_their_sequence():
    layer, x, cache = make(SPEC), batch(), Cache()
    full = layer(x)
    decoded(layer, x[:, :5], 2, cache)
    swapped = torch.cat([x[:, :5], x[:, 5:].flip(0)], 1).flip(0)
    close(decoded(layer, x[:, 5:], 2, cache.fork(torch.tensor([1, 0]))), layer(swapped)[:, 5:])
    close(decoded(layer, x[:, 5:], 2, cache), full[:, 5:])


def test_decode_by_computing_rows_anew():
    """The last query's output needs 2 (c_q - 1) queries before it, and no more."""
    layer, x = make(SPEC), batch()
    close(written(layer, x, rows=slice(4, None))[:, -1], layer(x)[:, -1])
    differ(written(layer, x, rows=slice(6, None))[:, -1], layer(x)[:, -1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [1, 2])
def test_tiles_of_queries(spec, rows, monkeypatch):
    """A tile computes the rows before it anew, and the cache gets what the last one has."""
    layer, x = make(spec), batch().requires_grad_()
    want = layer(x)
    (gradient,) = torch.autograd.grad(want.pow(2).sum(), x)
    monkeypatch.setattr(sys.modules["manyheads.core.kernels.tiled"], "TILE_BYTES", 2 * HEADS * 9 * 8 * rows)
    y = layer(x)
    close(y, want)
    close(torch.autograd.grad(y.pow(2).sum(), x)[0], gradient, 1e-9)
    close(decoded(layer, x, 5), want)


def test_weights_need_not_sum_to_one():
    layer, seen = make("gqa + mta(queries=3, keys=5, mix=none)"), triangle()
    w = torch.randn(2, HEADS, 9, 9).double().masked_fill(~seen, -torch.inf).softmax(-1)
    rows = (slice(0, 9), flow_of(9))
    differ(layer.attends[0].after(w, seen, *rows).sum(-1), torch.ones(2, HEADS, 9).double())
    still = torch.zeros(HEADS, 3, 5).double()
    still[:, -1, 2] = 1.0
    after = with_parameters(layer, kernels__weights=still).attends[0].after(w, seen, *rows)
    close(after.sum(-1), torch.ones(2, HEADS, 9).double())
    assert not layer.attends[0].after(w, seen, *rows).masked_select(~seen).any()


def test_gate_without_weights_scales_every_head():
    layer, x = make("gqa + head_gate"), batch()
    gated = twin(layer, "gqa + head_gate", gates__0__weight=torch.zeros(WIDTH).double())
    close(gated(x), gated.gates[0].bias.sigmoid() * twin(layer, "gqa")(x))
    o = torch.randn(2, HEADS, 3, WIDTH).double()
    g = torch.einsum("bhtd,d->bht", o, layer.gates[0].weight) + layer.gates[0].bias
    close(layer.gates[0].gate(o, None), o * g.sigmoid()[..., None])


def test_preset():
    spec = Spec.parse("mta_gated(queries=2, keys=3, block=2)")
    assert str(spec) == "mta(queries=2, keys=3, block=2) + head_norm + head_gate"
    layer, x = make("mta_gated(queries=2, keys=3)"), batch()
    close(decoded(layer, x), layer(x))


def test_cost():
    """2 H c_q c_k + H² + H c_h, with norm and gate d + d + 1; 2 (c_q - 1) H numbers more a key."""
    base = make("gqa").spec.cost(DIM, HEADS)
    for spec, parameters, kept in (("mta", 2 * HEADS * 66 + 2 * HEADS**2, 10 * HEADS),
                                   ("mta(block=2)", 2 * HEADS * 66 + HEADS**2 + 2 * HEADS, 10 * HEADS),
                                   ("mta_gated", 2 * HEADS * 66 + 2 * HEADS**2 + 2 * WIDTH + 1, 10 * HEADS),
                                   ("mta(queries=2, keys=9, conv=scores, mix=none)", HEADS * 18, HEADS),
                                   ("mta(conv=none)", 2 * HEADS**2, 0)):  # fmt: skip
        layer, cache = make(f"gqa + {spec}"), Cache()
        cost = layer.spec.cost(DIM, HEADS)
        assert cost.parameters - base.parameters == parameters and cost.cache_floats - base.cache_floats == kept
        decoded(layer, batch(), 4, cache)
        assert cache.bytes() == 2 * cost.cache_bytes(9, 8)
    assert make("gqa + mta(mix=none)").spec.cost(DIM, HEADS).pair_flops - base.pair_flops == 2 * 132 * HEADS


def test_refusals():
    for options, says in (
        ("keys=4", "keys odd"),
        ("queries=0", "at least 1"),
        ("block=3", r"block may be \[1, 2, 4\]"),
    ):
        with pytest.raises(OptionError, match=says):
            Attention(f"gqa + mta({options})", DIM, HEADS)
    with pytest.raises(SpecError, match=r"nearest legal: mta\(conv=none\)"):
        Attention("mtla + mta", DIM, HEADS)
    for spec in ("mta + talking_heads", "differential + mta", "mta + differential"):
        with pytest.raises(SpecError, match="mta"):
            Attention(spec, DIM, HEADS)
    layer, x, cache = make(SPEC), batch(), Cache()
    decoded(layer, x, 3, cache)
    with pytest.raises(ValueError, match="'mta scores' keeps no history"):
        cache.rollback(1)
    with pytest.raises(ValueError, match=r"manyheads\.Cache"):
        layer(x, cache=transformers.DynamicCache())
