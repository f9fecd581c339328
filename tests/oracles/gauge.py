"""Random changes of a layer's weights that leave its function alone: what every conversion test may be held to."""

import torch
from tests.oracles.reference import twin


def bounded(width, condition=3.0):
    """A random invertible map Q₁ diag(s) Q₂ with s in [1/κ, κ]."""
    q1, q2 = (torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0] for _ in range(2))
    return q1 * condition ** (2 * torch.rand(width, dtype=torch.float64) - 1) @ q2


def orthogonal(width):
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]


def pair_turn(width, scaled=True):
    """What commutes with RoPE (half pairing): in each pair s R(φ)."""
    half = width // 2
    angle = 6.28 * torch.rand(half, dtype=torch.float64)
    size = 3 ** (2 * torch.rand(half, dtype=torch.float64) - 1) if scaled else torch.ones(half, dtype=torch.float64)
    cos, sin = torch.diag(size * angle.cos()), torch.diag(size * angle.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def gauge_gqa(layer, a=None, b=None):
    """A on each group's queries and A^-T on its key; B on its value and B^-1 on its slices of W_O; maps by group."""
    heads, groups = layer.layout, layer.layout.kv
    each, state, eye = heads.q // groups, layer.state_dict(), torch.eye(heads.qk_width, dtype=torch.float64)
    a = [eye] * groups if a is None else a
    b = [torch.eye(heads.v_width, dtype=torch.float64)] * groups if b is None else b

    def on_rows(name, maps):
        changed = {}
        for kind in ("weight", "bias"):
            key = f"project.{name}.{kind}"
            if key in state:
                rows = state[key].reshape(len(maps), maps[0].shape[0], -1)
                changed[key.replace(".", "__")] = (torch.stack(maps) @ rows).reshape(state[key].shape)
        return changed

    many = [g for g in range(groups) for _ in range(each)]
    o = state["project.o_proj.weight"].unflatten(1, (heads.q, heads.v_width)).transpose(0, 1)
    o = o @ torch.stack([torch.linalg.inv(b[g]) for g in many])
    changes = on_rows("q_proj", [a[g] for g in many]) | on_rows("k_proj", [torch.linalg.inv(m).T for m in a])
    changes |= on_rows("v_proj", b) | {"project__o_proj__weight": o.transpose(0, 1).flatten(1)}
    return twin(layer, str(layer.spec), **changes)
