"""Oracles of `mergelock` that are about one layer: which changes of weights leave its function alone."""

import pytest
import torch
from tests.oracles.gauge import bounded, gauge_gqa, orthogonal, pair_turn
from tests.oracles.reference import HEADS, batch, close, decoded, differ, make, twin

WIDTH, G = 6, 2
BASE = f"gqa(kv_heads={G}, bias=qkvo)"


def several(draw):
    return [draw(WIDTH) for _ in range(G)]


@pytest.mark.parametrize("spec", [f"{BASE} + rope(none)", f"{BASE} + alibi", f"{BASE} + window(3) + alibi"])
def test_any_pair_without_rotation(spec):
    layer, x = make(spec), batch()
    other = gauge_gqa(layer, several(bounded), several(bounded))
    close(other(x), layer(x), 1e-10)
    close(decoded(other, x), layer(x), 1e-10)


@pytest.mark.parametrize("spec", [BASE, f"{BASE} + talking_heads", f"{BASE} + moh(top=2) + softmax(cap=3.0)"])
def test_pair_turns_under_rope(spec):
    layer, x = make(spec), batch()
    other = gauge_gqa(layer, several(pair_turn), several(bounded))
    close(other(x), layer(x), 1e-10)
    close(decoded(other, x), layer(x), 1e-10)


def test_any_other_query_map_breaks_rope():
    layer, x = make(BASE), batch()
    differ(gauge_gqa(layer, several(bounded))(x), layer(x), 0.1)
    differ(gauge_gqa(layer, several(orthogonal))(x), layer(x), 0.1)


def test_scale_of_queries_and_keys():
    layer, x = make(BASE), batch()
    close(gauge_gqa(layer, [0.5 * torch.eye(WIDTH).double(), 3 * torch.eye(WIDTH).double()])(x), layer(x), 1e-10)


def gains(layer, gain):
    return twin(layer, str(layer.spec), transforms__0__q_gain=gain, transforms__0__k_gain=gain)


@pytest.mark.parametrize(
    ("position", "draw", "gain", "holds"),
    [
        ("rope(none)", orthogonal, "equal", True),
        ("rope(none)", orthogonal, "free", False),
        ("rope(none)", bounded, "equal", False),
        ("rope", lambda w: pair_turn(w, False), "in pairs", True),
        ("rope", lambda w: pair_turn(w, False), "free", False),
        ("rope", orthogonal, "equal", False),
    ],
)
def test_query_key_norms(position, draw, gain, holds):
    """The same orthogonal A on q and k, where the gains cannot tell the channels that it mixes apart."""
    layer, x = make(f"gqa(kv_heads={G}) + qk-norm + {position}"), batch()
    free = 1 + torch.rand(WIDTH).double()
    layer = gains(layer, {"equal": torch.ones(WIDTH).double(), "free": free, "in pairs": free[:3].repeat(2)}[gain])
    other = gauge_gqa(layer, several(draw))
    close(other(x), layer(x), 1e-10) if holds else differ(other(x), layer(x))


def test_channel_permutations_with_their_gains():
    layer, x, order = make(f"gqa(kv_heads={G}) + qk-norm + rope(none)"), batch(), torch.randperm(WIDTH)
    other = gauge_gqa(layer, [torch.eye(WIDTH).double()[order]] * G)
    q, k = (getattr(layer.transforms[0], f"{name}_gain").detach()[order] for name in "qk")
    close(twin(other, str(other.spec), transforms__0__q_gain=q, transforms__0__k_gain=k)(x), layer(x), 1e-10)


@pytest.mark.parametrize(("part", "holds"), [("head_norm", False), ("moh(top=2)", True), ("talking_heads", True)])
def test_value_maps_under_gates(part, holds):
    """A norm over channels stands between V and O; one number for each head, and a mix of maps, do not."""
    layer, x = make(f"{BASE} + {part}"), batch()
    other = gauge_gqa(layer, None, several(bounded))
    close(other(x), layer(x), 1e-10) if holds else differ(other(x), layer(x))


def test_there_and_back():
    layer = make(f"{BASE} + rope(none)")
    a, b = several(bounded), several(bounded)
    back = gauge_gqa(gauge_gqa(layer, a, b), *([torch.linalg.inv(m) for m in maps] for maps in (a, b)))
    for name, value in layer.state_dict().items():
        close(back.state_dict()[name], value, 1e-10)
        assert torch.equal(gauge_gqa(layer).state_dict()[name], value)


def test_averaging_with_a_gauged_copy_destroys_the_function():
    layer, x = make(f"{BASE} + rope(none)"), batch()
    other = gauge_gqa(layer, several(bounded), several(bounded))
    mean = {n.replace(".", "__"): (v + other.state_dict()[n]) / 2 for n, v in layer.state_dict().items()}
    error = (twin(layer, str(layer.spec), **mean)(x) - layer(x)).norm() / layer(x).norm()
    assert error > 0.3


def test_bfloat16_holds_to_rounding():
    layer, x = make(BASE), batch()
    other = gauge_gqa(layer, several(pair_turn), several(bounded))
    error = (other.bfloat16()(x.bfloat16()).double() - layer(x)).norm() / layer(x).norm()
    assert error < 0.05


def mla(norm):
    return make(f"mla(rank=10, rope_dim=4, nope_dim=6, v_dim=5, norm={norm})")


def latent_change(layer, a):
    """A on the latent, A^-1 on what reads it."""
    down, up = (getattr(layer.project, name).weight.detach().clone() for name in ("kv_a_proj", "kv_b_proj"))
    down[:10] = a @ down[:10]
    return {"project__kv_a_proj__weight": down, "project__kv_b_proj__weight": up @ torch.linalg.inv(a)}


@pytest.mark.parametrize(("norm", "draw", "holds"), [("false", bounded, True), ("true", orthogonal, True),
                                                     ("true", bounded, False)])  # fmt: skip
def test_maps_of_the_latent(norm, draw, holds):
    """Any without a norm; under RMSNorm orthogonal ones, once its gain is folded into what reads the latent."""
    layer, x = mla(norm), batch()
    folded = layer
    if norm == "true":
        up = layer.project.kv_b_proj.weight.detach() * layer.project.kv_a_norm.weight.detach()
        ones = torch.ones(10).double()
        folded = twin(layer, str(layer.spec), project__kv_b_proj__weight=up, project__kv_a_norm__weight=ones)
        close(folded(x), layer(x), 1e-10)
    other = twin(folded, str(layer.spec), **latent_change(folded, draw(10)))
    close(other(x), layer(x), 1e-10) if holds else differ(other(x), layer(x))
    close(decoded(other, x), other(x), 1e-10)


def test_turns_of_the_rotary_key_and_maps_of_content():
    """One turn of each pair for the key and all heads' queries; any A on a head's content channels."""
    layer, x, turn = mla("true"), batch(), pair_turn(4)
    down, up = (getattr(layer.project, name).weight.detach().clone() for name in ("kv_a_proj", "kv_b_proj"))
    down[10:] = torch.linalg.inv(turn).T @ down[10:]
    q = layer.project.q_proj.weight.detach().unflatten(0, (HEADS, 10)).clone()
    content = torch.stack([bounded(6) for _ in range(HEADS)])
    q[:, :6], q[:, 6:] = content @ q[:, :6], turn @ q[:, 6:]
    up = up.unflatten(0, (HEADS, 11)).clone()
    up[:, :6] = torch.linalg.inv(content).transpose(1, 2) @ up[:, :6]
    changes = {"kv_a_proj": down, "q_proj": q.flatten(0, 1), "kv_b_proj": up.flatten(0, 1)}
    other = twin(layer, str(layer.spec), **{f"project__{name}__weight": value for name, value in changes.items()})
    close(other(x), layer(x), 1e-10)
    close(decoded(other, x), layer(x), 1e-10)
