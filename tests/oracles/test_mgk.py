"""Oracles of `mgk`."""

import pytest
import torch
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
from manyheads.core.kernel import using

WIDTH = 6
OWN, SHIFTED, HARD = (
    "gqa(kv_heads=2) + mgk",
    "gqa(kv_heads=2) + mgk(keys=shifted)",
    "gqa(kv_heads=2) + mgk(assign=hard)",
)
SPECS = [OWN, SHIFTED, HARD, "gqa + mgk(positions=5)", "gqa + mgk(keys=shifted, assign=hard)",
         "gqa(kv_heads=1) + mgk(precisions=[0.5, 1.0, 1.5], learned=true)"]  # fmt: skip


def parts(layer, x):
    """q `[B, H, T, d]`, the components' keys `[B, M, H, S, d]`, v, and c `[M]`."""
    p, piece = layer.project, layer.attends[0]
    m, each = len(piece.precisions), layer.heads // layer.layout.kv
    q, k, v = (heads_of(f(x), f.out_features // WIDTH) for f in (p.q_proj, p.k_proj, p.v_proj))
    if piece.shift is None:
        k = k.unflatten(1, (m, -1))
    else:
        k = k[:, None] - piece.shift
    k = torch.stack([rope(component) for component in k.unbind(1)], 1).repeat_interleave(each, 2)
    c = torch.tensor(piece.precisions).double() if piece.log_precision is None else piece.log_precision.exp()
    return rope(q), k, v.repeat_interleave(each, 1), c * WIDTH**-0.5


def kernel(layer, q, k, c):
    """-c_r ‖q_i - k_rj‖² from the differences themselves, `[B, M, H, T, S]`."""
    return -c[:, None, None, None] * (q[:, None, :, :, None] - k[:, :, :, None]).pow(2).sum(-1)


def naive(layer, x):
    """The sum of exponentials, or the largest exponent, with no expansion of the square."""
    q, k, v, c = parts(layer, x)
    e = kernel(layer, q, k, c)
    piece = layer.attends[0]
    if piece.prior is None:
        w = e.amax(1).exp()
    else:
        places = torch.arange(9).clamp_max(piece.prior.shape[-1] - 1)
        prior = piece.prior.sigmoid()[..., places].repeat_interleave(HEADS // layer.layout.kv, 1)
        w = (prior[:, :, None] * e.exp()).sum(1)
    w = w * triangle()
    return join(w / w.sum(-1, keepdim=True) @ v, layer.project.o_proj)


@pytest.mark.parametrize("spec", SPECS)
def test_distances_written_out(spec):
    """Also in the gradients of every parameter."""
    layer, x = make(spec), batch()
    y, want = layer(x), naive(layer, x)
    close(y, want)
    for got, wanted in zip(*(torch.autograd.grad(out.sin().sum(), list(layer.parameters())) for out in (y, want)),
                           strict=True):  # fmt: skip
        close(got, wanted, 1e-9)


@pytest.mark.parametrize("spec", [OWN, SHIFTED])
def test_components_run_on_fused_kernels(spec):
    layer, x = make(spec), batch()
    assert layer.explain(queries=64).kernel == "flash_cpu" and layer.explain(queries=1).kernel == "grouped"
    want, layer.few_rows = layer(x), 0
    for name in ("flash_cpu", "grouped", "tiled"):
        with using(name):
            close(layer(x), want)


def test_one_component_is_softmax_with_a_key_norm():
    """a = softmax(2 c q·k - c ‖k‖²); with keys of one length and c = scale / 2, plain attention."""
    layer, x = make("gqa + mgk(precisions=[0.5])"), batch()
    q, k, v, c = parts(layer, x)
    scores = 2 * c * q @ k[:, 0].transpose(-1, -2) - c * k[:, 0].pow(2).sum(-1)[:, :, None]
    close(layer(x), join(scores.masked_fill(~triangle(), -torch.inf).softmax(-1) @ v, layer.project.o_proj))
    assert layer.explain(queries=64).kernel == "sdpa" and layer.attends[0].prior is None
    normed = make("gqa + qk-norm + mgk(precisions=[0.5])")
    normed.transforms[0].k_gain.data.fill_(1.0)
    close(normed(x), twin(normed, "gqa + qk-norm")(x), 1e-5)  # up to the norm's eps
    differ(layer(x), twin(layer, "gqa")(x))


def changed(layer, **changes):
    return twin(layer, str(layer.spec), **{f"attends__0__{name}": value for name, value in changes.items()})


def test_a_prior_of_zero_removes_a_component():
    layer, x = make("gqa + mgk"), batch()
    prior = torch.stack([torch.full((HEADS, 1), 3.0), torch.full((HEADS, 1), -1e4)]).double()
    first = layer.project.k_proj.weight.detach().chunk(2)[0]
    close(changed(layer, prior=prior)(x), twin(layer, "gqa + mgk(precisions=[0.5])", project__k_proj__weight=first)(x))


def test_identical_components_leave_the_prior_no_say():
    layer, x = make("gqa + mgk(precisions=[0.7, 0.7], keys=shifted)"), batch()
    same = layer.attends[0].shift.detach()[:1].expand(2, -1, -1, -1)
    layer = changed(layer, shift=same)
    close(changed(layer, prior=torch.randn(2, HEADS, 1).double())(x), layer(x))


def test_only_ratios_of_priors_matter():
    layer, x = make("gqa + mgk"), batch()
    pi = 0.9 * torch.rand(2, HEADS, 1).double() + 0.05
    close(changed(layer, prior=(0.3 * pi).logit())(x), changed(layer, prior=pi.logit())(x))
    differ(changed(layer, prior=pi.flip(0).logit())(x), changed(layer, prior=pi.logit())(x))


def test_starts_with_equal_priors():
    for m, precisions in ((2, "[0.5, 1.5]"), (3, "[0.5, 1.0, 1.5]")):
        piece = Attention(f"gqa + mgk(precisions={precisions}, keys=shifted)", DIM, HEADS).attends[0]
        close(piece.prior.sigmoid(), torch.full((m, HEADS, 1), 1 / m), 1e-6)
        assert not piece.shift[0].any() and 0.3 < piece.shift[1:].std() < 0.7


@pytest.mark.parametrize("spec", [OWN, SHIFTED, HARD])
def test_rows_sum_to_one(spec):
    """Values of one come back as one, however far all keys are."""
    layer, x = make(spec), 100 * batch()
    width = layer.project.v_proj.out_features
    layer.project.v_proj = torch.nn.Linear(DIM, width).double()
    torch.nn.init.zeros_(layer.project.v_proj.weight)
    torch.nn.init.ones_(layer.project.v_proj.bias)
    layer.project.o_proj = torch.nn.Identity()
    close(layer(x), torch.ones(2, 9, DIM).double())


def test_hard_is_the_limit_of_components_far_apart():
    """max ≤ logsumexp, and equal (with equal priors) when one component leaves the others behind."""
    soft = make("gqa + mgk(keys=shifted)")
    for far, apart in ((0.0, False), (30.0, True)):
        shift = soft.attends[0].shift.detach().clone()
        shift[1] += far
        layer = changed(soft, shift=shift, prior=torch.zeros(2, HEADS, 1).double())
        hard, x = twin(layer, "gqa + mgk(keys=shifted, assign=hard)"), batch()
        e = kernel(layer, *(parts(layer, x)[i] for i in (0, 1, 3)))
        assert (e.logsumexp(1) >= e.amax(1)).all()
        if apart:
            close(hard(x), layer(x))
        else:
            differ(hard(x), layer(x))


def test_no_shift_and_one_precision_is_one_component():
    layer, x = make("gqa + mgk(keys=shifted, precisions=[0.5, 0.5])"), batch()
    layer = changed(layer, shift=torch.zeros(2, HEADS, 1, WIDTH).double())
    close(layer(x), twin(layer, "gqa + mgk(precisions=[0.5])")(x))


@pytest.mark.parametrize("spec", [OWN, SHIFTED, HARD])
def test_moving_queries_and_keys_together(spec):
    """Distances do not feel it; dot products do."""
    spec = spec.replace("gqa(kv_heads=2)", "gqa(kv_heads=2, bias=qkv)") + " + rope(none)"
    layer, x, by = make(spec), batch(), torch.randn(WIDTH).double()

    def moved(layer):
        biases = {
            f"project__{name}__bias": getattr(layer.project, name)
            .bias.detach()
            .unflatten(0, (-1, WIDTH))
            .add(by)
            .flatten()
            for name in ("q_proj", "k_proj")
        }
        return twin(layer, str(layer.spec), **biases)

    close(moved(layer)(x), layer(x))
    plain = make("gqa(kv_heads=2, bias=qkv) + rope(none)")
    differ(moved(plain)(x), plain(x))


@pytest.mark.parametrize("spec", [OWN, SHIFTED, HARD])
def test_positions_enter_as_distances(spec):
    """Shifts are turned with their keys, so moving all positions changes nothing."""
    layer, x = make(spec), batch()
    close(layer(x, positions=torch.arange(50, 59)[None]), layer(x))


@pytest.mark.parametrize("spec", SPECS)
def test_decode(spec):
    layer, x = make(spec), batch()
    close(decoded(layer, x), layer(x))
    close(decoded(layer, x, 4), layer(x))


@pytest.mark.parametrize("base", ["mla(view=expanded)", "mfa(width=8)", "gqa(kv_heads=2) + kha + qk-norm"])
def test_shifts_on_other_keys(base):
    layer, x = make(f"{base} + mgk(keys=shifted)"), batch()
    close(decoded(layer, x), layer(x))


def test_cost():
    """Two projections of keys in place of one, or 2 G d shifts; M G priors (M G S by position); G (M + 1) d cached."""
    specs = ("gqa", "gqa + mgk", "gqa + mgk(keys=shifted)", "gqa + mgk(assign=hard)")
    base, own, shifted, hard = (make(spec).spec.cost(DIM, HEADS) for spec in specs)
    assert own.parameters - base.parameters == DIM * DIM + 2 * HEADS and own.cache_floats == 3 * DIM
    assert shifted.parameters - base.parameters == 2 * DIM + 2 * HEADS and shifted.cache_floats == base.cache_floats
    assert hard.parameters - base.parameters == DIM * DIM
    learned = make("gqa + mgk(positions=256, learned=true)").spec.cost(DIM, HEADS)
    assert learned.parameters - own.parameters == 2 * HEADS * 255 + 2
    half = make("gqa(head_dim=6) + mgk", 48, 4).spec.cost(48, 4)  # of a layer with 8 such heads: 2.5 D² for 4 D²
    assert half.parameters - 8 == 2.5 * 48**2 and half.cache_floats == 1.5 * 48
    layer, cache = make(OWN), Cache()
    decoded(layer, batch(), 4, cache)
    assert cache.bytes() == 2 * layer.spec.cost(DIM, HEADS).cache_bytes(9, 8) == 2 * 9 * 8 * 2 * 3 * WIDTH


def test_refusals():
    for options, says in (("precisions=[]", "positive"), ("precisions=[0.5, -1.0]", "positive"),
                          ("positions=-1", "positions=-1"), ("positions=4, assign=hard", "positions=4")):  # fmt: skip
        with pytest.raises(OptionError, match=says):
            Attention(f"gqa + mgk({options})", DIM, HEADS)
    with pytest.raises(SpecError, match=r"nearest legal: mgk\(keys=shifted\)"):
        Attention("mfa + mgk", DIM, HEADS)
    with pytest.raises(SpecError, match=r"nearest legal: mla\(view=expanded\)"):
        Attention("mla + mgk(keys=shifted)", DIM, HEADS)
    for spec in ("entmax + mgk", "mgk + entmax", "mgk + talking_heads", "differential + mgk"):
        with pytest.raises(SpecError, match="mgk"):
            Attention(spec, DIM, HEADS)
