"""Every part alone, every legal pair and some triples hold to the laws; every illegal pair is refused with a reason."""

import warnings
from collections import defaultdict

import pytest
import torch

from manyheads import Attention, OptionError, Site, Spec, SpecError
from manyheads.core.part import Part, Transform
from manyheads.testing import (
    LAWS,
    Case,
    check,
    combinations,
    cross,
    illegal_pairs,
    legal_pairs,
    precision,
    samples,
    shared_rows,
    shared_weights,
    singles,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

ALONE_ONLY = {"kernels", "save_load", "single_precision", "stock_cache", "train_equals_eval"}
TOGETHER = tuple(law for law in LAWS if law.__name__ not in ALONE_ONLY)
"""What combinations can break; the other laws are held on each part alone, and on triples."""

BOTH_WAYS = Site(causal=False)
UNORDERED = {"batch", "gradients", "kernels", "views", "sides", "spec_line", "save_load", "train_equals_eval"}
"""The laws that say nothing of an order of tokens."""

LEGAL, LEGAL_BOTH_WAYS, ILLEGAL = legal_pairs(), legal_pairs(BOTH_WAYS), defaultdict(list)
for first, second, error in illegal_pairs():
    ILLEGAL[first.name].append((first, second, error))

# Found by hand: combinations where two parts meet in an unusual way.
MEETINGS = (
    "mla(view=expanded) + kha + differential",  # a linear transform at read under values set side by side
    "mla(view=expanded) + kha(kind=mlp) + qk-norm + gda",
    "mfa(width=8, key_reuse=true) + kha + talking_heads + alibi",
    "mtla(stride=3) + kha + talking_heads + window(7)",
    "gqa(kv_heads=4, head_dim=6) + kha + qk-norm + gda(ratio=4) + moh(top=3)",  # of 10 heads
    "gqa + kha + qk-norm + window([2, 3, 9, 4]) + softmax(cap=3.0) + talking_heads + head_norm + moh(top=2)",
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("spec", singles())
def test_part(spec, law):
    check(spec, laws=[law])


def one_of_each(specs):
    """Every two parts once; with other options of theirs it takes longer than a test suite should."""
    seen = set()
    for spec in specs:
        names = tuple(part.name for part in Spec.parse(spec).parts)
        yield pytest.param(spec, marks=[pytest.mark.slow] if names in seen else [])
        seen.add(names)


@pytest.mark.parametrize("spec", one_of_each(LEGAL))
def test_pair(spec):
    check(spec, laws=TOGETHER)


@pytest.mark.parametrize("spec", [*combinations(200, 3, seed=0), *combinations(200, 4, seed=0)])
def test_triple_and_quadruple(spec):
    check(spec, laws=TOGETHER)


@pytest.mark.parametrize("spec", MEETINGS)
def test_meeting(spec):
    check(spec, heads=10 if "ratio=4" in spec else 4)


@pytest.mark.parametrize("spec", singles(Site(cross=True, causal=False)))
def test_cross_attention(spec):
    check(spec, laws=[cross])


@pytest.mark.parametrize("spec", singles(BOTH_WAYS))
def test_bidirectional(spec):
    check(spec, laws=[law for law in LAWS if law.__name__ in UNORDERED], site=BOTH_WAYS)


@pytest.mark.parametrize("spec", one_of_each(sorted({*LEGAL_BOTH_WAYS} - {*LEGAL})))
def test_bidirectional_pair(spec):
    check(spec, laws=[law for law in TOGETHER if law.__name__ in UNORDERED], site=BOTH_WAYS)


@pytest.mark.parametrize("spec", singles(Site(1, 2, kv_source=0)))
def test_shared_rows(spec):
    check(spec, laws=[shared_rows])


@pytest.mark.parametrize("spec", singles(Site(1, 2, attn_source=0)))
def test_shared_weights(spec):
    check(spec, laws=[shared_weights])


@pytest.mark.parametrize("mask", ["causal", "padding", "given", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", singles())
def test_precision(spec, dtype, mask):
    for train in (False, True):
        precision(Case(spec), dtype, mask, train)


@pytest.mark.parametrize("name", ILLEGAL)
def test_refusal_names_both_parts(name):
    """All pairs of a part in one test: collecting ten thousand tests takes longer than running them."""
    for first, second, error in ILLEGAL[name]:
        said = str(error)
        assert (first.name in said and second.name in said) or repr(first.slot) in said, f"{first} + {second}"


def test_every_part_is_covered():
    alone, pairs = " ".join([*singles(), *singles(BOTH_WAYS)]), {*LEGAL, *LEGAL_BOTH_WAYS}
    for part in samples():
        assert part.name in alone
        assert sum(part.name in pair for pair in pairs) > 5
    for found in (singles(), LEGAL, LEGAL_BOTH_WAYS):
        assert len(set(found)) == len(found)


def test_combinations_are_drawn_by_seed():
    assert combinations(5, 3, seed=1) == combinations(5, 3, seed=1) != combinations(5, 3, seed=2)
    with pytest.raises(ValueError, match="turned up"):
        combinations(1000, 1)


def test_other_sizes():
    check("gqa(kv_heads=4) + kha + moh(top=6)", dim=16, heads=8)


def test_a_broken_part_is_caught(monkeypatch):
    """The suite's own proof: a key transform that reads the future, another that forgets padding, a wrong price."""
    kha = type(Attention("kha", 24, 4).transforms[0])
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match=r"'kha' breaks the law 'decode'"):
        patch.setattr(kha, "on_k", lambda self, k, flow: k.flip(2))
        check("kha")
    causality = [law for law in LAWS if law.__name__ == "causality"]
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="a later token has a gradient"):
        patch.setattr(kha, "on_v", lambda self, v, flow: v - v.mean(2, keepdim=True))
        check("kha", laws=causality)
    part = type(Spec.parse("kha").parts[0])
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="priced at"):
        patch.setattr(part, "cost", Part.cost)
        check("kha")
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="q has no gradient"):
        patch.setattr(kha, "on_q", Transform.on_q)
        check("kha")


def test_a_spec_that_is_none():
    with pytest.raises(AssertionError, match="SpecError"):
        check("gqa + mla")
    with pytest.raises(SpecError):
        Spec.parse("gqa + mla").resolve(Case("").site)
    with pytest.raises(OptionError, match="kv_heads may be"):
        Attention("gqa(kv_heads=3)", 24, 4)


@pytest.mark.slow
@pytest.mark.parametrize("spec", singles())
def test_compile(spec):
    """One graph without breaks, equal to the plain layer, with gradients, for full passes."""
    case = Case(spec)
    layer, x = case.layer().float(), case.x.float().requires_grad_()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(layer, fullgraph=True)
        y = compiled(x)
    want = layer(x)
    assert (y - want).norm() < 1e-5 * want.norm()  # not number by number: small ones are sums of large ones
    got, wanted = (torch.autograd.grad(out.pow(2).sum(), x)[0] for out in (y, want))
    assert (got - wanted).norm() < 1e-4 * wanted.norm()
