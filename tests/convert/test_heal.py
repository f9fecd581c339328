import copy
import dataclasses

import pytest
import torch
from tests.convert.tiny import BASE, DIM, inputs, layer, measured, out, whole

from manyheads.convert.heal import LayerwiseHeal
from manyheads.convert.moves.gauge import gauge
from manyheads.convert.moves.gqa import ToGQA
from manyheads.convert.moves.mla import ToMLA, choose

QUICK = LayerwiseHeal(steps=16)


def latent(source, x):
    stats = measured(source, x)
    return ToMLA(5, choose(gauge(source, stats).damage, 1))(source, stats)


def merged(source, x):
    return ToGQA(1)(source, measured(source, x))


def problem(source, x, dtype=torch.float32):
    """What a layer gets: inputs, the output to reach, and the source's stream after it."""
    y = out(source, x)
    return [t.to(dtype) for t in (x, y, x + y)]


def metric_of(seed=0):
    factor = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(seed))
    return factor @ factor.T


CASES = [(BASE, latent), (BASE, merged), (f"{BASE} + window(5)", latent), (f"{BASE} + window(5)", merged),
         (f"{BASE} + softmax(cap=3.0) + moh(top=2)", latent), ("gqa(kv_heads=2)", merged)]  # fmt: skip


@pytest.mark.parametrize(("spec", "convert"), CASES)
@pytest.mark.parametrize("metric", [None, metric_of()])
def test_healing_lowers_the_error_in_place(spec, convert, metric):
    source, x = layer(spec), inputs(windows=8)
    made, given = convert(source, x).float(), problem(source, x)
    weights = {name: w.data_ptr() for name, w in made.named_parameters()}
    bare = QUICK.error(made, *given, metric)
    left = QUICK(made, *given, metric)
    assert left < 0.8 * bare
    assert left == pytest.approx(QUICK.error(made, *given, metric), rel=1e-6)
    assert {name: w.data_ptr() for name, w in made.named_parameters()} == weights


def test_more_steps_heal_more():
    source, x = layer(), inputs(windows=8)
    left = [LayerwiseHeal(steps=steps)(latent(source, x).float(), *problem(source, x)) for steps in (0, 4, 40)]
    assert left == sorted(left, reverse=True)


def test_no_steps_are_the_bare_error_and_touch_nothing():
    source, x = layer(), inputs()
    made, given = latent(source, x).float(), problem(source, x)
    before = copy.deepcopy(made.state_dict())
    bare = dataclasses.replace(QUICK, steps=0)
    assert bare(made, *given) == bare.error(made, *given)
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())


def test_the_error_is_relative_and_weighs_tokens_by_their_stream():
    source, x = layer(), inputs()
    made = latent(source, x)
    given, y, stream = problem(source, x, torch.float64)
    weights = 1 / stream.pow(2).mean(-1)
    weights[:, 0] *= QUICK.sink
    left = (out(made, given) - y).pow(2).sum(-1)
    want = (weights * left).sum() / (weights * y.pow(2).sum(-1)).sum()
    assert QUICK.error(made, given, y, stream) == pytest.approx(want.item(), rel=1e-9)
    assert QUICK.error(made, given, y, 10 * stream) == pytest.approx(want.item(), rel=1e-9)
    assert QUICK.error(source, x, y, stream) < 1e-20


def test_a_flat_metric_is_no_metric():
    source, x = layer(), inputs()
    made, given = latent(source, x), problem(source, x, torch.float64)
    assert QUICK.error(made, *given, 7 * torch.eye(DIM)) == pytest.approx(QUICK.error(made, *given), rel=1e-6)


def seeded(seed):
    return LayerwiseHeal(steps=6, batch=32, seed=seed)  # two windows a step


def test_the_same_seed_heals_the_same_and_leaves_the_global_one_alone():
    source, x = layer(), inputs(windows=8)
    given = problem(source, x)
    made = [latent(source, x).float() for _ in range(3)]
    state = torch.get_rng_state()
    errors = [seeded(0)(each, *given) for each in made[:2]]
    assert torch.equal(torch.get_rng_state(), state)
    other = seeded(1)(made[2], *given)
    assert errors[0] == errors[1] != other
    for name, tensor in made[0].state_dict().items():
        assert torch.equal(tensor, made[1].state_dict()[name])


@pytest.mark.parametrize("convert", [lambda source, x: whole(source)(source, measured(source, x)),
                                     lambda source, x: ToGQA(2)(source, measured(source, x))])  # fmt: skip
def test_an_exact_layer_stays_exact(convert):
    source, x = layer(), inputs()
    made = convert(source, x).float()
    y = out(source, x)
    left = QUICK(made, *(t.float() for t in (x, y, x + y)))
    assert left < 1e-9
    assert (out(made, x.float()) - y).abs().max() < 1e-3 * y.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_keep_their_dtype(dtype):
    """The fit runs in the dtype of its inputs."""
    source, x = layer(), inputs(windows=8)
    made = latent(source, x).to(dtype)
    given = problem(source, x, torch.float64 if dtype == torch.float64 else torch.float32)
    bare = QUICK.error(made, *given)
    assert QUICK(made, *given) < 0.8 * bare
    assert {w.dtype for w in made.parameters()} == {dtype}


def test_positions_are_those_of_the_inputs():
    source, x = layer(), inputs(windows=8)
    positions = torch.arange(16).repeat(8, 1)
    positions[::2, 7:] += 300
    y = source(x, position_ids=positions)[0]
    made = whole(source)(source, measured(source, x)).float()
    given = [t.float() for t in (x, y, x + y)]
    assert QUICK.error(made, *given, None, positions) < 1e-9
    assert QUICK.error(made, *given) > 1e-3
    merge = merged(source, x).float()
    assert QUICK(merge, *given, None, positions) < 0.9 * QUICK.error(merged(source, x).float(), *given, None, positions)


def test_half_precision_products_heal_nearly_as_well():
    source, x = layer(), inputs(windows=8)
    left = {}
    for bfloat16 in (False, True):
        made = merged(source, x).float()
        dataclasses.replace(QUICK, bfloat16=bfloat16)(made, *problem(source, x))
        left[bfloat16] = QUICK.error(made, *problem(source, x))
    assert left[True] < 1.1 * left[False] + 1e-4


def test_fewer_windows_than_a_batch_are_enough():
    source, x = layer(), inputs(windows=1)
    made, given = latent(source, x).float(), problem(source, x)
    bare = QUICK.error(made, *given)
    assert QUICK(made, *given) < bare


def test_healing_makes_good_what_earlier_layers_lost():
    """The target is the source's stream after attention minus the stream that comes in, so a shift is undone."""
    source, x = layer(), inputs(windows=8)
    y = out(source, x)
    shift = y.mean((0, 1))
    made = ToGQA(2)(source, measured(source, x)).float()
    given = [t.float() for t in (x, y - shift, x + y)]
    assert QUICK(made, *given) < 0.5 * QUICK.error(source.float(), *given)
