"""Blocks that run several times with one set of weights."""

import copy
import io

import pytest
import torch
from tests.oracles.stacks import hold_to_the_laws, make_stack
from tests.stack.test_bank import Common
from tests.stack.tiny import batch, greedy, model
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache

from manyheads import Cache, Links
from manyheads.core import registry
from manyheads.stack import ManyheadsConfig, Stack

DIM, HEADS = 24, 4
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")


def unrolled(stack, specs, layers, **options):
    """A stack of all turns, each layer with weights of its own, equal to those it has in the loops."""
    wide = Stack(specs, DIM, HEADS, layers * stack.loops, ffn="none", **options).double().eval()
    state = stack.state_dict()
    wide.load_state_dict(
        {name: state[name.replace(f"blocks.{name.split('.')[1]}.", f"blocks.{int(name.split('.')[1]) % layers}.")]
         for name in wide.state_dict()}
    )  # fmt: skip
    return wide


@pytest.mark.parametrize(
    "options",
    [
        {"loops": 2},
        {"loops": 3, "kv_source": [None, 0]},
        {"loops": 2, "residual": "mhar(heads=4)", "idle": ["residual.routes.0."]},
    ],
)
@pytest.mark.parametrize("specs", ["gqa(kv_heads=2)", "mla(rank=8, rope_dim=2)"])
def test_the_laws(specs, options):
    hold_to_the_laws(specs, 2, **options)


@pytest.mark.parametrize("sources", [None, [None, 0, None]])
def test_loops_are_the_unrolled_stack(sources):
    stack = make_stack("gqa(kv_heads=2)", 3, loops=2, kv_source=sources)
    wide = unrolled(stack, "gqa(kv_heads=2)", 3, kv_source=sources and [None, 0, None, None, 3, None])
    x, caches = torch.randn(2, 7, DIM, dtype=torch.float64), []
    assert torch.equal(stack(x), wide(x))
    assert len(stack.attentions) == 6 and len(stack.state_dict()) == len(wide.state_dict()) / 2
    for each in (stack, wide):
        caches.append(Cache())
        with torch.no_grad():
            each(x, cache=caches[-1])
        assert caches[-1].bytes() == 2 * each.cost.cache_bytes(7, 8)
    assert caches[0].bytes() == caches[1].bytes()
    once = make_stack("gqa(kv_heads=2)", 3, kv_source=sources)
    assert stack.cost.cache_floats == 2 * once.cost.cache_floats
    assert stack.cost.token_flops == 2 * once.cost.token_flops and stack.cost.parameters == once.cost.parameters
    assert stack.cost.parameters == sum(p.numel() for layer in stack.blocks for p in layer.attention.parameters())


def test_a_reader_reads_its_own_loop():
    stack, links = make_stack("gqa", 2, loops=2, kv_source=[None, 0]), Links()
    assert [layer.site.kv_source for layer in stack.attentions] == [None, 0, None, 2]
    assert [layer.site.layer for layer in stack.attentions] == [0, 1, 2, 3]
    stack(torch.randn(1, 5, DIM, dtype=torch.float64), links=links)
    assert {*links.rows} == {0, 2}


def test_gradients_add_over_loops():
    stack = make_stack("gqa + kha", 2, loops=2)
    wide = unrolled(stack, "gqa + kha", 2)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    for each in (stack, wide):
        each(x).pow(2).sum().backward()
    other = dict(wide.named_parameters())
    for name, parameter in stack.named_parameters():
        block = int(name.split(".")[1])
        twice = other[name].grad + other[name.replace(f"blocks.{block}", f"blocks.{block + 2}")].grad
        torch.testing.assert_close(parameter.grad, twice, atol=1e-9, rtol=1e-9)


def test_a_spec_for_each_loop():
    specs = ["gqa + window(3)", "gqa", "gqa + alibi", "gqa + window([2, 9, 2, 9])"]
    stack = make_stack(specs, 2, loops=2)
    assert [str(layer.spec) for layer in stack.attentions][2] == "gqa + alibi"
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    assert torch.equal(stack(x), unrolled(stack, specs, 2)(x))
    hold_to_the_laws(specs, 2, loops=2)


@pytest.mark.parametrize(
    ("specs", "loops", "said"),
    [
        (["gqa", "gqa", "gqa + kha", "gqa"], 2,
         r"layer 2 runs with the weights of layer 0: gqa \+ kha \+ rope has \[6, 6\] transforms.0.k, .* has none"),
        (["gqa", "gqa", "gqa(kv_heads=2)", "gqa"], 2,
         r"has \[12, 24\] project.k_proj.weight, gqa \+ rope has \[24, 24\]"),
        (["gqa"] * 3, 2, "3 specs for 2 layers"),
        ("gqa", 0, "loops is at least 1, not 0"),
    ],
)  # fmt: skip
def test_refusals(specs, loops, said):
    with pytest.raises(ValueError, match=said):
        Stack(specs, DIM, HEADS, 2, loops=loops)
    with pytest.raises(ValueError, match=said):
        ManyheadsConfig(specs=specs, hidden_size=DIM, num_attention_heads=HEADS, num_hidden_layers=2, loops=loops)


def test_one_set_of_weights_whatever_happens_to_it():
    stack = Stack("gqa + kha + moh(top=2)", DIM, HEADS, 2, loops=2, dropout=0.1)
    x = torch.randn(1, 5, DIM)
    assert not stack.eval().attentions[3].training and stack.train().attentions[3].transforms[0].training
    stack.eval()
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    for again in (copy.deepcopy(stack), torch.load(file, weights_only=False)):
        assert torch.equal(again(x), stack(x))
        for mine, first in zip(again.attentions[2:], again.attentions[:2], strict=True):
            assert all(one is other for one, other in zip(mine.parameters(), first.parameters(), strict=True))
    double = copy.deepcopy(stack).double()
    torch.testing.assert_close(double(x.double()), stack(x).double(), atol=1e-5, rtol=1e-5)
    with torch.device("meta"):
        empty = Stack("gqa + kha + moh(top=2)", DIM, HEADS, 2, loops=2)
    empty.eval().load_state_dict(stack.state_dict(), assign=True)
    assert torch.equal(empty(x), stack(x))

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    stack.blocks[0].attention.project.q_proj = Doubled(DIM, DIM)  # as adapters do
    assert isinstance(stack.attentions[2].project.q_proj, Doubled)


def test_first_weights_do_not_depend_on_loops_but_by_depth():
    torch.manual_seed(0)
    one = Stack("gqa + moh(top=2)", DIM, HEADS, 2)
    torch.manual_seed(0)
    two = Stack("gqa + moh(top=2)", DIM, HEADS, 2, loops=2)
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        scale = 2**0.5 if "o_proj" in name or "down_proj" in name else 1
        torch.testing.assert_close(a, b * scale, msg=name)


def test_borrowed_weights_stay_borrowed(monkeypatch):
    monkeypatch.setitem(registry._PARTS, "common", Common)
    for line in ("common", "common(layer)"):
        stack = Stack(line, DIM, HEADS, 2, loops=2)
        maps = [layer.transforms[0].map for layer in stack.attentions]
        assert maps[2] is maps[0] and maps[3] is maps[1] and len(stack.bank) == (1 if line == "common" else 2)
        assert stack.cost.parameters == sum(p.numel() for p in stack.bank.parameters()) + sum(
            p.numel() for block in stack.blocks for p in block.attention.parameters()
        )


def test_cross_attention():
    stack = make_stack("gqa", 2, loops=2, cross=True)
    x, context = (torch.randn(2, n, DIM, dtype=torch.float64) for n in (6, 4))
    full, cache = stack(x, context=context), Cache()
    with torch.no_grad():
        parts = [stack(part, context=context, cache=cache) for part in x.split((1, 3, 2), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-9, rtol=1e-9)
    assert [cache.length(site) for site in range(8)] == [6] * 4 + [4] * 4


@pytest.mark.parametrize(
    "case",
    [
        {"specs": "gqa(kv_heads=2)", "kv_source": [None, 0, None, 2]},
        {"specs": ["gqa + window(4)"] * 4 + ["gqa"] * 4, "residual": "mhar(heads=4)"},
    ],
)
def test_in_a_model(tmp_path, case):
    of, inputs = model(case | {"loops": 2}), batch()
    of.save_pretrained(tmp_path)
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, of(**inputs).logits)
    assert again.config.loops == 2 and len(again.config.specs) == (8 if "residual" in case else 4)
    assert len(again.config.turns.specs) == 8
    assert torch.equal(greedy(again, inputs), greedy(of, inputs, use_cache=False))
    assert len(again(**inputs, output_hidden_states=True).hidden_states) == 9
    again.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for each in (of.train(), again):
        each(**inputs, labels=inputs["input_ids"]).loss.backward()
    for (name, one), other in zip(of.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other[1].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_stock_caches_are_refused():
    of, inputs = model({"specs": "gqa", "loops": 2}), batch()
    with pytest.raises(ValueError, match=r"2 loops of 4 layers each keep rows of their own, .* use manyheads\.Cache"):
        of(**inputs, past_key_values=StaticCache(of.config, 40))
