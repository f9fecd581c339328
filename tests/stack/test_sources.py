import pytest

from manyheads.core.part import OptionError
from manyheads.core.spec import SpecError
from manyheads.stack import Stack
from manyheads.stack.sources import check_layers, per_layer


def check(specs, kv_source, heads=4):
    layers = len(kv_source)
    check_layers(per_layer(specs, layers, "specs"), 32, per_layer(heads, layers, "heads"), kv_source)


@pytest.mark.parametrize(
    "specs, source",
    [
        ("gqa(kv_heads=2)", [None, 0, 0, None]),
        ("mla(rank=12, rope_dim=4)", [None, None, 1]),
        ("mtla(rank=12, rope_dim=4)", [None, 0]),
        (["gqa(kv_heads=2)", "gqa(kv_heads=2) + window(size=4)"], [None, 0]),
        (["gqa + window(size=8)", "gqa + window(size=4)"], [None, 0]),
        (["gqa(kv_heads=2)", "gqa(kv_heads=2) + talking_heads + moh(top=2)"], [None, 0]),
    ],
)
def test_legal(specs, source):
    check(specs, source)


@pytest.mark.parametrize(
    "specs, source, said",
    [
        ("gqa", [0, None], "layer 0 cannot read the rows of layer 0: the first layer has none"),
        ("gqa", [None, 1], "layer 1 cannot read the rows of layer 1: a source is an earlier layer, so one of 0 to 0"),
        ("gqa", [None, 2, None], "layer 1 cannot read the rows of layer 2: a source is an earlier layer"),
        ("gqa", [None, -1], "kv_source is at least 0, not -1"),
        ("gqa", [None, 0, 1], "layer 2 cannot read the rows of layer 1: .*those of layer 0; name that layer"),
        (["gqa(kv_heads=2)", "gqa(kv_heads=1)"], [None, 0], "layer 1 .* layer 0: it reads 'k' .1 x 8. .* 'k' .2 x 8."),
        (["gqa", "mla"], [None, 0], "layer 1 cannot read the rows of layer 0: it reads 'latent'"),
        (["mtla(stride=2)", "mtla(stride=3)"], [None, 0], "one slot for 3 tokens.*one slot for 2 tokens"),
        (["gqa + rope(base=500.0)", "gqa"], [None, 0], r"by rope when .* layer 0 by rope\(base=500.0\)"),
        (["gqa + window(size=4)", "gqa"], [None, 0], "layer 0 keeps its newest 3 rows, layer 1 looks at all"),
        (["gqa + window(size=4)", "gqa + window(size=9)"], [None, 0], "newest 3 rows, layer 1 looks at 8"),
    ],
)
def test_illegal(specs, source, said):
    with pytest.raises(ValueError, match=said) as error:
        check(specs, source)
    assert "\n" not in str(error.value)


def test_heads_may_differ_where_rows_agree():
    check_layers(["gqa(kv_heads=2, head_dim=8)"] * 2, 32, [4, 8], [None, 0])


def test_a_spec_that_does_not_fit_names_its_layer():
    with pytest.raises(ValueError, match=r"layer 1: gqa: 4 query heads cannot share kv_heads=3"):
        Stack(["gqa", "gqa(kv_heads=3)"], 32, 4)
    with pytest.raises(SpecError, match=r"layer 1: .*no part 'gqq'"):
        Stack(["gqa", "gqq"], 32, 4)


POD, SPARSE = "gqa(kv_heads=2) + pod(window=2, first=1)", "gqa + hysparse(ratio=1)"
CHUNKS = "gqa + longheads(chunk={}, chunks=4)"


@pytest.mark.parametrize(
    "specs, options, said",
    [
        (["gqa", POD], {}, "pod: layer 1 follows layer 0, whose spec is gqa; give it pod too"),
        (["gqa + pod", POD], {}, "which has 4 heads over 4 key heads of width 8, and this one 4 heads over 2 key"),
        ("gqa + pod", {"heads": [2, 4]}, "layer 1 follows layer 0, which has 2 heads"),
        ([POD, POD, POD + " + kha", POD.replace("1)", "1, leader=1)")], {}, "follows layer 1, which follows layer 0"),
        (["gqa", SPARSE], {}, "hysparse: layer 1 follows layer 0, whose spec is gqa"),
        (["gqa(kv_heads=2) + hysparse(ratio=1)", SPARSE], {}, "has 2 key heads of width 8, and this one 4 key heads"),
        (["gqa", "gqa + lycheedecode(budget=3)"], {}, "lycheedecode: layer 1 follows layer 0, whose spec is gqa"),
        (["gqa", CHUNKS.format(2)], {"kv_source": [None, 0]}, "longheads: layer 1 follows layer 0, whose spec is gqa"),
        ([CHUNKS.format(2), CHUNKS.format(3)], {"kv_source": [None, 0]}, "chunks of 2 tokens .* chunks of 3 tokens"),
    ],
)
def test_a_layer_that_follows_another_finds_there_what_it_reads(specs, options, said):
    layers = 2 if isinstance(specs, str) else len(specs)
    with pytest.raises(OptionError, match=said) as error:
        Stack(specs, 32, **{"heads": 4, "layers": layers, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", [POD, SPARSE, "gqa + lycheedecode(budget=3)"])
def test_chains_and_loops_that_follow_as_they_should(spec):
    assert len(Stack(spec, 32, 4, 4).blocks) == 4
    Stack(spec, 32, 4, 2, loops=2)


def test_counts():
    for wrong in ({"specs": ["gqa"] * 3}, {"heads": [4, 4, 4]}, {"kv_source": [None]}):
        given = {"specs": "gqa", "dim": 32, "heads": 4, "layers": 2, **wrong}
        with pytest.raises(ValueError, match=r"\d (specs|head counts|sources) for 2 layers"):
            Stack(**given)
