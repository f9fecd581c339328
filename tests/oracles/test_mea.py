"""Oracles of `mea`: heads composed of heads, and the norm behind them."""

import pytest
import torch
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
    twin,
    weights,
)  # fmt: skip

from manyheads import Attention, Cache, OptionError, Site, Spec, SpecError
from manyheads.attention.transform.head_composition import virtual_heads
from manyheads.core.flow import Links

WIDTH = 6
VIRTUAL = "gqa(kv_heads=2) + head_composition(kv_heads=4)"


def composed(layer, x):
    """q, K, V after rotation, by the equations: components mixed over heads, then rotated."""
    p, mix, kv = layer.project, layer.transforms[0], layer.project.kv_heads
    k = torch.einsum("bisd,ij->bjsd", heads_of(p.k_proj(x), kv), mix.k)
    v = torch.einsum("bisd,ij->bjsd", heads_of(p.v_proj(x), kv), mix.v)
    return rope(heads_of(p.q_proj(x), HEADS)), rope(k), v


def spread(x):
    return x.repeat_interleave(HEADS // x.shape[1], 1)


@pytest.mark.parametrize(("base", "kv"), [("gqa", 4), ("gqa(kv_heads=2)", 4), ("gqa(kv_heads=3)", 2), ("gqa", 1)])
def test_written_out(base, kv):
    layer, x = make(f"{base} + mea(kv_heads={kv})"), batch()
    q, k, v = composed(layer, x)
    o = weights(q, spread(k), WIDTH**-0.5) @ spread(v)
    o = o / (o.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.gates[0].gain
    close(layer(x), join(o, layer.project.o_proj))


@pytest.mark.parametrize("base", ["gqa", "gqa(kv_heads=2)", "mla(view=expanded)", "mfa(width=8)"])
def test_starts_as_the_base_layer(base):
    layer, x, plain = Attention(f"{base} + head_composition", DIM, HEADS).double(), batch(), make(base)
    layer.load_state_dict(layer.state_dict() | plain.state_dict())
    close(layer(x), plain(x), 1e-12)


def test_virtual_heads_start_as_grouped_heads():
    layer, x, plain = Attention(VIRTUAL, DIM, HEADS).double(), batch(), make("gqa(kv_heads=2)")
    layer.load_state_dict(layer.state_dict() | plain.state_dict())
    close(layer(x), plain(x), 1e-12)
    mix = Attention("gqa(kv_heads=3) + head_composition(kv_heads=4)", DIM, HEADS).transforms[0].k
    assert mix.argmax(0).tolist() == [0, 0, 1, 2] and (mix.sum(0) == 1).all()


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_without_the_norm_it_folds_into_the_projections(kv_heads):
    base = f"gqa(kv_heads={kv_heads}, bias=qkv)"
    layer, x = make(f"{base} + head_composition"), batch()
    changes = {}
    for name in "kv":
        for what in ("weight", "bias"):
            rows = getattr(getattr(layer.project, f"{name}_proj"), what).detach().unflatten(0, (kv_heads, WIDTH))
            mixer = getattr(layer.transforms[0], name).detach()
            changes[f"project__{name}_proj__{what}"] = torch.einsum("id...,ij->jd...", rows, mixer).flatten(0, 1)
    close(twin(layer, base, **changes)(x), layer(x))
    differ(twin(layer, base)(x), layer(x))


def test_composition_commutes_with_rotation():
    """So rotated components are what is cached, unless a norm stands between."""
    piece, k = make(VIRTUAL).transforms[0], torch.randn(2, 2, TOKENS, WIDTH).double()
    close(piece.on_k(rope(k), None), rope(piece.on_k(k, None)))
    assert make(VIRTUAL).rotate_at == make(f"gqa + qk-norm + {VIRTUAL[18:]}").rotate_at == "write"
    assert make(f"{VIRTUAL} + qk-norm").rotate_at == "read"


def test_a_norm_behind_it_norms_composites():
    layer, x = make(f"{VIRTUAL} + qk-norm"), batch()
    p, (mix, norm) = layer.project, layer.transforms

    def rms(t, gain):
        return t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    q, v = rms(heads_of(p.q_proj(x), HEADS), norm.q_gain), mix.on_v(heads_of(p.v_proj(x), 2), None)
    k = rms(mix.on_k(heads_of(p.k_proj(x), 2), None), norm.k_gain)
    close(layer(x), join(weights(rope(q), rope(k), WIDTH**-0.5) @ v, p.o_proj))
    close(decoded(layer, x), layer(x))


def test_mixing_values_is_the_other_mix_of_talking_heads():
    """Σ_j T_ij A_i V_j = A_i (T V)_i is not Σ_j T_ij A_j V_i, which is talking heads' second mix."""
    layer, x, eye = make("gqa + head_composition"), batch(), torch.eye(HEADS).double()
    layer = twin(layer, str(layer.spec), transforms__0__k=eye)
    mixer = layer.transforms[0].v.detach()
    q, k, v = composed(twin(layer, str(layer.spec), transforms__0__v=eye), x)
    a = weights(q, k, WIDTH**-0.5)
    ours = torch.einsum("ji,bits,bjsd->bitd", mixer, a, v)
    theirs = torch.einsum("ji,bjts,bisd->bitd", mixer, a, v)
    close(layer(x), join(ours, layer.project.o_proj))
    talking = twin(layer, "gqa + talking_heads", attends__0__logits=eye, attends__0__weights=mixer)
    close(talking(x), join(theirs, layer.project.o_proj))
    differ(talking(x), layer(x))


def test_differential_attention_is_talking_heads_of_blocks():
    layer, x, eye = make("gqa + differential"), batch(), torch.eye(HEADS).double()
    block = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()
    block[1] = -layer.attends[0].subtracted().detach().double()
    mixer = torch.block_diag(block, block)
    close(twin(layer, "gqa + talking_heads", attends__0__logits=eye, attends__0__weights=mixer)(x), layer(x))


def converted(plain, components):
    changes = {}
    for name in "kv":
        weight, mixer = virtual_heads(getattr(plain.project, f"{name}_proj").weight.detach(), HEADS, components)
        changes |= {f"project__{name}_proj__weight": weight, f"transforms__0__{name}": mixer}
    return twin(plain, f"gqa(kv_heads={components}) + head_composition(kv_heads={HEADS})", **changes)


def test_conversion_is_exact_at_the_rank_of_the_heads():
    plain, x = make("gqa"), batch()
    close(converted(plain, HEADS)(x), plain(x))
    low = {}
    for name in "kv":
        mixed = torch.randn(HEADS, 2).double() @ torch.randn(2, WIDTH * DIM).double()
        low[f"project__{name}_proj__weight"] = mixed.view(HEADS * WIDTH, DIM)
    plain = twin(plain, "gqa", **low)
    close(converted(plain, 2)(x), plain(x), 1e-9)
    differ(converted(plain, 1)(x), plain(x))


@pytest.mark.parametrize("components", [1, 2, 3])
def test_conversion_leaves_out_the_smallest_singular_values(components):
    weight = torch.randn(HEADS * WIDTH, DIM).double()
    made, mixer = virtual_heads(weight, HEADS, components)
    got = torch.einsum("ie,ij->je", made.view(components, -1), mixer).view_as(weight)
    dropped = torch.linalg.svdvals(weight.view(HEADS, -1))[components:]
    close((got - weight).pow(2).sum(), dropped.pow(2).sum())


def test_the_absorbed_form():
    """Σ_i W_K[i, j] (q_h · k_i) and Σ_i W_V[i, j] (A_h v_i): one query of length c·d a head against the flat cache."""
    layer, x, cache = make(VIRTUAL), batch(), Cache()
    y = decoded(layer, x, 4, cache)
    store, mix = cache.site(0).growing, layer.transforms[0]
    k, v = (store[name].rows().transpose(1, 2).flatten(2)[:, None] for name in "kv")
    q = rope(heads_of(layer.project.q_proj(x), HEADS))
    wide = torch.einsum("bhtd,ih->bhtid", q, mix.k).flatten(3)
    o = (weights(wide, k, WIDTH**-0.5) @ v).unflatten(-1, (2, WIDTH))
    close(join(torch.einsum("bhtid,ih->bhtd", o, mix.v), layer.project.o_proj), y)
    assert cache.bytes() == 2 * TOKENS * (2 * 2 * WIDTH) * 8


def test_the_norm_forgets_the_size_of_values():
    layer, x = make("gqa(kv_heads=2) + mea(kv_heads=4)"), batch()
    state = layer.state_dict()["project.v_proj.weight"]
    state *= 1e3  # eps no longer matters
    close(twin(layer, str(layer.spec), project__v_proj__weight=7 * state)(x), layer(x), 1e-7)
    plain = twin(layer, VIRTUAL)
    differ(twin(plain, VIRTUAL, project__v_proj__weight=7 * state)(x), plain(x))


def test_the_norm_sets_the_size_of_head_outputs():
    layer, o = Attention("mea", DIM, HEADS).double(), 100 * torch.randn(2, HEADS, TOKENS, WIDTH).double()
    layer.gates[0].gain.data.fill_(-3.0)
    rms = layer.gates[0].gate(o, None).pow(2).mean(-1).sqrt()
    close(rms, torch.full_like(rms, 3.0), 1e-5)


def test_permuting_composites():
    """With their groups of queries and slices of W_O."""
    layer, x = make("gqa(kv_heads=3) + mea(kv_heads=2)"), batch()
    o = layer.project.o_proj.weight.detach().unflatten(1, (2, -1)).flip(1).flatten(1)
    q = layer.project.q_proj.weight.detach().unflatten(0, (2, -1)).flip(0).flatten(0, 1)
    k, v = (getattr(layer.transforms[0], name).detach().flip(1) for name in "kv")
    other = {"project__q_proj__weight": q, "project__o_proj__weight": o, "transforms__0__k": k, "transforms__0__v": v}
    close(twin(layer, str(layer.spec), **other)(x), layer(x))


@pytest.mark.parametrize(
    "spec", [VIRTUAL, "gqa(kv_heads=2) + mea(kv_heads=4)", "mla(view=expanded) + mea", "mfa + mea"]
)
def test_decode(spec):
    layer, x = make(spec), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))
    y = layer(x.requires_grad_())
    (gradient,) = torch.autograd.grad(y[:, 4].sum(), x)
    assert not gradient[:, 5:].any()


@pytest.mark.parametrize("rest", ["", " + qk-norm", " + kha(kind=mlp, on=qkv) + qk-norm", " + complexformer"])
def test_a_layer_that_reads_the_rows_of_another_composes_them_itself(rest):
    """And what comes behind the composition, so that with equal weights and inputs it is the layer that wrote them."""
    owner, reader = (make(VIRTUAL + rest, site=site) for site in (Site(0, 2), Site(1, 2, kv_source=0)))
    x, links, own = batch(), Links(), reader.state_dict()
    reader.load_state_dict({name: value for name, value in owner.state_dict().items() if name in own})
    want = owner(x, links=links)
    close(reader(x, links=links), want)
    assert {name.split(".")[0] for name in set(owner.state_dict()) - set(own)} == {"project"}


@pytest.mark.parametrize(("components", "composites"), [(4, 4), (2, 4), (3, 4), (4, 2)])
def test_cost(components, composites):
    base = f"gqa(kv_heads={components})"
    cost = Spec.parse(f"{base} + mea(kv_heads={composites})").cost(DIM, HEADS)
    projections = 2 * DIM * HEADS * WIDTH + 2 * DIM * components * WIDTH
    assert cost.parameters == projections + 2 * components * composites + WIDTH
    assert cost.cache_floats == 2 * components * WIDTH


def test_refusals():
    with pytest.raises(OptionError, match="head_composition: 4 query heads cannot share kv_heads=3"):
        Attention("gqa(kv_heads=2) + head_composition(kv_heads=3)", DIM, HEADS)
    with pytest.raises(OptionError, match="head_composition: kv_heads=0; at least 1"):
        Attention("head_composition(kv_heads=0)", DIM, HEADS)
    with pytest.raises(OptionError, match="2 of the 8 key channels belong to no head; kv_heads may be 4"):
        Attention("mla(view=expanded) + head_composition(kv_heads=2)", DIM, HEADS)
    with pytest.raises(SpecError, match="nearest legal: mla\\(view=expanded\\)"):
        Attention("mla + head_composition", DIM, HEADS)
