"""Oracles of `kha`."""

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, decoded, differ, make, twin

from manyheads import Attention

WIDTH = 6


@pytest.mark.parametrize("kind", ["linear", "mlp", "mlp, on=qkv"])
@pytest.mark.parametrize("base", ["gqa(kv_heads=2)", "gqa(kv_heads=1)", "gqa", "mla(view=expanded)", "mfa(width=8)"])
def test_starts_as_the_base_layer_bit_for_bit(base, kind):
    for norm in ("", " + qk-norm"):
        layer = Attention(f"{base} + kha(kind={kind}){norm}", DIM, HEADS).double()
        plain, x = make(base + norm), batch()
        moved = {name.replace("transforms.0", "transforms.1"): value for name, value in plain.state_dict().items()}
        layer.load_state_dict(layer.state_dict() | moved)
        assert torch.equal(layer(x), plain(x))


def test_starts_as_the_base_layer_without_keys():
    layer = Attention("mla(rank=10, rope_dim=4, v_dim=5) + kha", DIM, HEADS).double()
    plain, x = make("mla(rank=10, rope_dim=4, v_dim=5)"), batch()
    layer.load_state_dict(layer.state_dict() | plain.state_dict())
    assert torch.equal(layer(x), plain(x))


def fold(layer, names="qkv"):
    """Each head's rows of a projection, and of its bias, through the transform that follows: W'_h = W_h T."""
    state = dict(layer.state_dict())
    for name in names:
        t = state.pop(f"transforms.0.{name}")
        weight = state[f"project.{name}_proj.weight"].unflatten(0, (-1, WIDTH))
        state[f"project.{name}_proj.weight"] = torch.einsum("hdD,de->heD", weight, t).flatten(0, 1)
        if f"project.{name}_proj.bias" in state:
            bias = state[f"project.{name}_proj.bias"].unflatten(0, (-1, WIDTH))
            state[f"project.{name}_proj.bias"] = (bias @ t).flatten()
    return state


@pytest.mark.parametrize("bias", ["none", "qkvo"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_linear_folds_into_the_projections(kv_heads, bias):
    base = f"gqa(kv_heads={kv_heads}, bias={bias})"
    layer, x, plain = make(f"{base} + kha"), batch(), make(base)
    plain.load_state_dict(fold(layer))
    close(layer(x), plain(x))


def test_values_fold_to_the_right():
    """(Σ A v T_V) W_O^h is Σ A v (T_V W_O^h)."""
    layer, x, plain = make("gqa(kv_heads=2) + kha(on=v)"), batch(), make("gqa(kv_heads=2)")
    state = dict(layer.state_dict())
    o = state["project.o_proj.weight"].unflatten(1, (HEADS, WIDTH)) @ state.pop("transforms.0.v").T
    plain.load_state_dict(state | {"project.o_proj.weight": o.flatten(1)})
    close(layer(x), plain(x))


@pytest.mark.parametrize("turns", [True, False])
def test_inverse_pair_leaves_scores_alone_without_rotation(turns):
    """T_Q T_Kᵀ = I; under RoPE only for maps that commute with it."""
    position = "" if turns else " + rope(none)"
    layer, x, a = make(f"gqa{position.replace(' + ', ' + kha + ', 1) or ' + kha'}"), batch(), torch.randn(WIDTH, WIDTH)
    a = a.double() + 3 * torch.eye(WIDTH).double()
    eye = torch.eye(WIDTH).double()
    maps = {"transforms__0__q": a, "transforms__0__k": torch.linalg.inv(a).T.contiguous(), "transforms__0__v": eye}
    layer = twin(layer, str(layer.spec), **maps)
    plain = twin(layer, f"gqa{position}")
    if turns:
        differ(layer(x), plain(x))
    else:
        close(layer(x), plain(x), 1e-9)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_permuting_heads(kind):
    """A shared transform has no head index."""
    layer, x, order = make(f"gqa + kha(kind={kind})"), batch(), torch.randperm(HEADS)
    changes = {
        f"project__{n}_proj__weight": getattr(layer.project, f"{n}_proj").weight.detach()
        .unflatten(0, (HEADS, WIDTH))[order].flatten(0, 1)
        for n in "qkv"
    }  # fmt: skip
    o = layer.project.o_proj.weight.detach().unflatten(1, (HEADS, WIDTH))[:, order].flatten(1)
    close(twin(layer, str(layer.spec), project__o_proj__weight=o, **changes)(x), layer(x))


def test_mlp_is_linear_only_with_a_closed_gate():
    layer, v = make("gqa + kha(kind=mlp)"), torch.randn(1, HEADS, 3, WIDTH).double()
    piece = layer.transforms[0]
    want = 2 * ((v @ piece.v) * torch.sigmoid(v @ piece.gate)) @ piece.down
    close(piece.on_v(v, None), want)
    differ(piece.on_v(2 * v, None), 2 * piece.on_v(v, None))
    piece.gate.data.zero_()
    close(piece.on_v(v, None), v @ piece.v @ piece.down)
    close(piece.on_v(2 * v, None), 2 * piece.on_v(v, None))


@pytest.mark.parametrize(
    "base", ["gqa(kv_heads=1)", "mla(rank=10, rope_dim=4, v_dim=5)", "mfa(width=8, key_reuse=true)"]
)
def test_decode(base):
    layer, x = make(f"{base} + kha"), batch()
    close(decoded(layer, x), layer(x))


@pytest.mark.parametrize("view", ["expanded", "absorbed"])
def test_latent_form_folds_into_the_up_projections(view):
    spec = f"mla(rank=10, rope_dim=4, nope_dim=6, v_dim=5, view={view})"
    layer, x, plain = make(f"{spec} + kha"), batch(), make(spec)
    state = dict(layer.state_dict())
    q, k, v = (state.pop(f"transforms.0.{name}") for name in "qkv")
    rows = state["project.q_proj.weight"].unflatten(0, (HEADS, 10)).clone()
    rows[:, :6] = q.T @ rows[:, :6]
    up = state["project.kv_b_proj.weight"].unflatten(0, (HEADS, 11))
    up = torch.cat([k.T @ up[:, :6], v.T @ up[:, 6:]], 1)
    plain.load_state_dict(
        state | {"project.q_proj.weight": rows.flatten(0, 1), "project.kv_b_proj.weight": up.flatten(0, 1)}
    )
    close(layer(x), plain(x))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_cost(kind):
    base = make("gqa").spec.cost(DIM, HEADS).parameters
    assert make(f"gqa + kha(kind={kind})").spec.cost(DIM, HEADS).parameters - base == 3 * WIDTH**2
