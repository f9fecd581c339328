"""What every scan promises: memory linear in the length of a pass, a state of one size, refusals that say why."""

from functools import partial

import pytest
import torch

import manyheads as mh
from manyheads import Cache, OptionError, SpecError
from manyheads.bench.timing import kept_for_backward
from manyheads.core.mask import Axis, Mask
from manyheads.core.registry import all_parts
from manyheads.core.spec import Spec
from manyheads.stack import Decoder, Encoder
from manyheads.testing import Case
from manyheads.testing.conformance import refusal


def line(scan):
    return ("features + " if "positive" in scan.needs else "") + str(Spec((scan,)))


SCANS = [
    scan
    for part in all_parts().values()
    for scan in (part(**given) for given in part.examples)
    if part.stage == "scan" and refusal(Spec.parse(line(scan)).parts) is None
]
STATES = {scan: mh.Attention(line(scan), 24, 4).scan.states for scan in SCANS}  # type: ignore[union-attr]
KEPT = [scan for scan, states in STATES.items() if states]
CONSTANT = [scan for scan in KEPT if not any(state.every for state in STATES[scan].values())]


@pytest.mark.parametrize("scan", CONSTANT, ids=line)
def test_memory_is_linear_in_the_length(scan):
    layer = mh.Attention(line(scan), 24, 4)
    inputs = (torch.randn(1, tokens, 24) for tokens in (512, 1024))
    short, long = (kept_for_backward(partial(layer, x), layer.parameters()) for x in inputs)
    assert short < long < 2.1 * short


@pytest.mark.parametrize("scan", CONSTANT, ids=line)
def test_the_state_does_not_grow(scan):
    layer, cache, sizes = mh.Attention(line(scan), 24, 4).eval(), Cache(), []
    with torch.no_grad():
        for tokens in (7, 1, 200, 1):
            layer(torch.randn(2, tokens, 24), cache=cache)
            sizes.append(cache.bytes())
    assert len({*sizes}) == 1 and cache.length() == 209
    cost = layer.spec.cost(24, 4, layer.site)
    assert sizes[0] == 2 * cost.cache_bytes(209) and cost.cache_floats == 0


@pytest.mark.parametrize("scan", KEPT, ids=line)
def test_padding_leaves_the_state_as_it_is(scan):
    layer, cache = Case(line(scan)).layer(), Cache()
    with torch.no_grad():
        layer(torch.randn(2, 5, 24, dtype=torch.float64), cache=cache)
        before = {name: state.clone() for name, state in cache.state(0).items()}
        x = torch.full((2, 3, 24), torch.nan, dtype=torch.float64)
        layer(x, mask=torch.zeros(2, 3, dtype=torch.bool), cache=cache)
    assert before and all(torch.equal(cache.state(0)[name], state) for name, state in before.items())


@pytest.mark.parametrize("scan", SCANS, ids=line)
def test_a_fork_goes_its_own_way(scan):
    layer, cache = Case(line(scan)).layer(), Cache()
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)
        layer(x[:, :5], cache=cache)
        fork = cache.fork(torch.tensor([1, 0]))
        layer(torch.randn(2, 2, 24, dtype=torch.float64), cache=cache)
        torch.testing.assert_close(layer(x[:, 5:].flip(0), cache=fork), want[:, 5:].flip(0))


@pytest.mark.parametrize("scan", SCANS, ids=line)
@pytest.mark.parametrize(
    "other, fact",
    [("talking_heads", "scores"), ("entmax", "scores"), ("window(4)", "bare scores"), ("alibi", "bare scores")],
)
def test_what_has_no_scores_refuses_what_works_on_them(scan, other, fact):
    with pytest.raises(SpecError, match=f"needs {fact!r}"):
        mh.Attention(f"{other} + {line(scan)}", 24, 4)


@pytest.mark.parametrize("scan", SCANS, ids=line)
def test_a_causal_scan_is_no_encoder(scan):
    if "causal" in scan.needs:
        with pytest.raises(OptionError, match=r"needs 'causal'.*in order"):
            Encoder(line(scan), dim=24, heads=4, layers=1)


def test_masks_over_pairs_are_refused():
    layer, x = mh.Attention("retention", 24, 4), torch.randn(1, 4, 24)
    window = Mask(Axis(4, 0), Axis(4, 0), (lambda q, k: torch.ones(1, 1, 4, 4, dtype=torch.bool),))
    for mask in (torch.ones(1, 1, 4, 4, dtype=torch.bool), window):
        with pytest.raises(ValueError, match=r"\[B, T\] mask"):
            layer(x, mask=mask)
    with pytest.raises(ValueError, match=r"reads the rows|own rows"):
        Decoder(10, "retention", dim=24, heads=4, layers=2, kv_source=[None, 0])
