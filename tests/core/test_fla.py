"""The kernels of flash-linear-attention: which of them run, and in which layout they are given what they take.

There is no GPU here, so that a module of that name stands in for them, which computes by the definition.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from manyheads import Attention, Axis, Cache
from manyheads.core import fla

B, T, H, G, K, V = 2, 70, 4, 2, 6, 5


@pytest.fixture
def calls(monkeypatch):
    """Calls of the stand-in; tensors count as on a GPU."""
    made = []

    def kernel(name):
        def run(*, q, k, v, scale, initial_state, output_final_state, g=None, beta=None):
            made.append((name, locals() | {"run": None}))
            assert all(t is None or t.is_contiguous() for t in (q, k, v, g, beta, initial_state))
            state, out = initial_state.double(), []
            for t in range(q.shape[1]):
                if g is not None:
                    left = g[:, t].double().exp()
                    state = state * (left[..., None] if left.ndim == 3 else left[..., None, None])
                row, key = v[:, t, :, None].double(), k[:, t, :, :, None].double()
                if beta is not None:
                    row = beta[:, t, :, None, None].double() * (row - key.mT @ state)
                state = state + key @ row
                out.append((scale * q[:, t, :, None].double() @ state)[:, :, 0])
            return torch.stack(out, 1).to(v.dtype), state.float() if output_final_state else None

        return run

    for name in (
        "fla",
        "fla.ops",
        *(f"fla.ops.{op}" for op in ("simple_gla", "gla", "delta_rule", "gated_delta_rule")),
    ):
        module = types.ModuleType(name)
        op = name.rpartition(".")[2]
        setattr(module, f"chunk_{op}", kernel(op))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "on_gpu", lambda t: True)
    monkeypatch.setattr(fla, "installed", lambda: True)
    return made


def layer_of(spec, dtype):
    torch.manual_seed(0)
    return Attention(f"gqa(kv_heads={G}, head_dim={K}, v_dim={V}) + {spec}", 24, H).to(dtype).eval()


SPECS = {
    "linear(normaliser=false)": ("simple_gla", {"g": 3}),
    "features + linear": ("simple_gla", {"g": 3}),
    "retention": ("simple_gla", {"g": 3}),
    "gated_linear(rank=3)": ("gla", {"g": 4}),
    "delta": ("delta_rule", {"beta": 3}),
    "delta(gated=true)": ("gated_delta_rule", {"g": 3, "beta": 3}),
}


@pytest.mark.parametrize("spec", SPECS)
def test_layouts(spec, calls):
    """`[B, T, H, …]` in the layer's dtype, log decays and β in float32, a scale of one, the state in and out."""
    (name, also), layer, x = SPECS[spec], layer_of(spec, torch.bfloat16), torch.randn(B, T, 24).bfloat16()
    layer(x)
    ((op, given),) = calls
    value = V + (spec == "features + linear")
    dtype = torch.float32 if value > V else torch.bfloat16  # sums of weights in float32
    assert op == name and given["scale"] == 1.0 and given["output_final_state"]
    assert given["q"].shape == given["k"].shape == (B, T, H, K) and given["v"].shape == (B, T, H, value)
    assert given["q"].dtype == given["k"].dtype == given["v"].dtype == dtype
    assert torch.equal(given["k"][:, :, 0], given["k"][:, :, 1])
    assert not torch.equal(given["k"][:, :, 1], given["k"][:, :, 2])
    assert given["initial_state"].shape == (B, H, K, value) and given["initial_state"].dtype == torch.float32
    for number in ("g", "beta"):
        if number in also:
            assert given[number].shape == (B, T, H, K)[: also[number]] and given[number].dtype == torch.float32
        else:
            assert given[number] is None
    if "g" in also:
        assert (given["g"] <= 0).all() and given["g"].min() >= fla.FAINTEST


@pytest.mark.parametrize("spec", SPECS)
def test_equal_to_our_own(spec, calls, monkeypatch):
    """With padding, and with a state that is carried on, in chunks of theirs and steps of ours."""
    layer, x = layer_of(spec, torch.bfloat16), torch.randn(B, 2 * T + 1, 24).bfloat16()
    valid = torch.arange(2 * T + 1)[None] >= torch.tensor([[0], [9]])

    def run(cache):
        with torch.no_grad():
            parts = [layer(x[:, cut], mask=valid[:, cut], cache=cache) for cut in (slice(0, T), slice(T, 2 * T))]
            return torch.cat([*parts, layer(x[:, 2 * T :], mask=valid[:, 2 * T :], cache=cache)], 1)[valid].float()

    theirs = run(one := Cache())
    assert len(calls) == 2
    monkeypatch.setattr(fla, "on_gpu", lambda t: False)
    ours = run(two := Cache())
    assert len(calls) == 2
    assert F.cosine_similarity(theirs, ours, -1).min() > 0.99 and (theirs - ours).norm() < 0.02 * ours.norm()
    for name, state in two.site(0).state.items():
        assert one.site(0).state[name].shape == state.shape and one.site(0).state[name].dtype == torch.float32
        torch.testing.assert_close(one.site(0).state[name], state, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("spec", SPECS)
def test_when_they_do_not_run(spec, calls, monkeypatch):
    """In float64, on few tokens, on packed documents, on a CPU, without the package; the delta rule in float32 too."""
    x = torch.randn(1, T, 24)
    layer_of(spec, torch.float64)(x.double())
    layer = layer_of(spec, torch.bfloat16)
    layer(x[:, : fla.SHORT - 1].bfloat16())
    layer(x.bfloat16(), positions=Axis(T, 0, segment=(torch.arange(T) // 50)[None]))
    for name in ("installed", "on_gpu"):
        with monkeypatch.context() as patch:
            patch.setattr(fla, name, lambda *_: False)
            layer(x.bfloat16())
    assert not calls
    layer_of(spec, torch.float32)(x)
    assert bool(calls) == ("delta" not in spec)


def test_the_plan_says_so(calls):
    layer = layer_of("delta", torch.bfloat16)
    assert layer.explain(T).kernel == "fla"
    assert dict(layer.explain(3).refused)["fla"] == f"3 tokens, fewer than {fla.SHORT}"
    assert "float32" in dict(layer_of("delta", torch.float32).explain(T).refused)["fla"]
    assert layer_of("retention", torch.float32).explain(T).kernel == "fla"
    assert "no kernel" in dict(layer_of("mhla", torch.float32).explain(T).refused)["fla"]


def test_decays_that_leave_nothing(calls):
    from manyheads.core.scan import Stream, decayed_sum

    q, k, v = (torch.randn(1, 2, T, 4) for _ in range(3))
    logs = torch.full((1, 2, T, 4), -torch.inf)
    o, _ = decayed_sum(q, k, v, logs, Stream(None, None, None))
    torch.testing.assert_close(o, (q * k).sum(-1, keepdim=True) * v)
