"""Oracles of `fixed-head-size`: `gqa(head_dim=…)`, the width of a head free of D/H."""

import pytest
import torch
from tests.oracles.reference import (
    DIM,
    HEADS,
    batch,
    close,
    decoded,
    heads_of,
    join,
    make,
    rope,
    triangle,
    twin,
    weights,
)

from manyheads import Attention, Cache, OptionError, Spec


def test_the_usual_width_is_mha():
    layer, x = make("gqa"), batch()
    assert torch.equal(twin(layer, f"gqa(head_dim={DIM // HEADS})")(x), layer(x))


def test_the_preset():
    assert str(Spec.parse("fixed-head-size")) == "gqa(head_dim=64)"
    assert str(Spec.parse("fixed-head-size(32, v_dim=16) + kha")) == "gqa(head_dim=32, v_dim=16) + kha"
    assert Attention("fixed-head-size(10)", 24, 5).layout.qk_width == 10  # D is no multiple of H


def test_written_out_with_values_of_their_own_width():
    layer, x = make("gqa(kv_heads=2, head_dim=10, v_dim=7)"), batch()
    p = layer.project
    q, k, v = heads_of(p.q_proj(x), HEADS), heads_of(p.k_proj(x), 2), heads_of(p.v_proj(x), 2)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    close(layer(x), join(weights(rope(q), rope(k), 10**-0.5) @ v, p.o_proj))


def logits(layer, x):
    """Scores `[H, n, n]` before the softmax, without position."""
    p, layout = layer.project, layer.layout
    q, k = (heads_of(f(x), layout.q)[0] for f in (p.q_proj, p.k_proj))
    return q @ k.transpose(-1, -2) * layout.scale


def pattern(n):
    """A random positive row-stochastic map."""
    return torch.rand(n, n, dtype=torch.float64).log().softmax(-1)


def centred(p):
    """log P with its row means removed: softmax forgets a constant a row."""
    return p.log() - p.log().mean(-1, keepdim=True)


def realised(x, target, width):
    """The map that the best W_Q, W_K of this width give for logits `target`: M = √d X⁺ target (X⁺)ᵀ, cut by SVD."""
    layer = make(f"gqa(head_dim={width}) + rope(none)", dim=x.shape[-1], heads=1)
    inverse = torch.linalg.pinv(x[0])
    u, s, v = torch.linalg.svd(inverse @ target @ inverse.T * width**0.5)
    q, k = (side[:width] * s[:width, None].sqrt() for side in (u.T, v))
    layer = twin(layer, str(layer.spec), project__q_proj__weight=q, project__k_proj__weight=k)
    return logits(layer, x)[0].softmax(-1)


@pytest.mark.parametrize("n", [4, 6, 8])
def test_any_map_is_within_reach_of_wide_heads(n):
    """d = n realises log P itself; d = n - 1 the row-centred one; n - 2 leaves what its last singular value says."""
    x, p = torch.randn(1, n, 9, dtype=torch.float64), pattern(n)
    close(realised(x, p.log(), n), p)
    close(realised(x, centred(p), n - 1), p)
    assert torch.linalg.matrix_rank(centred(p)) == n - 1
    assert (realised(x, centred(p), n - 2) - p).abs().max() > 1e-4


def test_the_built_weights_in_the_layer():
    """The construction drives the layer itself: with W_V, W_O as identities y = P X (all tokens seen)."""
    n = 6
    x, p = torch.randn(1, n, n, dtype=torch.float64), pattern(n)
    layer = make(f"gqa(head_dim={n}) + rope(none)", dim=n, heads=1)
    inverse, eye = torch.linalg.inv(x[0]), torch.eye(n).double()
    u, s, v = torch.linalg.svd(inverse @ p.log() @ inverse.T * n**0.5)
    layer = twin(
        layer, str(layer.spec),
        project__q_proj__weight=u.T * s[:, None].sqrt(), project__k_proj__weight=v * s[:, None].sqrt(),
        project__v_proj__weight=eye, project__o_proj__weight=eye,
    )  # fmt: skip
    everything = torch.ones(1, 1, n, n, dtype=torch.bool)
    close(layer(x, mask=everything), p @ x)


@pytest.mark.parametrize("width", [2, 5])
def test_scores_have_the_rank_of_the_head(width):
    layer, x = make(f"gqa(head_dim={width}) + rope(none)"), batch(size=1)
    for scores in logits(layer, x):
        assert torch.linalg.matrix_rank(scores) == width
        assert torch.linalg.matrix_rank(centred(scores.softmax(-1)), atol=1e-9, rtol=0.0) <= width


def padded(weight, width, dim, to, factor=1.0):
    """A projection whose heads grow from `width` to `to` channels of zeros."""
    rows = weight.detach().movedim(dim, 0).unflatten(0, (-1, width)) * factor
    return torch.nn.functional.pad(rows, (0, 0, 0, to - width)).flatten(0, 1).movedim(0, dim)


@pytest.mark.parametrize("keep_scale", [True, False])
def test_wider_heads_of_zeros_are_the_same_function(keep_scale):
    """With the old scale as it is; with the new one W_Q grows by √(d_new/d_old)."""
    layer, x, old, new = make("gqa(head_dim=6) + rope(none)"), batch(), 6, 10
    p, scale = layer.project, f", scale={6**-0.5!r}" if keep_scale else ""
    wide = make(f"gqa(head_dim=10{scale}) + rope(none)")
    factor = 1.0 if keep_scale else (new / old) ** 0.5
    wide.load_state_dict({
        "project.q_proj.weight": padded(p.q_proj.weight, old, 0, new, factor),
        "project.k_proj.weight": padded(p.k_proj.weight, old, 0, new),
        "project.v_proj.weight": padded(p.v_proj.weight, old, 0, new),
        "project.o_proj.weight": padded(p.o_proj.weight, old, 1, new),
    })  # fmt: skip
    close(wide(x), layer(x))


def test_more_heads_that_do_not_speak_are_the_same_function():
    layer, x = make("gqa(head_dim=6)"), batch()
    more = make("gqa(head_dim=6)", heads=7)
    state = more.state_dict()
    for name in ("q", "k", "v"):
        state[f"project.{name}_proj.weight"][: HEADS * 6] = layer.state_dict()[f"project.{name}_proj.weight"]
    state["project.o_proj.weight"].zero_()[:, : HEADS * 6] = layer.state_dict()["project.o_proj.weight"]
    more.load_state_dict(state)
    close(more(x), layer(x))


@pytest.mark.parametrize(("width", "kv", "v"), [(3, 4, 3), (16, 2, 16), (9, 1, 4)])
def test_cost_and_decode(width, kv, v):
    layer, x, cache = make(f"gqa(kv_heads={kv}, head_dim={width}, v_dim={v}) + rope(none)"), batch(), Cache()
    cost = layer.spec.cost(DIM, HEADS)
    assert cost.parameters == DIM * (HEADS + kv) * (width + v)  # 4·D·H·d where all are alike
    assert cost.pair_flops == 2 * HEADS * (width + v)
    close(decoded(layer, x, 2, cache), layer(x))
    assert cache.bytes() == x.shape[0] * x.shape[1] * kv * (width + v) * 8


def test_causal_maps_are_free_above_the_diagonal():
    """The same construction reaches a causal map through its lower triangle, whatever stands above."""
    n = 5
    x, p = torch.randn(1, n, 9, dtype=torch.float64), pattern(n)
    lower = (p * triangle(n)) / (p * triangle(n)).sum(-1, keepdim=True)
    reached = realised(x, p.log(), n) * triangle(n)
    close(reached / reached.sum(-1, keepdim=True), lower)


@pytest.mark.parametrize("options", ["head_dim=0", "v_dim=0"])
def test_widths_that_do_not_fit(options):
    with pytest.raises(OptionError, match=f"gqa: .*{options}.*at least 1"):
        Attention(f"gqa({options})", DIM, HEADS)
