"""Means over tokens that gates read: what counts, documents, states."""

import pytest
import torch
from tests.oracles.reference import batch, close, make

from manyheads import Cache, Links, Site
from manyheads.attention.pool import running_mean, whole_mean
from manyheads.core.mask import Axis


def mean(x, *, mask=None, axis=None, causal=True, state=None, context=None):
    site = Site(causal=causal, cross=context is not None)
    flow = make("gqa + rope(none)", dim=x.shape[-1], site=site)._flow(x, axis, mask, None, context, None)
    flow.state = state or {}
    got = running_mean(flow, "mean") if causal else whole_mean(flow, context is not None)
    return got, flow.new_state


def test_padding_does_not_count_even_where_it_is_not_a_number():
    x, valid = batch(), torch.arange(9)[None] >= torch.tensor([[2], [0]])
    broken = x.masked_fill(~valid[..., None], float("nan"))
    got, _ = mean(broken, mask=valid)
    close(got[0, 2:], mean(x[:1, 2:])[0][0])
    close(got[0, :2], torch.zeros(2, 24).double())
    close(mean(broken, mask=valid, causal=False)[0][0, 0], x[0, 2:].mean(0))


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_that_a_mask_hides_from_itself_is_padding(causal):
    x = batch()
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    mask[..., 3] = False
    counted = torch.arange(9) != 3
    got, _ = mean(x, mask=mask, causal=causal)
    want, _ = mean(x[:, counted], causal=causal)
    close(got[:, counted] if causal else got, want)


@pytest.mark.parametrize("shape", [(1, 9), (9, 1)])
def test_one_row_of_a_mask_serves_all(shape):
    x, counted = batch(), torch.arange(9) % 3 > 0
    got, _ = mean(x, mask=counted.view(1, 1, *shape), causal=False)
    close(got, x[:, counted].mean(1, keepdim=True))


def test_cross_attention_counts_what_a_query_sees():
    x, context = batch(tokens=2), batch(tokens=5)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()[None, None]
    got, _ = mean(x, mask=mask, context=context, causal=False)
    close(got, torch.stack([context[:, :2].mean(1), context[:, 2:].mean(1)], 1))
    close(mean(x, context=x, causal=False, mask=mask[..., :2])[0][:, 0], x.mean(1))


@pytest.mark.parametrize("causal", [True, False])
def test_documents_have_means_of_their_own(causal):
    x, segment = batch(), torch.tensor([[0] * 4 + [1] * 5])
    got, _ = mean(x, axis=Axis(9, 0, segment=segment), causal=causal)
    for part in (slice(0, 4), slice(4, 9)):
        want, _ = mean(x[:, part], causal=causal)
        close(got[:, part], want.expand_as(got[:, part]))


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_a_document_goes_on_in_the_next_block(block):
    x, segment, state = batch(), torch.tensor([[0] * 4 + [1] * 5, [7] * 6 + [0] * 3]), {}
    full, _ = mean(x, axis=Axis(9, 0, segment=segment))
    for at in range(0, 9, block):
        cut = slice(at, at + block)
        axis = Axis(x[:, cut].shape[1], at, segment=segment[:, cut])
        got, state = mean(x[:, cut], axis=axis, state=state)
        close(got, full[:, cut])


def test_sums_are_kept_in_float32():
    x = 1 + batch(tokens=2000, size=1).bfloat16() / 8
    got, state = mean_in_bfloat16(x)
    assert got.dtype == torch.bfloat16 and state["mean"].dtype == torch.float32
    close(got[:, -1].double(), x.double().mean(1), 1e-2)


def mean_in_bfloat16(x):
    flow = make("gqa").bfloat16()._flow(x, None, None, None, None, None)
    return running_mean(flow, "mean"), flow.new_state


def test_a_reader_of_other_rows_with_a_state_does_not_go_back():
    """Such a layer has cached no row of its own, but its state has moved on."""
    owner = make("gqa", site=Site(0, 2))
    reader = make("gqa + mae(width=4)", site=Site(1, 2, kv_source=0))
    x, cache, links = batch(), Cache(), Links()
    with torch.no_grad():
        reader(owner(x, cache=cache, links=links), cache=cache, links=links)
    with pytest.raises(ValueError, match="'mae' keeps no history"):
        cache.rollback(1)
    assert not cache.is_croppable
