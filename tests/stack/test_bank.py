"""Weights that a stack owns and its layers borrow."""

import copy
import io
from dataclasses import dataclass

import pytest
import torch
from tests.stack.tiny import BODIES, DIM, HEADS, batch, model
from torch import nn
from transformers import AutoModelForCausalLM

from manyheads import Attention
from manyheads.core import registry
from manyheads.core.cost import Cost
from manyheads.core.part import OptionError, Part, Site, Transform, borrow
from manyheads.stack import Stack
from manyheads.stack.bank import Bank

WIDTH = DIM // HEADS
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6.*:FutureWarning")


class Pull(Transform):
    """q + W q, with W that the site shares."""

    map: nn.Linear

    def __init__(self, name, width, site):
        super().__init__()
        borrow(self, "map", site, name, lambda: nn.Linear(width, width))

    def on_q(self, q, flow):
        return q + self.map(q)


@dataclass(frozen=True)
class Common(Part):
    """over: all layers, or each for itself."""

    name = "common"
    stage = "transform"

    over: str = "all"

    def named(self, site):
        return "common" if self.over == "all" else f"common-{site.layer}"

    def build(self, before, after, site):
        return Pull(self.named(site), before.content_width, site)

    def cost(self, before, after, site):
        numbers = before.content_width**2 + before.content_width
        return Cost(numbers, shared=((self.named(site), numbers),))


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(registry._PARTS, "common", Common)


def maps(layers):
    return [layer.transforms[0].map for layer in layers]


def banked(of):
    return [name for name in of.state_dict() if ".bank." in f".{name}"]


def test_one_owner():
    stack = Stack("common", DIM, HEADS, 3)
    first, *others = maps(stack.attentions)
    assert all(each is first for each in others)
    names = [name for name, each in stack.named_parameters() if each is first.weight]
    assert names == ["bank.common.weight"] and banked(stack) == ["bank.common.weight", "bank.common.bias"]
    own = Stack("common(layer)", DIM, HEADS, 3)
    assert len({id(each) for each in maps(own.attentions)}) == 3 and len(banked(own)) == 6
    for each in (stack, own):
        counted = sum(p.numel() for p in each.parameters())
        plain = sum(p.numel() for p in Stack("gqa", DIM, HEADS, 3).parameters())
        assert counted - plain == each.cost.parameters - Stack("gqa", DIM, HEADS, 3).cost.parameters
    assert not banked(Stack("gqa", DIM, HEADS, 2))


def test_a_lone_layer_owns_its_own():
    layer = Attention("common", DIM, HEADS)
    assert {"transforms.0.map.weight", "transforms.0.map.bias"} <= layer.state_dict().keys()
    assert sum(p.numel() for p in layer.parameters()) == layer.spec.cost(DIM, HEADS, Site()).parameters


def test_shapes_must_agree():
    with pytest.raises(OptionError, match=r"'common' is shared with shapes .*\[8, 8\].*wants .*\[4, 4\]"):
        Stack("common", DIM, [4, 8], 2)


def test_asking_again_draws_nothing():
    bank = Bank()
    bank.share("a", lambda: nn.Linear(3, 3))
    before = torch.get_rng_state()
    bank.share("a", lambda: nn.Linear(3, 3))
    assert torch.equal(before, torch.get_rng_state())


def test_first_weights_are_those_of_a_linear_map():
    weight = maps(Stack("common(all)", 512, 4, 2, std=0.1).attentions)[0].weight
    assert weight.std().item() == pytest.approx(0.1, rel=0.1)


def test_copies_moves_and_pickles():
    stack = Stack("common", DIM, HEADS, 2)
    x = torch.randn(1, 5, DIM)
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    for again in (copy.deepcopy(stack), torch.load(file, weights_only=False)):
        first, second = maps(again.attentions)
        assert first is second is again.bank["common"] and first is not stack.bank["common"]
        assert torch.equal(again(x), stack(x))
    double = copy.deepcopy(stack).double()
    assert maps(double.attentions)[1].weight.dtype == torch.float64
    torch.testing.assert_close(double(x.double()), stack(x).double(), atol=1e-5, rtol=1e-5)
    blank = Stack("common", DIM, HEADS, 2)
    blank.load_state_dict(stack.state_dict())
    assert torch.equal(blank(x), stack(x))
    with torch.device("meta"):
        empty = Stack("common", DIM, HEADS, 2)
    empty.load_state_dict(stack.state_dict(), assign=True)
    assert torch.equal(empty(x), stack(x))


def test_gradients_add_over_layers_and_survive_checkpointing():
    stack = Stack("common", DIM, HEADS, 3, std=0.3).double()
    apart = Stack("common(layer)", DIM, HEADS, 3).double()
    state = stack.state_dict()
    renamed = {
        f"bank.common-{layer}.{kind}": state[f"bank.common.{kind}"] for layer in range(3) for kind in ("weight", "bias")
    }
    apart.load_state_dict(renamed | {name: value for name, value in state.items() if not name.startswith("bank.")})
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    grads = []
    for each, checkpoint in ((stack, False), (stack, True), (apart, False)):
        each.checkpoint(checkpoint)
        each.zero_grad()
        each(x).pow(2).sum().backward()
        grads.append([layer.weight.grad.clone() for layer in maps(each.attentions)])
    torch.testing.assert_close(grads[0], grads[1], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(grads[0][0], sum(grads[2]), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("body", BODIES)
def test_in_a_model(tmp_path, body):
    of, inputs = model({"specs": "common + gqa(kv_heads=2)"}, body), batch()
    assert len(banked(of)) == 2
    before = of(**inputs).logits
    of.save_pretrained(tmp_path)
    again, said = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    first, *others = maps(again.attentions)
    assert all(each is first for each in others) and any(each is first for each in again.modules())
    assert torch.equal(again(**inputs).logits, before)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert maps(half.attentions)[1].weight.dtype == torch.bfloat16
    again.train().gradient_checkpointing_enable()
    again(**inputs, labels=inputs["input_ids"]).loss.backward()
    of.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    torch.testing.assert_close(first.weight.grad, maps(of.attentions)[0].weight.grad, atol=1e-6, rtol=1e-5)
