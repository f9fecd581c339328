"""Oracles of `lycheedecode`."""

import pytest
import torch
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
    triangle,
    twin,
    weights,
)
from tests.oracles.stacks import hold_to_the_laws, make_stack

from manyheads import Attention, Links, OptionError, Site
from manyheads.attention.hardkuma import HardKuma, ascend

WIDTH = DIM // HEADS


def maps(layer, x):
    """Attention maps `[B, H, T, S]` and values of `gqa`."""
    p = layer.project
    q, k, v = (heads_of(f(x), n) for f, n in ((p.q_proj, HEADS), (p.k_proj, p.kv_heads), (p.v_proj, p.kv_heads)))
    k, v = (y.repeat_interleave(HEADS // p.kv_heads, 1) for y in (rope(k), v))
    return weights(rope(q), k, WIDTH**-0.5), v


def sets(a, slots, budget, sinks=1, group="max"):
    """Sets as a mask `[B, slots, T, S]`, from maps, by brute force."""
    a = a.unflatten(1, (slots, -1))
    a = a.amax(2) if group == "max" else a.mean(2)
    chosen = torch.zeros_like(a, dtype=torch.bool)
    for b, g, t in ((b, g, t) for b in range(len(a)) for g in range(slots) for t in range(a.shape[2])):
        always = {t, *range(min(sinks, t + 1))}
        others = sorted(set(range(t + 1)) - always, key=lambda s: -a[b, g, t, s])
        chosen[b, g, t, [*always, *others][:budget] if len(always) <= budget else [*always]] = True
    return chosen


def on_set(a, v, mask):
    """softmax on a set: the map restricted to it and renormalised."""
    a = a * mask.repeat_interleave(a.shape[1] // mask.shape[1], 1)
    return (a / a.sum(-1, keepdim=True)) @ v


def layers(count, base="gqa(kv_heads=2)", options="budget=3", **given):
    """Lone layers in their places, so that all may see the same x."""
    spec = f"{base} + lycheedecode({options})"
    return [make(spec, seed=i, site=Site(i, count), **given) for i in range(count)]


@pytest.mark.parametrize(
    "spec",
    [
        "gqa(kv_heads=2) + lycheedecode(budget=3)",
        "gqa + lycheedecode(budget=3, retrieval=[1, 2], group=mean, sinks=0)",
        "gqa(kv_heads=2) + alibi + lycheedecode(budget=3, retrieval=[1])",
        "mla + lycheedecode(budget=4, retrieval=[0, 3])",
        "gqa + lycheedecode(budget=3, retrieval=[1]) + window([5, 6, 4, 7]) + softmax(cap=3.0) + moh(top=2)",
    ],
)
def test_laws_of_a_stack(spec):
    hold_to_the_laws(spec, 3)


def test_layers_may_differ_in_windows_budgets_and_kinds():
    hold_to_the_laws(
        [
            "gqa + window(4) + lycheedecode(budget=3)",
            "gqa + lycheedecode(budget=3, retrieval=[0])",
            "gqa + lycheedecode(budget=5, retrieval=[2]) + window(5)",
            "gqa + lycheedecode(budget=3)",
        ],
        4,
    )


@pytest.mark.parametrize("options", ["budget=9", "budget=3, retrieval=[0, 1]"])
def test_large_budgets_and_heads_that_all_retrieve_are_full_attention(options):
    stack, x = make_stack(f"gqa(kv_heads=2) + lycheedecode({options})", 3), batch()
    plain = make_stack("gqa(kv_heads=2)", 3)
    plain.load_state_dict(stack.state_dict())
    close(stack(x), plain(x))


@pytest.mark.parametrize("sinks", [0, 1, 2])
@pytest.mark.parametrize("group", ["max", "mean"])
def test_sparse_heads_written_out(group, sinks):
    """Full attention with everything outside the set of layer 0 hidden; the set passes on through sparse layers."""
    first, second, third = layers(3, options=f"budget=3, group={group}, sinks={sinks}")
    x, links = batch(), Links()
    close(first(x, links=links), twin(first, "gqa(kv_heads=2)")(x))
    chosen = sets(maps(first, x)[0], 2, 3, sinks, group)
    for layer in (second, third):
        close(layer(x, links=links), join(on_set(*maps(layer, x), chosen), layer.project.o_proj))
    assert torch.equal(links.handed[1], links.handed[0]) and 2 not in links.handed


def test_retrieval_heads_refresh_their_own_sets_alone():
    first, second, third = layers(3, "gqa", "budget=3, retrieval=[2]")
    x, links = batch(), Links()
    for layer in (first, second):
        layer(x, links=links)
    mine = sets(maps(first, x)[0], HEADS, 3)
    mine[:, 2] = sets(maps(second, x)[0], HEADS, 3)[:, 2]
    a, v = maps(third, x)
    o = on_set(a, v, mine)
    o[:, 2] = (a @ v)[:, 2]
    close(third(x, links=links), join(o, third.project.o_proj))


def test_a_copy_of_the_layer_below_has_its_own_top_keys():
    first, second = layers(2)
    second.load_state_dict(first.state_dict())
    x, links = batch(), Links()
    first(x, links=links)
    a, v = maps(second, x)
    close(second(x, links=links), join(on_set(a, v, sets(a, 2, 3)), second.project.o_proj))


def test_permuting_heads_in_all_layers():
    x, order = batch(), [2, 0, 3, 1]
    stack = make_stack("gqa + lycheedecode(budget=3, retrieval=[1])", 3)
    state = dict(stack.state_dict())
    for name, value in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name] = value.unflatten(0, (HEADS, -1))[order].flatten(0, 1)
        if name.endswith("o_proj.weight"):
            state[name] = value.unflatten(1, (HEADS, -1))[:, order].flatten(1)
    other = make_stack(f"gqa + lycheedecode(budget=3, retrieval=[{order.index(1)}])", 3)
    other.load_state_dict(state)
    close(other(x), stack(x))


def test_truncation_error():
    """|o_full - o_sparse| <= 2 (1 - mass of the set) max |v|."""
    first, second = layers(2)
    x, links = batch(), Links()
    first(x, links=links)
    a, v = maps(second, x)
    chosen = sets(maps(first, x)[0], 2, 3)
    missed = 1 - (a * chosen.repeat_interleave(2, 1)).sum(-1)
    error = (a @ v - on_set(a, v, chosen)).norm(dim=-1)
    reach = torch.where(triangle()[None, None, :, :, None], v[:, :, None], 0.0).norm(dim=-1).amax(-1)
    assert (error <= 2 * missed * reach + 1e-12).all() and missed.max() > 0.1


def test_one_new_token_reads_only_its_set():
    stack, x, read = make_stack("gqa + lycheedecode(budget=3, retrieval=[1])", 2), batch(), []
    select = stack.attentions[1].selects[0]
    split = select.split

    def spy(call, flow):
        calls = split(call, flow)
        read.append([(each.q.shape[1], each.k.shape[2]) for each in calls])
        return calls

    select.split = spy
    decoded(stack, x)
    assert read[-1] == [(1, TOKENS), (3, 3)]


def test_published_prefill_is_full_attention():
    stack, x = make_stack("gqa + lycheedecode(budget=3, prefill=full)", 3), batch()
    plain = make_stack("gqa", 3)
    plain.load_state_dict(stack.state_dict())
    close(stack(x), plain(x))
    differ(decoded(stack, x), plain(x))


def learned(seed=0, **given):
    return make("gqa(kv_heads=2) + lycheedecode(budget=3, learn=true)", seed=seed, site=Site(1, 3), **given)


def test_training_mixes_both_kinds(monkeypatch):
    first = layers(3)[0]
    layer, x, z = learned().train(), batch(), torch.tensor([0.3, 1.0]).double()
    drawn, links = [z], Links()
    monkeypatch.setattr(HardKuma, "forward", lambda self: drawn[-1])
    first(x, links=links)
    chosen = sets(maps(first, x)[0], 2, 3)
    a, v = maps(layer, x)
    full, sparse, share = a @ v, on_set(a, v, chosen), z.repeat_interleave(2)[:, None, None]
    close(layer(x, links=links), join(share * full + (1 - share) * sparse, layer.project.o_proj))
    close(links.aux["1.lycheedecode"], (1 - layer.selects[0].gates.zero()).sum())
    own, handed = sets(a, 2, 3), links.handed[1]
    for g in range(2):  # the full map's set whatever z is
        assert torch.equal(own[0, g, 8].nonzero()[:, 0], (8 - handed[0, g, 8]).sort().values)
    for z, want in ((torch.ones(2), full), (torch.zeros(2), sparse)):
        drawn.append(z.double())
        close(layer(x, links=links), join(want, layer.project.o_proj))


def test_gated_handover(monkeypatch):
    spec = "gqa(kv_heads=2) + lycheedecode(budget=3, learn=true, handover=gated)"
    first, layer, x, links = layers(3)[0], make(spec, seed=1, site=Site(1, 3)).train(), batch(), Links()
    monkeypatch.setattr(HardKuma, "forward", lambda self: torch.tensor([0.2, 0.7]).double())
    first(x, links=links)
    layer(x, links=links)
    assert torch.equal(links.handed[1][:, 0], links.handed[0][:, 0])
    assert not torch.equal(links.handed[1][:, 1], links.handed[0][:, 1])


def test_gates_learn_and_decide():
    stack, x = make_stack("gqa(kv_heads=2) + lycheedecode(budget=3, learn=true)", 3), batch()
    links = Links()
    stack.train()(x, links=links).pow(2).sum().backward()
    for layer in stack.attentions[1:]:
        assert (layer.selects[0].gates.shape.grad != 0).all()
    stack.eval()
    for layer in stack.attentions[1:]:
        gates = layer.selects[0].gates
        gates.shape.data[:] = torch.tensor([[2.0, -2.0], [-2.0, 2.0]])
        assert layer.selects[0].retrieves() == [True, False]
    fixed = make_stack("gqa(kv_heads=2) + lycheedecode(budget=3, retrieval=[0])", 3)
    fixed.load_state_dict(stack.state_dict(), strict=False)
    close(stack(x), fixed(x))
    close(decoded(stack, x), stack(x))


def test_hard_kumaraswamy():
    """Closed forms, the paper's figures and two million draws."""
    gate = HardKuma(1).double()
    gate.shape.data[:] = torch.tensor([[1.3], [0.7]]).log()
    exact = [gate.zero().item(), gate.one().item(), gate.mean().item()]
    assert exact == pytest.approx([0.0278, 0.2091, 0.6628], abs=6e-5)
    many = HardKuma(2_000_000)
    many.shape.data[:] = torch.tensor([[1.3], [0.7]]).log()
    z = many().detach()
    drawn = [(z == 0).double().mean().item(), (z == 1).double().mean().item(), z.double().mean().item()]
    assert drawn == pytest.approx(exact, abs=2e-3)
    uniform = HardKuma(1).double()
    assert uniform.zero().item() == pytest.approx(0.1 / 1.2) and uniform.mean().item() == pytest.approx(0.5)


def test_multiplier():
    assert ascend(0.5, 40.0, 32.0, 0.01) == pytest.approx(0.58)
    assert ascend(0.5, 30.0, 32.0, 0.01) == pytest.approx(0.48)
    assert ascend(0.01, 30.0, 32.0, 0.01) == 0.0


def test_cost():
    base = make("gqa(kv_heads=2)").spec.cost(DIM, HEADS)
    for layer, extra in ((0, 0), (1, 2 * 2)):
        cost = learned().spec.cost(DIM, HEADS, Site(layer, 3))
        assert cost.parameters - base.parameters == extra and cost.cache_floats == base.cache_floats
    assert make("gqa + lycheedecode(budget=3)", site=Site(1, 2)).spec.cost(DIM, HEADS).parameters == 4 * DIM**2


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gqa + lycheedecode(budget=1)", "lycheedecode: budget=1 keys with sinks=1; at least 2"),
        ("gqa + lycheedecode(sinks=-1)", "lycheedecode: budget=4096 keys with sinks=-1"),
        ("gqa(kv_heads=2) + lycheedecode(retrieval=[2])", r"lycheedecode: retrieval=\[2\] of 2 key heads; .* 0 to 1"),
        ("mtla + lycheedecode", "'lycheedecode' needs 'token keys' .*, which 'mtla' breaks"),
        ("lycheedecode + talking_heads", "'talking_heads' needs 'one map' .*, which 'lycheedecode' breaks"),
        ("aha + lycheedecode", "'lycheedecode' needs 'one map' .*, which 'aha' breaks"),
    ],
)
def test_refusals(spec, said):
    with pytest.raises(OptionError, match=said):
        Attention(spec, DIM, HEADS)


def test_a_layer_without_sets_below_says_so():
    with pytest.raises(ValueError, match=r"layer 1 reads the sets that 2 key heads of layer 0 choose .* hold none"):
        layers(2)[1](batch())
    links = Links()
    layers(2, "gqa")[0](batch(), links=links)
    with pytest.raises(ValueError, match="hold others"):
        layers(2)[1](batch(), links=links)
    assert layers(2)[1].explain(1).kernel == "sdpa"
