"""What every registered aggregator is held to, with its defaults and with each of its examples."""

import math

import pytest
import torch

from manyheads.aggregate import Streamed, build, read_aggregator
from manyheads.aggregate.aggregator import KINDS

WIDTH, TOKENS = 8, 6
CLOSE = {"atol": 1e-9, "rtol": 1e-9}


def every():
    for name, kind in sorted(KINDS.items()):
        defaults = [] if any(not hasattr(kind, each) for each in kind.__dataclass_fields__) else [kind()]
        for options in [*defaults, *kind.examples()]:
            yield pytest.param(options, id=str(options) or name)


def made(options):
    agg = build(options, WIDTH).double().eval()
    with torch.no_grad():
        for parameter in agg.parameters():  # nothing is zero, as much is at the start
            parameter.add_(0.1 * torch.randn_like(parameter))
    return agg


def given(options, rows=3, tokens=TOKENS):
    """Tokens, a mask of which no row is whole, a query and a condition where they are needed."""
    tokens = options.tokens() or tokens
    x = torch.randn(rows, tokens, WIDTH, dtype=torch.float64)
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    if options.tokens() is None:
        mask[0, -1] = mask[1, 2] = False
    more = {"query": torch.randn(rows, 2, WIDTH).double(), "cond": torch.rand(rows, 1).double()}
    return x, mask, {name: value for name, value in more.items() if name in options.needs}


def alike(a, b):
    for one, two in zip(a, b, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, **CLOSE)


def rows_of(more, chosen):
    return {name: value[chosen] for name, value in more.items()}


@pytest.mark.parametrize("options", every())
def test_a_line_makes_it_and_it_makes_the_line(options):
    assert read_aggregator(str(options)) == options
    assert str(build(str(options), WIDTH).options) == str(options)


@pytest.mark.parametrize("options", every())
def test_shapes(options):
    agg, (x, mask, more) = made(options), given(options)
    found = agg(x, mask, **more)
    assert found.out.isfinite().all() and found.out.dim() == 3
    results = found.out.shape[1]
    if found.weights is not None:
        assert found.weights.shape[0] == len(x) and found.weights.shape[2:] == (results, x.shape[1])
        assert (found.weights.masked_select(~mask[:, None, None].expand_as(found.weights)) == 0).all()
    if found.assign is not None:
        assert found.assign.shape == mask.shape and (found.assign[~mask] == -1).all() and found.assign.max() < results
    if found.size is not None:
        assert found.size.shape == found.out.shape[:2]
    if options.merges:
        kept = torch.where(found.assign >= 0, 1.0, 0.0).sum(1)
        torch.testing.assert_close(found.size.sum(1).double(), kept.double(), **CLOSE)
        assert agg.unmerge(found, x).shape == (*x.shape[:2], found.out.shape[-1])


@pytest.mark.parametrize("options", every())
def test_what_is_in_padding_reaches_nothing(options):
    agg, (x, mask, more) = made(options), given(options)
    for bad in (math.nan, math.inf, 1e9):
        spoiled = x.masked_fill(~mask[..., None], bad).requires_grad_()
        alike(agg(spoiled, mask, **more), agg(x.masked_fill(~mask[..., None], 0), mask, **more))
        gradient = torch.autograd.grad(agg(spoiled, mask, **more).out.square().sum(), spoiled)[0]
        assert gradient.isfinite().all() and (gradient[~mask] == 0).all()


@pytest.mark.parametrize("options", every())
def test_padding_and_batch_mates_change_nothing(options):
    agg, (x, mask, more) = made(options), given(options)
    found = agg(x, mask, **more)
    alone = [agg(x[b : b + 1], mask[b : b + 1], **rows_of(more, slice(b, b + 1))).out[0] for b in range(len(x))]
    for one, other in zip(found.out, alone, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    if options.tokens() is None and not options.merges:  # of how many a merger leaves, the batch's length may decide
        for b in range(len(x)):
            short = agg(x[b : b + 1, mask[b]], **rows_of(more, slice(b, b + 1))).out[0]
            torch.testing.assert_close(found.out[b], short, **CLOSE)


@pytest.mark.parametrize("options", every())
def test_a_row_without_tokens_is_zero_and_passes_no_gradient(options):
    agg, (x, mask, more) = made(options), given(options)
    mask[1] = False
    x.requires_grad_()
    found = agg(x, mask, **more)
    assert (found.out[1] == 0).all() and (found.weights is None or (found.weights[1] == 0).all())
    assert found.size is None or (found.size[1] == 0).all()
    found.out[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in agg.parameters())
    assert x.grad.isfinite().all() and (x.grad[1] == 0).all()
    if options.tokens() is None:
        none = agg(x[:, :0], **more)
        assert (none.out == 0).all() and none.out.shape[0] == len(x)


@pytest.mark.parametrize("options", every())
def test_no_rows_give_no_results_of_the_usual_shape_and_rows_of_padding_zeros(options):
    agg, (x, mask, more) = made(options), given(options)
    none, of_none = agg(x, torch.zeros_like(mask), **more), rows_of(more, slice(0))
    assert all(each is None or (each == (-1 if each is none.assign else 0)).all() for each in none)
    found = [agg(x[:0], mask[:0], **of_none), agg(x[:0], **of_none)]
    if options.repeats:
        found.append(agg(x[:0], size=torch.ones(0, x.shape[1]), **of_none))
    if isinstance(agg, Streamed) and agg.exact:
        found.append(agg.finalize(agg.update(agg.init(0), x[:0])))
    for one, two in [(each, two) for no in found for each, two in zip(no, agg(x, **more), strict=True)]:
        assert one is None or (len(one), one.dim()) == (0, two.dim())
    assert {each.out.shape[-1] for each in found} == {none.out.shape[-1]}
    if options.tokens() is None:
        assert agg(x[:0, :0], **of_none).out.shape[::2] == found[0].out.shape[::2]


@pytest.mark.parametrize("options", every())
def test_the_order_of_a_set_does_not_count(options):
    if options.ordered or options.merges:
        pytest.skip("the order of its tokens counts, or it is one of its results")
    agg, (x, mask, more) = made(options), given(options)
    order = torch.randperm(x.shape[1])
    torch.testing.assert_close(agg(x[:, order], mask[:, order], **more).out, agg(x, mask, **more).out, **CLOSE)


@pytest.mark.parametrize("options", every())
def test_every_parameter_gets_a_gradient(options):
    agg, (x, mask, more) = made(options), given(options, rows=8)
    if not list(agg.parameters()):
        pytest.skip("it has none")
    agg(x, mask, **more).out.square().sum().backward()
    for name, parameter in agg.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("options", every())
def test_a_token_of_size_two_is_the_token_twice(options):
    agg, (x, mask, more) = made(options), given(options)
    size = torch.ones(mask.shape)
    size[:, 1] = 2
    if not options.repeats:
        with pytest.raises(ValueError, match="takes no size"):
            agg(x, mask, size=size, **more)
        return
    if options.merges:
        return  # which tokens merge is another question; sizes are held to above
    twice = torch.cat([x, x[:, 1:2]], 1), torch.cat([mask, mask[:, 1:2]], 1)
    torch.testing.assert_close(agg(x, mask, size=size, **more).out, agg(*twice, **more).out, **CLOSE)
    none = size.clone()
    none[:, 0] = 0
    torch.testing.assert_close(
        agg(x, mask, size=none, **more).out, agg(x[:, 1:], mask[:, 1:], size=size[:, 1:], **more).out, **CLOSE
    )


@pytest.mark.parametrize("options", every())
def test_blocks_give_what_one_pass_gives(options):
    agg, (x, mask, _) = made(options), given(options)
    if not isinstance(agg, Streamed) or not agg.exact:
        pytest.skip("it has no state, or blocks are part of what it computes")
    mask[2, :3] = False  # a block without a token
    whole = agg(x, mask).out
    state = agg.init(len(x))
    torch.testing.assert_close(agg.finalize(state).out, torch.zeros_like(whole), **CLOSE)
    states = [agg.update(agg.init(len(x)), x[:, a:b], mask[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 6))]
    for block in ((0, 3), (3, 4), (4, 6)):
        state = agg.update(state, x[:, slice(*block)], mask[:, slice(*block)])
    left = agg.merge(agg.merge(states[0], states[1]), states[2])
    right = agg.merge(states[2], agg.merge(states[1], states[0]))
    for each in (state, left, right):
        torch.testing.assert_close(agg.finalize(each).out, whole, **CLOSE)


@pytest.mark.parametrize("options", every())
def test_what_cannot_be_is_refused(options):
    agg, (x, mask, more) = made(options), given(options)
    with pytest.raises(ValueError, match=r"x is \[rows, tokens, 8\]"):
        agg(x[..., :-1], mask, **more)
    with pytest.raises(ValueError, match="mask is"):
        agg(x, mask[:, :-1], **more)
    with pytest.raises(ValueError, match="mask is bool"):
        agg(x, mask.double(), **more)
    if options.repeats:
        with pytest.raises(ValueError, match="from 0 on"):
            agg(x, mask, size=-torch.ones(mask.shape), **more)
    for name in options.needs:
        with pytest.raises(ValueError, match=f"needs a {name}"):
            agg(x, mask)
    for name in {"query", "cond"} - options.takes:
        with pytest.raises(ValueError, match=f"takes no {name}"):
            agg(x, mask, **{name: torch.zeros(len(x), 1, WIDTH)})
    if options.tokens() is not None:
        with pytest.raises(ValueError, match="it was built for"):
            agg(x[:, :-1], mask[:, :-1], **more)
