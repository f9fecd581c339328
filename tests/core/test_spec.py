"""The spec line: what it reads, prints, implies and refuses, and how its errors help."""

import dataclasses
import re
import types
import typing
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import manyheads as mh
from manyheads.core import registry
from manyheads.core.part import Gate, OptionError, Part, Site
from manyheads.core.registry import all_parts, find, options, register
from manyheads.core.spec import Spec, SpecError
from manyheads.testing import matrix

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values(hint):
    """Values that an option of this type may take."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(inside)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, inside))
    if origin is tuple:
        return st.lists(values(inside[0]), min_size=1, max_size=4).map(tuple)
    return {int: st.integers(-3, 4096), bool: st.booleans(), float: FLOATS, type(None): st.none()}[hint]


@st.composite
def parts(draw):
    part = draw(st.sampled_from(list(all_parts().values())))
    hints = typing.get_type_hints(part)
    names = [field.name for field in dataclasses.fields(part)]
    chosen = draw(st.sets(st.sampled_from(names))) if names else set()
    try:
        return part(**{name: draw(values(hints[name])) for name in names if name in chosen})
    except OptionError:
        return part()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(parts(), min_size=1, max_size=4))
def test_a_line_prints_back_to_what_it_was_read_from(some):
    spec = Spec(tuple(some))
    again = Spec.parse(str(spec))
    assert again == spec
    assert str(again) == str(spec)
    assert [type(part) for part in again.parts] == [type(part) for part in some]


@pytest.mark.parametrize(
    ("line", "canonical"),
    [
        ("gqa", "gqa"),
        (" gqa ( kv_heads = 2 )+kha ", "gqa(kv_heads=2) + kha"),
        ("gqa(2)", "gqa(kv_heads=2)"),
        ("gqa(kv_heads=none)", "gqa"),
        ("mla(norm=False, view=expanded)", "mla(norm=false, view=expanded)"),
        ("rope(none)", "rope(pairing=none)"),
        ("rope(base=1e6)", "rope(base=1000000.0)"),
        ("rope(base=10000)", "rope"),
        ("rope(pairs=[3,1 , 1])", "rope(pairs=[3, 1, 1])"),
        ("window(8)", "window(size=8)"),
        ("window([4, 8])", "window(size=[4, 8])"),
        ("softmax(cap=5)", "softmax(cap=5.0)"),
        ("qk-norm(eps=1e-5)", "qk-norm(eps=1e-05)"),
        ("qk-norm()", "qk-norm"),
    ],
)
def test_lines_and_their_canonical_form(line, canonical):
    assert str(Spec.parse(line)) == canonical


ERRORS = [
    # the line, where the caret stands (the text under it, and its place among equals), words of the message
    ("gqa + mlaa", "mlaa", ["no part 'mlaa'", "did you mean mla"]),
    ("gdaa", "gdaa", ["did you mean", "gda"]),
    ("gqa(kv_heds=2)", "kv_heds", ["'gqa' has no option 'kv_heds'", "kv_heads, head_dim, bias, scale"]),
    ("gqa(kv_heads=2, kv_heads=3)", "kv_heads=3", ["option 'kv_heads' is given twice"]),
    ("gqa(2, 3)", "3)", ["only the first option of 'gqa' may go without its name"]),
    ("gqa(bias=all)", "all", ["gqa(bias=…)", "all is none of none, qkv, qkvo, o"]),
    ("gqa(kv_heads=two)", "two", ["two is not an int"]),
    ("gqa(kv_heads=2.5)", "2.5", ["2.5 is not an int"]),
    ("gqa(kv_heads=true)", "true", ["true is not an int"]),
    ("mla(norm=1)", "1", ["1 is not a bool"]),
    ("rope(base=big)", "big", ["big is not a float"]),
    ("rope(pairs=3)", "3", ["3 is not a list [...]"]),
    ("rope(pairs=[a])", "[a]", ["a is not an int"]),
    ("window([1, 2.5])", "[1", ["2.5 is not an int"]),
    ("gqa(kv_heads=1x)", "1x", ["'1x' is not a number"]),
    ("gqa kha", "kha", ["expected '+', found 'kha'"]),
    ("gqa +", "", ["expected a part, found the end"]),
    ("", "", ["expected a part, found the end"]),
    ("gqa + 3", "3", ["expected a part, found '3'"]),
    ("gqa(", "", ["found the end"]),
    ("gqa(kv_heads", "kv_heads", ["kv_heads is not an int"]),
    ("gqa(kv_heads=", "", ["found the end"]),
    ("gqa(kv_heads=2", "", ["found the end"]),
    ("window([1, 2", "", ["found the end"]),
    ("gqa(kv_heads=2 bias=o)", "bias", ["expected ','"]),
    ("gqa & kha", "&", ["not part of a spec"]),
    ("gqa + window(0)", "window", ["window: a window of 0 tokens sees nothing"]),
]


@pytest.mark.parametrize(("line", "at", "words"), ERRORS, ids=[line for line, *_ in ERRORS])
def test_an_error_points_at_the_token_and_says_what_would_fit(line, at, words):
    with pytest.raises(SpecError) as error:
        Spec.parse(line)
    *message, shown, caret = str(error.value).split("\n")
    assert shown == f"  {line}"
    column = len(caret) - 1 - 2
    assert caret.strip() == "^"
    assert line[column:].startswith(at) and (at or column == len(line)), f"the caret is at {line[column:]!r}"
    assert all(word in "\n".join(message) for word in words), message


def test_what_is_implied():
    """`gqa` with all heads where no projection is named; `rope` in causal self-attention only."""
    assert str(Spec.parse("qk-norm").resolve(Site())) == "gqa + qk-norm + rope"
    assert str(Spec.parse("mla").resolve(Site(causal=False))) == "mla"
    assert str(Spec.parse("gqa").resolve(Site(cross=True))) == "gqa"
    assert str(Spec.parse("gqa + alibi").resolve(Site())) == "gqa + alibi"
    assert str(Spec.parse("rope(none) + gqa").resolve(Site())) == "gqa + rope(pairing=none)"
    x, positions = torch.randn(1, 4, 16), torch.tensor([[0, 7, 30, 31]])
    layer = mh.Attention("rope(none)", 16, 2)
    assert torch.equal(layer(x, positions=positions), layer(x)), "positions enter although rope is left out"


def test_order_between_stages_is_the_pipelines_and_inside_a_stage_it_is_the_lines():
    one = Spec.parse("moh(2) + kha + qk-norm + mfa").resolve(Site())
    other = Spec.parse("moh(2) + qk-norm + kha + mfa").resolve(Site())
    assert str(one) == "mfa + kha + qk-norm + rope + moh(top=2)"
    assert str(other) == "mfa + qk-norm + kha + rope + moh(top=2)"
    assert one.resolve(Site()) == one


def test_presets_expand():
    assert str(Spec.parse("gqa(kv_heads=2) + gda(ratio=3)")) == (
        "gqa(kv_heads=2) + differential(ratio=3) + head_norm(scale=differential)"
    )
    with pytest.raises(SpecError, match="'gda' has no option 'rate'; it has ratio, offset"):
        Spec.parse("gda(rate=3)")


REFUSALS = [
    ("mla + qk-norm", Site(), ["'qk-norm' needs 'head keys'", "not only as a latent", "mla(view=expanded)"]),
    ("mfa(key_reuse=true) + qk-norm", Site(), ["'qk-norm' needs 'head keys'", "mfa(key_reuse=false)"]),
    ("mla + kha(kind=mlp)", Site(), ["'kha' needs 'head keys'", "nearest legal: "]),
    ("gqa + rope + alibi", Site(), ["'rope' and 'alibi' both take the slot 'position'"]),
    ("gqa + moh(1) + moh(2)", Site(), ["'moh' and 'moh' both take the slot 'router'"]),
    ("gqa + mla", Site(), ["one projection", "'gqa', 'mla'"]),
    ("gqa + alibi + gda", Site(), ["'differential' needs 'alike heads'", "which 'alibi' breaks"]),
    ("gqa + differential + talking_heads", Site(), ["'talking_heads' needs 'one map'", "which 'differential' breaks"]),
    ("mtla", Site(causal=False), ["'mtla' needs 'causal'", "which nothing here gives"]),
    ("mtla", Site(cross=True), ["'mtla' needs 'self'"]),
    (
        "retention + talking_heads",
        Site(),
        ["'talking_heads' needs", "nearest legal: 'gqa + retention' or 'gqa + rope + talking_heads'"],
    ),
    ("gated_linear + window(size=4)", Site(), ["'gqa + rope + window(size=4)'", "'gqa + gated_linear'"]),
    ("conv", Site(causal=False), ["'conv' needs 'causal'", "nearest legal: a causal layer or 'gqa'"]),
    ("smha", Site(causal=False, cross=True), ["'smha' needs 'self'", "nearest legal: self-attention or 'gqa'"]),
    (
        "gated_delta_net",
        Site(causal=False, cross=True),
        ["nearest legal: a causal layer or 'gqa + head_norm + "],
    ),
]


@pytest.mark.parametrize(("line", "site", "words"), REFUSALS, ids=[line for line, *_ in REFUSALS])
def test_a_refusal_names_both_parts_the_fact_and_the_nearest_legal_choice(line, site, words):
    with pytest.raises(SpecError) as error:
        mh.Attention(line, 32, 4, site=site._replace(context_dim=32 if site.cross else None))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_nearest_legal_choice_is_legal():
    """Every hint, put in place of the part it replaces, builds."""
    for line, site, _ in REFUSALS:
        with pytest.raises(SpecError) as error:
            Spec.parse(line).resolve(site)
        hint = re.search(r"nearest legal: (.*)$", str(error.value))
        assert hint is not None
        lines = re.findall(r"'(.*?)'", hint[1])
        for better in lines:
            assert str(Spec.parse(better).resolve(site)) == better
            mh.Attention(better, 32, 4, site=site._replace(context_dim=32 if site.cross else None))
        if lines:
            continue
        (better,) = Spec.parse(hint[1]).parts
        swapped = [better if part.name == better.name else part for part in Spec.parse(line).parts]
        mh.Attention(Spec(tuple(swapped)), 32, 4, site=site)


@pytest.mark.parametrize("site", [Site(), Site(causal=False), Site(causal=False, cross=True)])
def test_no_pair_is_refused_without_a_nearest_legal_choice(site):
    facts = re.compile("' (needs|breaks) '|take the slot|one projection")  # and not numbers, which say what would fit
    refused = [why for why in matrix(site).values() if why is not None and facts.search(why)]
    assert len(refused) > 500 and not [why for why in refused if "nearest legal: " not in why]


NUMBERS = [
    ("gqa(head_dim=7)", 64, 8, ["rope: 7 channels", "head_dim", "may give 6 or 8", "rope(none)"]),
    ("gqa", 24, 8, ["dim=24 over heads=8", "heads may be [1, 2, 3, 4, 6, 12]", "head_dim 2 or 4", "rope(none)"]),
    ("gqa", 8, 8, ["dim=8 over heads=8", "heads may be [1, 2, 4], or head_dim 2)"]),
    ("rope(fraction=0.4)", 64, 8, ["fraction=0.4 of 8; 2 or 4"]),
    (
        "sqa(q_heads=3)",
        64,
        8,
        ["q_heads=3 and kv_heads=2 (by sqa)", "q_heads may be [1, 2, 4, 6, 8]", "kv_heads may be [1, 3, 6]"],
    ),
    ("sqa(q_heads=16)", 64, 8, ["q_heads=16 of 8 heads; it may be 1 to 8"]),
    ("gda(ratio=9)", 64, 8, ["must be a multiple of 10", "ratio may be [1]"]),
    ("gda(ratio=3)", 64, 8, ["ratio may be [1] or key heads [2, 4]"]),
    ("entmax(alpha=0.5)", 64, 8, ["\nentmax: alpha=0.5"]),
    ("mossnet(experts=0)", 64, 8, ["selective_ssm: experts is at least 1, not 0"]),
    ("mossnet(top=9)", 64, 8, ["selective_ssm: top=9 of experts=8; top may be 1 to 8"]),
    ("gqa(kv_heads=2.5)", 64, 8, ["2.5 is not an int or none"]),
    ("gqa(dim=64)", 64, 8, ["has no option 'dim'"]),
]


@pytest.mark.parametrize(
    ("line", "dim", "heads", "words"), NUMBERS, ids=[f"{line} {dim} {heads}" for line, dim, heads, _ in NUMBERS]
)
def test_numbers_that_do_not_fit_are_named_once_with_those_that_would(line, dim, heads, words):
    with pytest.raises(OptionError) as error:
        mh.Attention(line, dim, heads)
    assert all(word in "\n" + str(error.value) for word in words), str(error.value)


def test_an_option_without_a_default_that_is_not_given_is_named():
    with pytest.raises(SpecError, match=r"'step' needs early and late: step\(early=…, late=…\)"):
        mh.Stack("gqa", 64, "step()", 2)


def test_a_typing_error_is_shown_all_the_names_that_are_as_near():
    with pytest.raises(SpecError, match=r"did you mean .*gqa"):
        Spec.parse("gka")


@dataclass(frozen=True)
class Loud(Part):
    """Multiplies head outputs."""

    name: ClassVar[str] = "loud"
    stage: ClassVar = "gate"
    by: float = 2.0

    def build(self, before, after, site):
        return LoudGate(self.by)


class LoudGate(Gate):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def gate(self, o, flow):
        return o * self.by


@pytest.fixture
def own_parts(monkeypatch):
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))


def test_a_part_of_the_users_own(own_parts):
    """Registering it is all: it parses, prints, is found, suggested, and runs."""
    register(Loud)
    x = torch.randn(1, 4, 16)
    plain, loud = mh.Attention("gqa", 16, 2), mh.Attention("gqa + loud(by=3)", 16, 2)
    loud.load_state_dict(plain.state_dict())
    torch.testing.assert_close(loud(x), 3 * plain(x))
    assert str(loud.spec) == "gqa + rope + loud(by=3.0)"
    assert options(Loud) == {"by": {"type": "float", "default": 2.0}}
    assert find("loud") is Loud
    with pytest.raises(SpecError, match="did you mean loud"):
        Spec.parse("gqa + lout")
    assert register(Loud) is Loud, "registering it again is harmless"


def test_two_parts_of_one_name_are_refused(own_parts):
    """Also where the class has the name that the library's own has."""
    other = dataclass(frozen=True)(type("GQA", (Part,), {"name": "gqa", "stage": "gate", "__module__": __name__}))
    with pytest.raises(OptionError, match=r"two parts are called 'gqa'.*manyheads\.attention\.project\.gqa"):
        register(other)
    nowhere = dataclass(frozen=True)(type("Odd", (Part,), {"name": "odd", "stage": "middle"}))
    with pytest.raises(OptionError, match="names the stage 'middle'; stages are tokens, project"):
        register(nowhere)


def test_a_spec_parses_to_itself_and_hashes():
    spec = Spec.parse("gqa(kv_heads=2) + rope")
    assert Spec.parse(spec) is spec
    assert hash(spec) == hash(Spec.parse("gqa(2)+rope"))
