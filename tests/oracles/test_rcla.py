"""Oracles of training under random maps."""

import copy
from collections import Counter

import pytest
import torch
from tests.oracles.reference import batch, close, differ
from tests.oracles.stacks import make_stack
from tests.stack.tiny import batch as prompts
from tests.stack.tiny import model

from manyheads import Cache, Links, OptionError
from manyheads.convert.share import share_layers
from manyheads.stack.maps import sources_of
from manyheads.stack.rcla import RCLA


def test_never_redirected_is_the_baseline_bit_for_bit():
    stack, x = make_stack("gqa(kv_heads=2)", 4).train(), batch()
    want = stack(x)
    rcla = RCLA(stack, 0.0)
    assert torch.equal(stack(x), want)
    rcla.remove()
    RCLA(stack, 1.0)
    differ(stack(x), want)
    assert torch.equal(stack.eval()(x), want), "evaluation reads a layer's own rows"


def test_always_redirected():
    rcla = RCLA(make_stack("gqa", 5), 1.0)
    for _ in range(20):
        route = rcla.draw()
        assert set(route) == {1, 2, 3, 4} and route[1] == 0 and all(at < layer for layer, at in route.items())


def test_frequencies():
    rcla, n = RCLA(make_stack("gqa", 4), 0.6), 4000
    seen = Counter((layer, at) for _ in range(n) for layer, at in rcla.draw().items())
    for layer in range(1, 4):
        want = [n * 0.4, *[n * 0.6 / layer] * layer]
        own = n - sum(seen[layer, at] for at in range(layer))
        got = [own, *(seen[layer, at] for at in range(layer))]
        assert sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True)) < 20  # chi-square, at most 3 degrees


def test_seeds():
    one, two, other = (RCLA(make_stack("gqa", 6), seed=seed) for seed in (1, 1, 2))
    torch.manual_seed(5)
    first = [one.draw() for _ in range(5)]
    torch.manual_seed(6)
    assert first == [two.draw() for _ in range(5)] != [other.draw() for _ in range(5)]


def test_sources():
    stack = make_stack("gqa", 5)
    assert all(at == layer - 1 for layer, at in RCLA(stack, 1.0, source="previous").draw().items())
    assert RCLA(stack, 1.0, source="cla(2)").draw() == {1: 0, 3: 2}, "a coin between the leader and itself"
    mixed = make_stack(["gqa + window(3)", "gqa", "gqa + window(3)", "gqa"], 4)
    assert RCLA(mixed).choices == [[], [], [0, 1], [1]], "a full layer never reads a window's rows"


@pytest.mark.parametrize("line", ["cla(2)", "owners([0, 3])", "owners([0])"])
def test_a_route_is_what_a_map_makes_of_the_model(line):
    of, inputs = model("gqa", "llama"), prompts()
    sources = sources_of(line, 4)
    route = {layer: at for layer, at in enumerate(sources) if at is not None}
    with torch.no_grad():
        routed = of(**inputs, links=Links(route=route)).logits
        kept = share_layers(copy.deepcopy(of), line)
        torch.testing.assert_close(kept(**inputs).logits, routed)
    cache = Cache()
    kept(**inputs, cache=cache)
    assert sum(bool(store.growing) for store in cache.layers) == sources.count(None)


def test_gradients_go_where_rows_are_read():
    stack, x = make_stack("gqa(kv_heads=2)", 3), batch()
    stack(x, links=Links(route={1: 0, 2: 0})).pow(2).sum().backward()
    assert [layer.project.k_proj.weight.grad is not None for layer in stack.attentions] == [True, False, False]
    stack.zero_grad()
    stack(x, links=Links(route={1: 0, 2: 1})).pow(2).sum().backward()
    assert stack.attentions[1].project.k_proj.weight.grad.abs().sum() > 0, "its own rows, whatever it reads itself"
    assert stack.attentions[2].project.k_proj.weight.grad is None


def test_checkpointing_computes_the_same_draw_again():
    gradients = []
    for checkpoint in (False, True):
        stack, x = make_stack("gqa(kv_heads=2)", 4, checkpoint=checkpoint).train(), batch()
        RCLA(stack, 0.7, seed=3)
        for _ in range(3):
            stack(x).pow(2).sum().backward()
        gradients.append([p.grad for p in stack.parameters()])
    for one, two in zip(*gradients, strict=True):
        close(one, two, 1e-9)


def test_leading_layers_cache_the_same_under_any_map():
    of, caches = model("gqa", "llama"), []
    for line in ("owners([0, 1])", "owners([0, 1, 3])"):
        caches.append(Cache())
        with torch.no_grad():
            share_layers(copy.deepcopy(of), line)(**prompts(), cache=caches[-1])
    for layer in (0, 1):
        a, b = (cache.site(layer).growing["k"].rows() for cache in caches)
        assert torch.equal(a, b)


def test_it_trains():
    of, inputs = model("gqa", "own", initializer_range=0.1).train(), prompts()
    RCLA(of, 0.5)
    optimiser, losses = torch.optim.Adam(of.parameters(), 1e-2), []
    for _ in range(15):
        loss = of(**inputs, labels=inputs["input_ids"]).loss
        optimiser.zero_grad(), loss.backward(), optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_refusals():
    with pytest.raises(OptionError, match=r"p=1\.5 is a probability"):
        RCLA(make_stack("gqa", 2), 1.5)
    with pytest.raises(OptionError, match="layer 1 reads from another"):
        RCLA(make_stack("gqa", 2, kv_source="cla(2)"))
    with pytest.raises(OptionError, match="cannot read the rows of layer 0"):
        RCLA(make_stack(["gqa", "gqa(kv_heads=2)"], 2), source="cla(2)")
    with pytest.raises(OptionError, match="must begin with 0"):
        share_layers(model("gqa", "llama"), "owners([1])")
