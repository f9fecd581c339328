"""Oracles of `super-attention`."""

import pytest
import torch
import transformers
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
)

from manyheads import Attention, Axis, Cache, OptionError, Site, Spec
from manyheads.testing import check

WIDTH = 6
EYE = torch.eye(DIM).double()
SUPER = f"super-attention(length={TOKENS})"
FORMS = ["super-attention(form=optimised)", "super-attention(form=efficient)", SUPER, f"{SUPER[:-1]}, per_head=true)"]


@pytest.mark.parametrize("spec", FORMS)
def test_written_out(spec):
    layer, x = make(spec), batch()
    p, raw = layer.project, heads_of(x, HEADS)
    k = heads_of(p.k_proj(x), HEADS) if "optimised" in spec else raw
    v = p.align.tril() @ raw if "length" in spec else raw
    a = weights(rope(heads_of(p.q_proj(x), HEADS)), rope(k), WIDTH**-0.5)
    close(a.sum(-1), torch.ones(2, HEADS, TOKENS).double())  # over keys
    close(layer(x), join(a @ v, p.o_proj))


@pytest.mark.parametrize("position", ["", " + rope(none)"])
def test_forms_are_attention_with_identity_projections_bit_for_bit(position):
    optimised, x = make(f"super-attention(form=optimised){position}"), batch()
    assert torch.equal(twin(optimised, f"gqa{position}", project__v_proj__weight=EYE)(x), optimised(x))
    efficient = twin(optimised, f"super-attention(form=efficient){position}")
    efficient.few_rows = 0  # for few queries keys are never turned, which is another order of sums
    both = {"project__k_proj__weight": EYE, "project__v_proj__weight": EYE}
    assert torch.equal(twin(efficient, f"gqa{position}", **both)(x), efficient(x))


def test_one_head_folds_exactly():
    """W_O' = W_O W_V and W_Q' = W_Kᵀ W_Q as `nn.Linear` holds them; same scale, no rotation."""
    plain, x = make("gqa + rope(none)", heads=1), batch()
    q, k, v, o = (getattr(plain.project, f"{name}_proj").weight.detach() for name in "qkvo")
    optimised = twin(plain, "super-attention(form=optimised) + rope(none)", project__o_proj__weight=o @ v)
    close(optimised(x), plain(x))
    folded = {"project__q_proj__weight": k.T @ q, "project__o_proj__weight": o @ v}
    close(twin(plain, "super-attention(form=efficient) + rope(none)", **folded)(x), plain(x))


def test_more_heads_fold_only_where_values_stay_in_their_slice():
    plain, x = make("gqa + rope(none)"), batch()
    v, o = torch.block_diag(*torch.randn(HEADS, WIDTH, WIDTH).double()), plain.project.o_proj.weight.detach()
    plain = twin(plain, "gqa + rope(none)", project__v_proj__weight=v)
    close(twin(plain, "super-attention(form=optimised) + rope(none)", project__o_proj__weight=o @ v)(x), plain(x))


@pytest.mark.parametrize("position", ["", " + rope(none)"])
def test_identity_alignment_is_efficient(position):
    layer, x = make(SUPER + position), batch()
    layer.project.align.data.copy_(torch.eye(TOKENS))
    close(layer(x), twin(layer, f"super-attention(form=efficient){position}")(x))


def test_uniform_weights_give_the_mean_of_aligned_rows():
    layer, x = make(SUPER, site=Site(causal=False)), batch()
    layer.project.q_proj.weight.data.zero_()
    mean = (layer.project.align[0] @ x).mean(1, keepdim=True).expand_as(x)
    close(layer(x), layer.project.o_proj(mean))


def test_a_triangular_alignment_is_causal_and_a_dense_one_is_not():
    layer, x = make(SUPER), batch().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 3].sum(), x)
    assert (gradient[:, 4:] == 0).all() and (gradient[:, :4] != 0).any(-1).all()
    layer(x).sum().backward()
    above = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    assert (layer.project.align.grad[0][above] == 0).all() and layer.project.align.grad[0][~above].any()
    layer.project.causal = False
    (gradient,) = torch.autograd.grad(layer(x)[:, 3].sum(), x)
    assert (gradient[:, 4:] != 0).any()


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("parts", ["", " + kha", " + rope(none)", " + window(3)"])
def test_decode(spec, parts):
    layer, x = make(spec + parts), batch()
    for block in (1, 4):
        close(decoded(layer, x, block), layer(x))


def test_a_context_beyond_the_alignment_is_an_error():
    layer, x, cache = make(SUPER), batch(TOKENS + 1), Cache()
    decoded(layer, x[:, :-1], 1, cache)
    says = f"position {TOKENS} is beyond W_A of length={TOKENS}"
    with pytest.raises(ValueError, match=says):
        layer(x[:, -1:], cache=cache)
    with pytest.raises(ValueError, match=says):
        layer(x)
    with pytest.raises(ValueError, match="position 12 is beyond"):
        layer(x[:, :3], positions=torch.tensor([[10, 11, 12]]))


def test_padding_and_other_documents_stay_out_of_the_alignment():
    layer, x = make(SUPER), batch()
    valid = torch.arange(TOKENS)[None] >= torch.tensor([[0], [4]])
    y = layer(torch.where(valid[..., None], x, 100.0), mask=valid)
    close(y[1, 4:], layer(x[1:, 4:])[0])
    place, segment = torch.cat([torch.arange(4), torch.arange(5)])[None], (torch.arange(TOKENS) >= 4).long()[None]
    packed = layer(x, positions=Axis(TOKENS, 0, given_position=place, segment=segment))
    close(packed, torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1))


def test_going_back_and_a_window():
    """A window frees no rows, since later values are made of all of them."""
    layer, x, cache = make(f"{SUPER} + window(3)"), batch(), Cache()
    decoded(layer, x[:, :7], 1, cache)
    assert cache.bytes() == len(x) * 7 * 2 * DIM * 8 == len(x) * layer.spec.cost(DIM, HEADS).cache_bytes(7, 8)
    cache.rollback(3)
    close(layer(x[:, 4:], cache=cache), layer(x)[:, 4:])


def test_a_stock_cache_is_refused():
    with pytest.raises(ValueError, match=r"does not give earlier rows to new ones; use manyheads.Cache"):
        make(SUPER)(batch(), cache=transformers.DynamicCache())


def test_heads_of_their_own_alignment():
    layer, x = make(FORMS[3]), batch()
    shared = make(SUPER)
    state = layer.state_dict() | {"project.align": layer.project.align.detach()[:1]}
    shared.load_state_dict(state)
    differ(layer(x), shared(x))
    layer.project.align.data.copy_(layer.project.align[:1].expand(HEADS, -1, -1).clone())
    close(layer(x), shared(x))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_own_alignments_hold_to_the_laws():
    check("super-attention(length=12, per_head=true)")


def test_cost():
    """3 D², 2 D² and, at length = D, 3 D² of multi-head attention's 4 D²; the efficient form caches half."""
    full = Spec.parse("gqa").cost(DIM, HEADS)
    for options, squares, cached in (
        ("form=optimised", 3, 2),
        ("form=efficient", 2, 1),
        (f"length={DIM}", 3, 2),
        (f"length={DIM}, per_head=true", 6, 2),
    ):
        cost = Spec.parse(f"super-attention({options})").cost(DIM, HEADS)
        assert cost.parameters == squares * DIM**2 and cost.cache_floats == cached * DIM
    assert full.parameters == 4 * DIM**2 and full.cache_floats == 2 * DIM
    for spec in FORMS[1:3]:
        layer, cache, x = make(spec), Cache(), batch()
        decoded(layer, x, 1, cache)
        assert cache.bytes() == len(x) * TOKENS * DIM * 8 * (1 if "efficient" in spec else 2)


def test_alignment_starts_as_xaviers_uniform():
    torch.manual_seed(0)
    align = Attention("super-attention(length=64)", DIM, HEADS).project.align
    assert align.abs().max() <= (6 / 128) ** 0.5 and abs(align.std() / (2 / 128) ** 0.5 - 1) < 0.05


def test_length_of_the_site():
    assert Attention("super-attention", DIM, HEADS, site=Site(max_len=7)).project.length == 7


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", "give length"),
        ("length=0", "give length"),
        ("form=efficient, length=9", "form=efficient has not"),
        ("form=optimised, per_head=true", "form=optimised has not"),
    ],
)
def test_refusals(options, why):
    with pytest.raises(OptionError, match=why):
        Attention(f"super-attention({options})", DIM, HEADS)
    with pytest.raises(OptionError, match="25 channels do not cut into 4 slices"):
        Attention("super-attention(form=efficient)", 25, HEADS)
