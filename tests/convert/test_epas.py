"""Progressive sharing: the schedule, what it leaves alone, and the family of models that it makes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from tests.convert.tiny import model, tokens

from manyheads import Cache, OptionError
from manyheads.convert.adopt import adopt
from manyheads.convert.epas import EPAS
from manyheads.convert.share import share_layers
from manyheads.stack.callback import ScheduleCallback

LAYERS = 4
MODES = pytest.mark.parametrize("mode, which", [("weights", "attn_source"), ("rows", "kv_source")])


@pytest.fixture
def adopted():
    return adopt(model("llama", LAYERS))


def logits(of, windows, **options):
    with torch.no_grad():
        return of(windows, **options).logits


def region(shared):
    return [None] * (LAYERS - shared) + [LAYERS - shared - 1] * shared


@pytest.mark.parametrize("layers, growth, until", [(3, 1, 0.5), (2, 2, 0.7), (2, 1, 1.0)])
def test_the_schedule(adopted, layers, growth, until):
    epas = EPAS(adopted, layers, growth=growth, until=until)
    interval = until * growth / layers
    for step in range(101):
        assert epas.at(step / 100) == min(growth * int(step / 100 / interval + 1e-9), layers)
    assert epas.at(0) == 0 and epas.at(until) == layers == epas.at(1)
    assert EPAS(adopted).layers == LAYERS // 2


@MODES
def test_any_number_of_layers(adopted, mode, which):
    """Sharing r layers is the fixed map of r layers; 0 is the model, bit for bit, whatever came before."""
    whole, inputs = copy.deepcopy(adopted), tokens(2)
    epas = EPAS(adopted, 3, mode=mode)
    for shared in (1, 3, 0, 2, 0):
        epas.share(shared)
        fixed = share_layers(copy.deepcopy(whole), **{which: region(shared)}) if shared else whole
        assert torch.equal(logits(adopted, inputs), logits(fixed, inputs))
        assert getattr(adopted.config, which) == region(shared)
    assert adopted.state_dict().keys() == whole.state_dict().keys()


@MODES
def test_decoding_and_the_cache(adopted, mode, which):
    epas, inputs = EPAS(adopted, 3, mode=mode), tokens(2)
    layout = adopted.attentions[0].layout
    for shared in range(4):
        epas.share(shared)
        cache = Cache()
        outs = [logits(adopted, part, cache=cache) for part in inputs.split((9, 1, 6), 1)]
        torch.testing.assert_close(torch.cat(outs, 1), logits(adopted, inputs, use_cache=False), atol=1e-4, rtol=1e-4)
        rows = 2 * LAYERS - shared if mode == "weights" else 2 * (LAYERS - shared)
        assert cache.bytes() == 4 * inputs.numel() * rows * layout.kv * layout.v_width


def test_layers_below_are_as_they_were(adopted):
    epas, inputs = EPAS(adopted, 3), tokens(2)

    def hidden():
        with torch.no_grad():
            return adopted(inputs, output_hidden_states=True, use_cache=False).hidden_states

    before = hidden()
    epas.share(2)
    for layer, (a, b) in enumerate(zip(before, hidden(), strict=True)):
        assert torch.equal(a, b) == (layer <= LAYERS - 2), "hidden state `layer` is what that layer reads"


def test_unused_weights_do_not_move(adopted):
    """AdamW with decay leaves what a layer that shares does not use; back in use, it is trained again."""
    adopted.train()
    epas, inputs = EPAS(adopted, 2), tokens(4)
    optimiser = torch.optim.AdamW(adopted.parameters(), 1e-2, weight_decay=0.5)
    projects = [layer.project for layer in adopted.attentions]

    def moved():
        before = {name: [getattr(p, name).weight.clone() for p in projects] for name in ("q_proj", "k_proj", "v_proj")}
        adopted(inputs, labels=inputs).loss.backward()
        optimiser.step(), optimiser.zero_grad()
        return {
            name: [not torch.equal(getattr(p, name).weight, old) for p, old in zip(projects, rows, strict=True)]
            for name, rows in before.items()
        }

    assert moved()["q_proj"] == [True] * 4
    epas.on_step(0.25)
    assert epas.shared == 1
    found = moved()
    assert found["q_proj"] == found["k_proj"] == [True, True, True, False] and found["v_proj"] == [True] * 4
    epas.on_step(1.0)
    assert moved()["q_proj"] == [True, True, False, False]
    adopted.eval()
    epas.share(0)
    assert not any(layer.training for layer in adopted.attentions)
    assert moved()["k_proj"] == [True] * 4


def test_the_callback_tells_it(adopted):
    epas = EPAS(adopted, 2)
    callback = ScheduleCallback(epas)
    for step, shared in ((0, 0), (1, 0), (3, 1), (5, 2), (10, 2)):
        callback.on_step_begin(None, SimpleNamespace(global_step=step, max_steps=10), None, adopted)
        assert epas.shared == shared


def test_refusals(adopted):
    for options, said in (
        ({"layers": 0}, "0 of 4 layers are to share; 1 to 3 can"),
        ({"layers": 4}, "4 of 4 layers"),
        ({"layers": 3, "growth": 2}, r"3 layers do not grow by 2; growth may be \[1, 3\]"),
        ({"growth": 0}, "do not grow by 0"),
        ({"until": 0.0}, "until=0"),
    ):
        with pytest.raises(OptionError, match=said):
            EPAS(adopted, **options)
    with pytest.raises(OptionError, match="3 layers are to share; the model is trained for 0 to 2"):
        EPAS(adopted, 2).share(3)
    windowed = adopt(model("qwen2", LAYERS, use_sliding_window=True, sliding_window=5, max_window_layers=2))
    with pytest.raises(ValueError, match="layer 2 cannot take the attention weights of layer 1"):
        EPAS(windowed, 2)
