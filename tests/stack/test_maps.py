import pytest
import torch

from manyheads import Cache
from manyheads.core.part import OptionError
from manyheads.stack import ManyheadsConfig, Stack
from manyheads.stack.maps import CLA, MAPS, read_map, resolve, sources_of, specs_of


@pytest.mark.parametrize(
    "line, layers, owners",
    [
        ("cla", 6, [0, 0, 2, 2, 4, 4]),
        ("cla(1)", 3, [0, 1, 2]),
        ("cla(factor=3)", 7, [0, 0, 0, 3, 3, 3, 6]),
        ("mlkv(4)", 12, [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]),
        ("mlkv(1)", 3, [0, 0, 0]),
        ("mlkv(3)", 3, [0, 1, 2]),
        ("mixattention", 12, [0, 1, 1, 3, 3, 3, 0, 7, 7, 9, 9, 9]),
        ("yoco(split=3)", 6, [0, 1, 2, 3, 3, 3]),
        ("yoco", 4, [0, 1, 2, 2]),
        ("owners([0, 4])", 6, [0, 0, 0, 0, 4, 4]),
        ("shared-attention([2, 3, 5])", 6, [0, 1, 1, 1, 4, 4]),
        ("echoatt(followers=2)", 9, [0, 1, 1, 1, 4, 4, 4, 7, 8]),
        ("echoatt(0)", 4, [0, 1, 2, 3]),
        ("echoatt(1, first=2, last=4)", 6, [0, 1, 2, 2, 4, 5]),
    ],
)
def test_layouts(line, layers, owners):
    sources = sources_of(line, layers)
    assert [layer if source is None else source for layer, source in enumerate(sources)] == owners
    assert resolve(sources) == sources, "no chains"
    assert all(source is None or source < layer for layer, source in enumerate(sources))


def test_forms():
    assert sources_of(CLA(2), 4) == sources_of([None, 0, None, 2], 4) == sources_of("cla(2)", 4)
    assert sources_of(None, 2) == [None, None] and isinstance(read_map(" cla ( factor = 3 ) "), CLA)
    with pytest.raises(OptionError, match="no map 'clb'") as error:
        sources_of("clb", 4)
    assert all(name in str(error.value) for name in MAPS)


@pytest.mark.parametrize(
    "line, said",
    [
        ("cla(0)", "groups of 0 layers"),
        ("cla(two)", "two is not an int"),
        ("cla(2) + cla(3)", r"expected the end, found '\+'"),
        ("cla(by=2)", "no option 'by'; it has factor"),
        ("mlkv(5)", "5 layers with keys and values of 4; 1 to 4"),
        ("mixattention(period=5)", "hold 5 windowed layers; of period=5 there are 4"),
        ("mixattention(offset=6)", "offset=6 is 0 to 5"),
        ("yoco(split=4)", "split=4 of 4 layers; 0 to 3"),
        ("owners([1, 2])", r"owners \[1, 2\] must begin with 0"),
        ("owners([0, 4])", "no layer 4; layers are 0 to 3"),
        ("shared-attention([0, 1])", "layer 0 has no layer below"),
        ("echoatt(1, first=3, last=1)", "layers 3 to 1 of 4"),
        ([None, 0], "2 sources for 4 layers"),
    ],
)
def test_refusals(line, said):
    with pytest.raises(OptionError, match=said):
        sources_of(line, 4)


def test_chains_end_at_the_owner():
    assert resolve([None, 0, 1, 2]) == [None, 0, 0, 0]
    assert resolve([None, None, None, 1, None, 3]) == [None, None, None, 1, None, 1]
    with pytest.raises(OptionError, match="layer 1 cannot read layer 2"):
        resolve([None, 2, None])


def test_maps_put_windows_on_specs():
    lines = specs_of("mixattention(window=4, period=3, runs=[2])", ["gqa"] * 4)
    assert lines == ["gqa", "gqa + window(4)", "gqa + window(4)", "gqa"]
    assert specs_of("yoco(window=4)", ["gqa"] * 4) == ["gqa + window(4)"] * 2 + ["gqa"] * 2
    assert specs_of("mixattention", ["gqa"]) == specs_of([None], ["gqa"]) == ["gqa"]


def test_stack_and_config_take_them():
    stack = Stack("gqa(kv_heads=2)", 32, 4, 4, kv_source="yoco(window=3)")
    assert stack.kv_source == [None, None, None, 2] and "window" in str(stack.attentions[1].spec)
    given = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 11}
    config = ManyheadsConfig(specs="gqa(kv_heads=2)", kv_source="yoco(window=3)", **given)
    assert config.kv_source == stack.kv_source and config.specs[1] == "gqa(kv_heads=2) + window(3)"
    assert ManyheadsConfig(attn_source="shared-attention([1])", **given).attn_source == [None, 0, None, None]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"attn_source": [0, None]}, "layer 0 cannot take the attention weights of layer 0: the first layer has none"),
        ({"attn_source": [None, 0, 1]}, "layer 2 .* of layer 1: layer 1 has none, it uses those of layer 0"),
        ({"attn_source": [None, 0], "kv_source": [None, 0]}, "layer 1 reads the rows .* and takes the attention"),
        ({"attn_source": [None, 0, None], "kv_source": [None, None, 1]}, "layer 2 .* layer 1: layer 1 makes no keys"),
        ({"attn_source": [None, 0], "dropout": 0.1}, "dropout=0.1: weights taken from layer 0"),
        ({"specs": ["gqa + window(4)", "gqa"], "attn_source": [None, 0]}, r"come about by window\(size=4\), its own"),
        ({"specs": ["gqa + alibi", "gqa"], "attn_source": [None, 0]}, "come about by alibi, its own spec says rope"),
        ({"specs": ["gqa", "gqa(kv_heads=2)"], "attn_source": [None, 0]}, "it has 2 value heads, layer 0 has 4"),
        ({"specs": ["mla", "gqa"], "attn_source": [None, 0]}, "layer 0 .mla . rope. does not weigh values"),
        ({"specs": ["gqa", "mla"], "attn_source": [None, 0]}, "layer 1: .* needs 'values alone'"),
        ({"specs": ["gqa", "gqa + kha"], "attn_source": [None, 0]}, "which 'kha' breaks"),
        ({"specs": ["retention", "gqa + rope(none)"], "attn_source": [None, 0]}, "layer 1 cannot take"),
        ({"specs": ["gqa", "gqa + moh(top=1, router=norm)"], "attn_source": [None, 0]}, "'moh' needs 'own queries'"),
        ({"specs": ["retention", "gqa"], "attn_source": [None, 0]}, "layer 0 .* has a state in place of keys"),
        ({"specs": ["gqa", "retention"], "attn_source": [None, 0]}, "layer 1: 'retention' needs 'own rows'"),
        ({"specs": ["gqa + window(4)", "gqa"], "kv_source": "cla(2)"}, "layer 0 keeps its newest 3 rows"),
        ({"kv_source": [None, 2, None]}, "layer 1 cannot read the rows of layer 2: a source is an earlier layer"),
        (
            {"attn_source": [None, 2, None]},
            "layer 1 cannot take .* of layer 2: a source is an earlier layer",
        ),
        ({"kv_source": [None, 0, 1]}, "layer 2 .* of layer 1: layer 1 has none, it uses those of layer 0; name that"),
    ],
)
def test_what_cannot_share(options, said):
    layers = len(options.get("kv_source", options.get("attn_source", [0, 0])))
    layers = 2 if isinstance(options.get("kv_source"), str) else layers
    with pytest.raises(ValueError, match=said):
        Stack(**{"specs": "gqa", "dim": 32, "heads": 4, "layers": layers, **options})


@pytest.mark.parametrize("options", [{"attn_source": "echoatt(1, first=0)"}, {"kv_source": "yoco(window=3)"}], ids=str)
def test_loops_share_inside_each_loop(options):
    """Two loops are the layers twice with one set of weights: the map of a loop counts on in the next."""
    stack = Stack("gqa(kv_heads=2)", 32, 4, 4, loops=2, std=0.2, **options).double().eval()
    sites = [layer.site for layer in stack.attentions]
    for first, second in zip(sites[:4], sites[4:], strict=True):
        for source in ("kv_source", "attn_source"):
            one, two = getattr(first, source), getattr(second, source)
            assert two == (None if one is None else one + 4)
    assert [str(layer.spec) for layer in stack.attentions[4:]] == [str(layer.spec) for layer in stack.attentions[:4]]
    assert len(stack.kv_source) == len(stack.attn_source) == 4
    x, cache = torch.randn(2, 9, 32, dtype=torch.float64), Cache()
    with torch.no_grad():
        outs = [stack(part, cache=cache) for part in x.split((4, 1, 1, 3), 1)]
        torch.testing.assert_close(torch.cat(outs, 1), stack(x))


def test_value_widths_and_gates_may_differ():
    stack = Stack(["gqa(kv_heads=2)", "gqa(kv_heads=2, v_dim=5) + moh(top=2)"], 32, 4, attn_source=[None, 0])
    assert stack.attentions[1].entries["v"].width == 5
