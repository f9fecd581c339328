"""Decoder-decoders, the lower half run several times with the same weights (arXiv 2405.05254, 2604.01220)."""

import copy

import pytest
import torch
from tests.oracles.reference import DIM, HEADS, batch, close, differ
from tests.oracles.stacks import decoded, hold_to_the_laws, make_stack
from tests.stack.tiny import batch as prompts
from tests.stack.tiny import greedy, model
from transformers import AutoModelForCausalLM, DynamicCache

from manyheads import Cache, Links, Spec
from manyheads.core.cost import Cost
from manyheads.core.part import OptionError, Site
from manyheads.stack import ManyheadsConfig, Stack
from manyheads.stack.loops import Turns

LINE = "gqa(kv_heads=2)"
NEAR = "yoco(window=4, positions=false)"
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")


def looped(loops, layers=4, line=LINE, source=NEAR, **options):
    return make_stack(line, layers, kv_source=source, loops=loops, looped=layers // 2, **options)


def unrolled(stack, layers=4, **options):
    """A stack of all turns, each layer with weights of its own, equal to those of its turn."""
    specs, turns = [layer.spec for layer in stack.attentions], stack.turns
    sources = [layer.site.kv_source for layer in stack.attentions]
    wide = make_stack(specs, len(specs), kv_source=sources, **options)
    state = stack.state_dict()
    wide.load_state_dict(
        {name: state[".".join(["blocks", str(turns.blocks[int(name.split(".")[1])]), *name.split(".")[2:]])]
         for name in wide.state_dict()}
    )  # fmt: skip
    return wide


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("line", [LINE, ["retention", "retention", LINE, LINE]])
def test_the_laws(loops, line):
    source = NEAR if line == LINE else "yoco"
    hold_to_the_laws(line, 4, kv_source=source, loops=loops, looped=2)


def test_one_loop_is_yoco():
    x = batch(11)
    assert torch.equal(looped(1)(x), make_stack(LINE, 4, kv_source=NEAR)(x))


def test_where_turns_sit():
    stack = looped(3)
    assert [layer.site.layer for layer in stack.attentions] == [*range(8)] and stack.turns.blocks == [0, 1] * 3 + [2, 3]
    assert [layer.site.kv_source for layer in stack.attentions] == [None] * 7 + [6]
    assert stack.kv_source == [None, None, None, 2] and stack.attn_source == [None] * 4
    lines = [str(layer.spec) for layer in stack.attentions]
    assert all("window(size=4)" in line and "none" not in line for line in lines[:6])
    assert lines[6:] == [str(Spec.parse("gqa(kv_heads=2) + rope(none)"))] * 2
    below = Stack("gqa", DIM, HEADS, 4, loops=2, looped=2, kv_source=[None, 0, 0, None], ffn="none")
    assert [layer.site.kv_source for layer in below.attentions] == [None, 0, None, 2, 2, None]
    later = Stack("gqa", DIM, HEADS, 3, loops=2, looped=2, attn_source=[None, 0, 0], ffn="none")
    assert [layer.site.attn_source for layer in later.attentions] == [None, 0, None, 2, 2]


@pytest.mark.parametrize("loops", [2, 3])
def test_loops_are_tied_layers_in_a_row(loops):
    stack, x = looped(loops), batch(11)
    wide = unrolled(stack)
    close(stack(x), wide(x))
    for each in (stack, wide):
        each(x).pow(2).sum().backward()
    other = dict(wide.named_parameters())
    for name, parameter in stack.named_parameters():
        _, block, rest = name.split(".", 2)
        turns = [turn for turn, number in enumerate(stack.turns.blocks) if number == int(block)]
        close(parameter.grad, sum(other[f"blocks.{turn}.{rest}"].grad for turn in turns), 1e-9)
    assert stack.cost.parameters == looped(1).cost.parameters


def test_each_loop_has_a_cache_of_its_own():
    """Rows of one loop in place of another's give something else."""
    stack, x, cache = looped(2), batch(9), Cache()
    with torch.no_grad():
        want = stack(x)
        stack(x[:, :8], cache=cache)
        assert [bool(store.growing) for store in cache.layers] == [True] * 5 + [False]
        mixed = cache.fork(torch.arange(2))
        close(stack(x[:, 8:], cache=cache), want[:, 8:])
        mixed.layers[2].growing = copy.deepcopy(mixed.layers[0].growing)
        differ(stack(x[:, 8:], cache=mixed), want[:, 8:])


@pytest.mark.parametrize(("loops", "tokens"), [(1, 9), (3, 9), (3, 2)])
def test_the_cache_is_that_of_the_formula(loops, tokens):
    stack, cache = looped(loops), Cache()
    with torch.no_grad():
        stack(batch(tokens), cache=cache)
    floats = 2 * 2 * 6  # keys and values, G, d
    wanted = floats * (tokens + loops * 2 * min(tokens, 3)) * 8
    assert cache.bytes() == 2 * wanted == 2 * stack.cost.cache_bytes(tokens, 8)
    assert cache.length(loops * 2) == tokens and not cache.site(loops * 2 + 1).growing


@pytest.mark.parametrize(
    ("tokens", "loops", "wanted"), [(262144, 1, 522), (262144, 3, 542), (16384, 3, 62), (65536, 3, 158)]
)
def test_published_megabytes(tokens, loops, wanted):
    """20 layers, 512 numbers of key heads, 16 bits; a window of 512, which holds one row less here."""
    turns = Turns.of("gqa(kv_heads=4)", [16] * 20, "yoco(window=513, positions=false)", None, loops, 10)
    sites = [Site(at, len(turns.blocks), kv_source=source) for at, source in enumerate(turns.kv_source)]
    costs = (Spec.parse(line).resolve(site).cost(2048, 16, site) for line, site in zip(turns.specs, sites, strict=True))
    assert sum(costs, Cost()).cache_bytes(tokens, 2) == wanted * 2**20
    plain = 20 * Spec.parse("gqa(kv_heads=4)").cost(2048, 16, Site()).cache_bytes(262144, 2)
    assert plain / 2**20 == 10240


def test_windows_that_see_all_are_none():
    x = batch(9)
    wide, none = (looped(2, source=f"yoco({window}positions=false)") for window in ("window=99, ", ""))
    none.load_state_dict(wide.state_dict())
    close(wide(x), none(x))


@pytest.mark.parametrize("loops", [1, 2])
def test_a_prompt_needs_the_self_decoder_and_one_layer(loops):
    stack, x = make_stack(LINE, 6, kv_source="yoco(window=4)", loops=loops, looped=3), batch(11)
    seen = []
    for layer in stack.attentions:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    with torch.no_grad():
        full = stack(x)
        for newest in (1, 3, 20):
            seen.clear()
            close(stack(x, newest=newest), full[:, -newest:])
            assert seen == [11] * (3 * loops + 1) + [min(newest, 11)] * 2
        cache = Cache()
        parts = [stack(part, cache=cache, newest=1) for part in x.split((5, 3, 1, 1, 1), 1)]
        close(torch.cat(parts, 1), full[:, [4, 7, 8, 9, 10]])
        valid = torch.arange(11) >= torch.tensor([[0], [4]])
        close(stack(x, mask=valid, newest=2), stack(x, mask=valid)[:, -2:])
        square = valid[:, None, None, :].expand(-1, 1, 11, -1) & torch.ones(11, 11, dtype=torch.bool).tril()
        close(stack(x, mask=square, newest=2), stack(x, mask=square)[:, -2:])
    for options in ({"residual": "mhar(heads=4)"}, {"cross": True}):
        other = make_stack(LINE, 4, kv_source="yoco", **options)
        given = {"context": batch(5)} if "cross" in options else {}
        close(other(x, newest=2, **given), other(x, **given)[:, -2:])
    begun = make_stack(LINE, 4, kv_source="yoco", meta=2)
    close(begun(x, newest=2), begun(x)[:, -2:])
    plain = make_stack("gqa", 2)
    close(plain(x, newest=2), plain(x)[:, -2:])
    with pytest.raises(ValueError, match="newest is at least 1, not 0"):
        plain(x, newest=0)


def test_the_virtual_producer():
    """All layers of the cross-decoder read what one layer of keys and values makes of the self-decoder's output."""
    stack, x, links = looped(2), batch(9), Links()
    m = x
    for loop in range(2):
        for block in stack.blocks[:2]:
            m, _ = block(m, positions=stack.attentions[0].axis_of(x, None, None, None), loop=loop)
    stack(x, links=links)
    owner = stack.blocks[2]
    k = owner.attention.project.k_proj(owner.attention_norm(m)).unflatten(-1, (2, 6)).transpose(1, 2)
    close(links.rows[4]["k"], k)
    assert {*links.rows} == {4}


def test_in_a_model(tmp_path):
    case = {"specs": LINE, "kv_source": NEAR, "loops": 2, "looped": 2}
    of, inputs = model(case), prompts()
    of.save_pretrained(tmp_path)
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert (again.config.loops, again.config.looped, len(again.config.specs)) == (2, 2, 4)
    assert again.config.kv_source == [None, None, None, 2] and len(again.config.turns.specs) == 6
    with torch.no_grad():
        full = of(**inputs).logits
        assert torch.equal(again(**inputs).logits, full)
        close(of(**inputs, logits_to_keep=1).logits, full[:, -1:], 1e-5)
        states = of(**inputs, logits_to_keep=1, output_hidden_states=True).hidden_states
    assert len(states) == 7 and all(each.shape == states[0].shape for each in states)
    assert torch.equal(greedy(again, inputs), greedy(of, inputs, use_cache=False))
    with pytest.raises(ValueError, match="2 loops of 2 layers each keep rows of their own"):
        of(**inputs, past_key_values=DynamicCache())
    again.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (of.train(), again):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, one), other in zip(of.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other[1].grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_it_compiles():
    stack, x = looped(2), batch(9)
    close(torch.compile(stack)(x), stack(x), 1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"looped": 5}, "looped=5 of 4 layers; 1 to 4"),
        ({"looped": 0}, "looped is at least 1, not 0"),
        ({"looped": 2, "specs": ["gqa"] * 5}, "5 specs for 4 layers"),
        ({"looped": 2, "specs": ["gqa", "gqa", "gqa + kha", "gqa", "gqa", "gqa"]}, "layer 2 runs with the weights of"),
        ({"looped": 2, "kv_source": [None, 3, None, None]}, "layer 1 cannot read the rows of layer 3"),
        ({"looped": 2, "kv_source": [None, 0, 1, None]}, "layer 4 cannot read the rows of layer 3: layer 3 has none"),
        ({"looped": 2, "specs": ["gqa + window(3)"] * 2 + ["gqa"] * 2, "kv_source": [None, None, 1, None]}, "newest 2"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(OptionError if said.startswith("looped=") else ValueError, match=said):
        Stack(**{"specs": "gqa", "dim": DIM, "heads": HEADS, "layers": 4, "loops": 2, **options})
    fields = {"num_hidden_layers": 4, "hidden_size": DIM, "num_attention_heads": HEADS, "loops": 2}
    with pytest.raises(ValueError, match=said):
        ManyheadsConfig(**{"specs": "gqa", **fields, **options})


def test_decoding_goes_through_all_loops():
    stack, x = looped(3), batch(11)
    for block in (1, 4):
        close(decoded(stack, x, block), stack(x), 1e-9)
